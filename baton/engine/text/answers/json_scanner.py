"""Finds the end of a JSON value in text that arrives in pieces, and the first character that cannot belong to one.

Strict as JSON is, so that what it lets pass can be read by any reader of JSON.
"""

from __future__ import annotations

import re

from baton.engine.text.answers.deltas import Delta
from baton.engine.text.answers.reader import Reader, Steps, more

MAX_DEPTH = 200
_VALUE, _VALUE_OR_END, _KEY, _KEY_OR_END, _COLON, _AFTER, _STRING, _ESCAPE, _LITERAL = range(9)
_SPACE = re.compile(r"[ \t\r\n]+")
_RUNS = {
    _VALUE: _SPACE,
    _VALUE_OR_END: _SPACE,
    _KEY: _SPACE,
    _KEY_OR_END: _SPACE,
    _COLON: _SPACE,
    _AFTER: _SPACE,
    _STRING: re.compile(r'[^"\\\x00-\x1f]+'),
    _LITERAL: re.compile(r"[-+.0-9A-Za-z]+"),
}
_WHOLE_LITERAL = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null", re.ASCII)
_LITERAL_START = frozenset("-0123456789tfn")
_HEX = frozenset("0123456789abcdefABCDEF")


class JsonScanner:
    """Follows one JSON value. `is_done`: the value has ended; `is_bad`: the next character cannot belong to it."""

    def __init__(self) -> None:
        self.is_done = False
        self.is_bad = False
        self._state = _VALUE
        self._closers: list[str] = []
        self._is_key = False
        self._literal: list[str] = []
        self._num_hex = 0

    def scan(self, text: str, at: int) -> int:
        """Go on at `text[at]`. Returns the place behind what belongs to the value."""
        while at < len(text) and not self.is_done and not self.is_bad:
            run = _RUNS[self._state].match(text, at) if self._state in _RUNS else None
            if run is not None:
                if self._state == _LITERAL:
                    self._literal.append(run.group())
                at = run.end()
            elif self._step(text[at]):
                at += 1
        return at

    def _step(self, char: str) -> bool:
        """Whether `char` was used up."""
        match self._state:
            case s if s == _STRING:
                return self._in_string(char)
            case s if s == _ESCAPE:
                return self._in_escape(char)
            case s if s == _LITERAL:
                self._end_literal()
                return False
            case s if s == _COLON:
                return self._go_on(char == ":", _VALUE)
            case s if s == _AFTER:
                if char == self._closers[-1]:
                    return self._close()
                return self._go_on(char == ",", _KEY if self._closers[-1] == "}" else _VALUE)
            case s if s in (_KEY, _KEY_OR_END):
                if char == "}" and s == _KEY_OR_END:
                    return self._close()
                self._is_key = True
                return self._go_on(char == '"', _STRING)
            case _:
                return self._begin_value(char)

    def _go_on(self, is_right: bool, state: int) -> bool:
        if is_right:
            self._state = state
        else:
            self.is_bad = True
        return is_right

    def _begin_value(self, char: str) -> bool:
        if char == "]" and self._state == _VALUE_OR_END:
            return self._close()
        self._is_key = False
        if char in "{[":
            self._closers.append("}" if char == "{" else "]")
            return self._go_on(len(self._closers) <= MAX_DEPTH, _KEY_OR_END if char == "{" else _VALUE_OR_END)
        if char in _LITERAL_START:
            self._literal.clear()
            self._state = _LITERAL
            return False
        return self._go_on(char == '"', _STRING)

    def _in_string(self, char: str) -> bool:
        if char == '"':
            if self._is_key:
                self._state = _COLON
            else:
                self._end_value()
            return True
        return self._go_on(char == "\\", _ESCAPE)

    def _in_escape(self, char: str) -> bool:
        if self._num_hex:
            self._num_hex -= 1
            return self._go_on(char in _HEX, _ESCAPE if self._num_hex else _STRING)
        if char == "u":
            self._num_hex = 4
            return True
        return self._go_on(char in '"\\/bfnrt', _STRING)

    def _end_literal(self) -> None:
        if _WHOLE_LITERAL.fullmatch("".join(self._literal)):
            self._end_value()
        else:
            self.is_bad = True

    def _close(self) -> bool:
        self._closers.pop()
        self._end_value()
        return True

    def _end_value(self) -> None:
        self._state = _AFTER
        self.is_done = not self._closers


def scan_value(reader: Reader, *, passes_on: bool = False) -> Steps[str | None]:
    """Look at one value that is an object, an array or a string, or stands inside of one. Returns its text, or None
    when it is not JSON or the answer ends before it. `passes_on`: it is the arguments of the last call, which are told
    at once."""
    scanner, pieces = JsonScanner(), []
    while True:
        start = reader.pos
        reader.pos = scanner.scan(reader.text, start)
        piece = reader.text[start : reader.pos]
        pieces.append(piece)
        if passes_on and piece:
            delta: Delta = reader.arguments(piece)
            reader.take()
            yield delta
        if scanner.is_done:
            return "".join(pieces)
        if scanner.is_bad or not (yield from more(reader)):
            return None
