"""Reads an answer that arrives in pieces, for parsers that are written as if all of it were there.

A parser is a generator over a `Reader`. It yields deltas, and None where it needs more text. What it does may depend on
the text alone, never on where a piece ended: the functions here wait until what they are asked for is certain. So the
joined deltas are the same for every split of an answer into pieces.

Text between the last `take` and `pos` was looked at and belongs to nobody yet: it becomes content when the parser finds
that it is not what it looked like. Nothing is read twice, so the work is linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeAlias, TypeVar

from baton.engine.text.answers.deltas import Arguments, CallBegun, Content, Delta

ResultT = TypeVar("ResultT")
Steps: TypeAlias = Generator[Delta | None, None, ResultT]
_NOT_SPACE = re.compile(r"\S")


class Reader:
    """The text that came and was not taken yet. `pos`: how much of it was looked at."""

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.has_ended = False
        self.num_calls = 0
        self.num_taken = 0
        self.reasoning_spans: list[tuple[int, int | None]] = []

    def take(self) -> str:
        """The text that was looked at, which is dealt with."""
        taken, self.text = self.text[: self.pos], self.text[self.pos :]
        self.num_taken += self.pos
        self.pos = 0
        return taken

    def begin_call(self, name: str) -> CallBegun:
        """The next call. Text that was looked at is dealt with."""
        self.take()
        self.num_calls += 1
        return CallBegun(self.num_calls - 1, name)

    def arguments(self, text: str) -> Arguments:
        """A piece with more arguments of the last call."""
        return Arguments(self.num_calls - 1, text)

    def begin_reasoning(self) -> None:
        """Note that reasoning begins behind the text that was taken."""
        self.reasoning_spans.append((self.num_taken, None))

    def end_reasoning(self, marker: str) -> None:
        """Note that reasoning ended before `marker`, which was looked at last."""
        self.reasoning_spans[-1] = (self.reasoning_spans[-1][0], self.num_taken + self.pos - len(marker))


def release(reader: Reader) -> Steps[None]:
    """Pass on the text that was looked at: it is content after all."""
    if reader.pos:
        yield Content(reader.take())


def more(reader: Reader) -> Steps[bool]:
    """Wait for text or for the end. False: the end was there before."""
    if reader.has_ended:
        return False
    yield None
    return True


def peek(reader: Reader) -> Steps[str]:
    """The next character, which stays; "" at the end."""
    while reader.pos == len(reader.text):
        if not (yield from more(reader)):
            return ""
    return reader.text[reader.pos]


def accept(reader: Reader, literal: str) -> Steps[bool]:
    """Whether `literal` is next; then it was looked at."""
    while True:
        there = reader.text[reader.pos : reader.pos + len(literal)]
        if there == literal:
            reader.pos += len(literal)
            return True
        if not literal.startswith(there) or not (yield from more(reader)):
            return False


def skip_space(reader: Reader) -> Steps[None]:
    """Look at all white space that is next."""
    while True:
        found = _NOT_SPACE.search(reader.text, reader.pos)
        reader.pos = found.start() if found else len(reader.text)
        if found or not (yield from more(reader)):
            return


def read_while(reader: Reader, run: re.Pattern[str], limit: int = 256) -> Steps[str]:
    """The next characters of the class `run` (a repeated character class), at most `limit` of them."""
    start = reader.pos
    while True:
        found = run.match(reader.text, start, start + limit)
        end = found.end() if found else start
        if end < len(reader.text) or end - start == limit or not (yield from more(reader)):
            reader.pos = end
            return reader.text[start:end]


class Markers:
    """Finds the first of several texts, and where one may have begun at the end of the text that came. None of the
    texts is part of another, unless it is its end."""

    def __init__(self, *texts: str) -> None:
        self._whole = re.compile("|".join(map(re.escape, texts)))
        self._partial = re.compile(f"(?:{'|'.join(map(_prefixes, texts))})\\Z")
        self._longest = max(map(len, texts))

    def find(self, text: str, start: int) -> tuple[re.Match[str] | None, int]:
        """The first whole marker from `start`, and the place up to which no marker can begin."""
        partial = self._partial.search(text, max(start, len(text) - self._longest + 1))
        return self._whole.search(text, start), partial.start() if partial else len(text)


@lru_cache(maxsize=256)
def markers(*texts: str) -> Markers:
    """`Markers` of these texts."""
    return Markers(*texts)


def _prefixes(text: str) -> str:
    pattern = re.escape(text[-2]) if len(text) > 1 else "(?!)"
    for char in reversed(text[:-2]):
        pattern = f"{re.escape(char)}(?:{pattern})?"
    return pattern


def pass_until(
    reader: Reader, ends: Markers, make: Callable[[str], Delta], *, strips: bool = True
) -> Steps[str | None]:
    """Pass text on until one of `ends`, which is looked at and returned; None at the end of the answer. Text that was
    looked at before is passed on too. `strips`: white space before the marker belongs to the marker."""
    reader.pos = 0
    while True:
        found, certain = ends.find(reader.text, 0)
        if found is not None:
            certain = found.start()
        is_last = found is None and reader.has_ended
        reader.pos = len(reader.text[:certain].rstrip()) if strips and not is_last else certain
        if is_last:
            reader.pos = len(reader.text)
        num_passed = reader.pos
        if num_passed:
            yield make(reader.take())
        if found is not None:
            reader.pos = found.end() - num_passed
            return found.group()
        if not (yield from more(reader)):
            return None


def read_until(reader: Reader, end: Markers, limit: int = 4096) -> Steps[tuple[str, str] | None]:
    """The text before one of `end`, which is looked at too, and the marker; None when it does not come within `limit`
    characters."""
    start = reader.pos
    while True:
        found, certain = end.find(reader.text, start)
        if found and found.start() - start <= limit:
            reader.pos = found.end()
            return reader.text[start : found.start()], found.group()
        if certain - start > limit or not (yield from more(reader)):
            reader.pos = min(len(reader.text), start + limit)
            return None


def pass_all(reader: Reader) -> Steps[None]:
    """The rest of the answer is content."""
    reader.pos = 0
    while True:
        reader.pos = len(reader.text)
        yield from release(reader)
        if not (yield from more(reader)):
            return


class AnswerParser:
    """Runs a parser over an answer. `push` gives it text, `finish` ends it; both return what became certain."""

    def __init__(self, parse: Callable[[Reader], Steps[None]]) -> None:
        self._reader = Reader()
        self._steps = self._all(parse)
        self._is_done = False

    @property
    def reasoning_spans(self) -> list[tuple[int, int | None]]:
        """The begin and end of each piece of reasoning, in characters of the text; None: it has not ended."""
        return self._reader.reasoning_spans

    @property
    def num_calls(self) -> int:
        """The number of calls that have begun."""
        return self._reader.num_calls

    def push(self, text: str) -> list[Delta]:
        """Add text; returns the pieces of the answer that are known now."""
        self._reader.text += text
        return self._run()

    def finish(self) -> list[Delta]:
        """End the text; returns the last pieces of the answer."""
        self._reader.has_ended = True
        return self._run()

    def _all(self, parse: Callable[[Reader], Steps[None]]) -> Steps[None]:
        yield from parse(self._reader)
        yield from pass_all(self._reader)

    def _run(self) -> list[Delta]:
        deltas: list[Delta] = []
        if self._is_done:
            return deltas
        for delta in self._steps:
            if delta is None:
                return deltas
            if isinstance(delta, CallBegun) or delta[-1]:
                deltas.append(delta)
        self._is_done = True
        return deltas
