"""Parses a long JSON text by many short calls.

One call of `json.loads` keeps the interpreter from all other threads until it is done: 0.15 s for a million token ids.
Here a call takes one string, one number, or numbers of at most `MAX_PIECE_CHARS`. The values and the errors are those
of `json.loads`. Does not know what the text is about.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MAX_PIECE_CHARS = 2**14
_DECODER = json.JSONDecoder()
_BLANK = re.compile(r"[ \t\n\r]*")
_NUMBERS = re.compile(rf"[-+.,0-9eE \t\n\r]{{0,{MAX_PIECE_CHARS}}}")
ObjectMaker = Callable[[list[tuple[str, Any]]], dict[str, Any]]


def parse_long(text: str, make_object: ObjectMaker) -> Any:
    """The value in `text`; `make_object` makes one of its members. Raises `json.JSONDecodeError`, `RecursionError`, and
    `ValueError` for an integer of too many digits."""
    parser = _Parser(text, make_object)
    value, end = parser.value(parser.next(0))
    end = parser.next(end)
    if end != len(text):
        raise json.JSONDecodeError("Extra data", text, end)
    return value


@dataclass(frozen=True, slots=True)
class _Parser:
    """Each method begins at an index of `text` and returns, with a value, the index behind it."""

    text: str
    make_object: ObjectMaker

    def next(self, at: int) -> int:
        """Where what is not blank begins."""
        match = _BLANK.match(self.text, at)
        return at if match is None else match.end()

    def value(self, at: int) -> tuple[Any, int]:
        first = self.text[at : at + 1]
        if first == "{":
            return self._object(at + 1)
        if first == "[":
            return self._list(at + 1)
        return _DECODER.raw_decode(self.text, at)

    def _object(self, at: int) -> tuple[dict[str, Any], int]:
        members: list[tuple[str, Any]] = []
        at = self.next(at)
        if self.text[at : at + 1] == "}":
            return self.make_object(members), at + 1
        while True:
            if self.text[at : at + 1] != '"':
                raise self._error("Expecting property name enclosed in double quotes", at)
            name, at = _DECODER.raw_decode(self.text, at)
            at = self.next(at)
            if self.text[at : at + 1] != ":":
                raise self._error("Expecting ':' delimiter", at)
            value, at = self.value(self.next(at + 1))
            members.append((name, value))
            at, has_ended = self._behind(at, "}")
            if has_ended:
                return self.make_object(members), at

    def _list(self, at: int) -> tuple[list[Any], int]:
        items: list[Any] = []
        at = self.next(at)
        if self.text[at : at + 1] == "]":
            return items, at + 1
        while True:
            at = self.next(self._numbers(at, items))
            value, at = self.value(at)
            items.append(value)
            at, has_ended = self._behind(at, "]")
            if has_ended:
                return items, at

    def _numbers(self, at: int, items: list[Any]) -> int:
        """Add the numbers that come next but the last, of which only what follows tells where it ends."""
        while (match := _NUMBERS.match(self.text, at)) and (end := match.group().rfind(",")) > 0:
            try:
                items += json.loads(f"[{match.group()[:end]}]")
            except json.JSONDecodeError as error:
                raise self._error(error.msg, at + error.pos - 1) from None
            at += end + 1
        return at

    def _behind(self, at: int, closing: str) -> tuple[int, bool]:
        """Where the next one begins, or what is behind the closing bracket, and whether that came."""
        at = self.next(at)
        found = self.text[at : at + 1]
        if found == closing:
            return at + 1, True
        if found != ",":
            raise self._error("Expecting ',' delimiter", at)
        return self.next(at + 1), False

    def _error(self, message: str, at: int) -> json.JSONDecodeError:
        return json.JSONDecodeError(message, self.text, at)
