"""The answer to a conversation as blocks in their order: reasoning, text, calls.

Owns where a block begins and ends. The Responses API and Anthropic's interface tell an answer in such blocks, each in
its own words; this module knows neither. Invariants: at most one block is open, a block that has ended is never opened
again, and an answer that has ended has at least one block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from baton.engine.text.answers.deltas import Arguments, CallBegun, Content, Delta, Reasoning
from baton.engine.text.choice_text import TextDelta, TokenEntry
from baton.router.http.openai.answer import OutputText
from baton.router.http.openai.answer_parts import ID_LENGTH, ChoiceParts

TEXT, REASONING, CALL = "text", "reasoning", "call"


@dataclass(slots=True)
class Block:
    """`place`: its number in the answer, from 0. `name` and `call_id` are a call's. `entries`: the tokens of a text,
    where log probabilities are told."""

    kind: str
    place: int
    name: str = ""
    call_id: str = ""
    pieces: list[str] = field(default_factory=list)
    entries: list[TokenEntry] = field(default_factory=list)

    @property
    def text(self) -> str:
        """What it holds so far; the arguments of a call."""
        return "".join(self.pieces)


class Change(Enum):
    """What has happened to a block."""

    BEGUN = "begun"
    GREW = "grew"
    ENDED = "ended"


class BlockEvent(NamedTuple):
    """`text` and `entries` (see `Block`) are what a block grew by."""

    change: Change
    block: Block
    text: str = ""
    entries: Sequence[TokenEntry] = ()


class AnswerBlocks:
    """The blocks of an answer of one choice. `push` takes its text, piece by piece; the last piece ends the answer."""

    def __init__(
        self, parts: ChoiceParts, text: OutputText, id_of: Callable[[str], str], *, shows_reasoning: bool
    ) -> None:
        """`id_of` makes ids, see `ReplyHead`."""
        self.blocks: list[Block] = []
        self.finish_reason: str | None = None
        self._parts = parts
        self._text = text
        self._id_of = id_of
        self._shows_reasoning = shows_reasoning
        self._open: Block | None = None
        self._entries: list[TokenEntry] = []

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of reasoning, shown or not."""
        return self._parts.num_reasoning_tokens

    def warnings(self, shown_by: str, budget: str) -> tuple[str, ...]:
        """What is to be said of an answer that is empty because its reasoning is not shown; as
        `ChoiceParts.warnings`."""
        return () if self._shows_reasoning else self._parts.warnings(shown_by, budget)

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer."""
        return self._text.stop_string

    def push(self, piece: TextDelta) -> list[BlockEvent]:
        """What the next piece does."""
        if piece.entries and piece.entries[0].chosen is not None:
            self._entries += piece.entries
        events: list[BlockEvent] = []
        for delta in self._parts.push(piece):
            events += self._take(delta)
        events += self._pass_entries()
        if piece.finish_reason is not None:
            self.finish_reason = self._parts.finish_reason(piece.finish_reason)
            if not self.blocks:
                events += self._begin(TEXT)
                events += self._pass_entries()
            events += self._end()
        return events

    def push_whole(self, piece: TextDelta) -> None:
        """Take all text at once. Where log probabilities are told, token by token, so that they find their block."""
        for each in _token_by_token(piece):
            self.push(each)

    def _take(self, delta: Delta) -> Iterable[BlockEvent]:
        match delta:
            case Content(text):
                return self._grow(TEXT, text)
            case Reasoning(text):
                if self._shows_reasoning:
                    return self._grow(REASONING, text)
                self._entries.clear()
                return ()
            case CallBegun(call, name):
                return self._begin(CALL, name, self._id_of(f"call {call}")[:ID_LENGTH])
            case Arguments(_, text):
                return self._grow(CALL, text)

    def _grow(self, kind: str, text: str) -> list[BlockEvent]:
        events = [] if self._open is not None and self._open.kind == kind else self._begin(kind)
        block = self.blocks[-1]
        block.pieces.append(text)
        entries, self._entries = (self._entries if kind == TEXT else []), []
        block.entries += entries
        return [*events, BlockEvent(Change.GREW, block, text, entries)]

    def _pass_entries(self) -> list[BlockEvent]:
        """Tokens that came without text. They wait until it is known what they belong to; calls and reasoning do not
        tell theirs."""
        if self._open is None or not self._entries:
            return []
        entries, self._entries = self._entries, []
        if self._open.kind != TEXT:
            return []
        self._open.entries += entries
        return [BlockEvent(Change.GREW, self._open, "", entries)]

    def _begin(self, kind: str, name: str = "", call_id: str = "") -> list[BlockEvent]:
        events = self._end()
        self._open = Block(kind, len(self.blocks), name, call_id)
        self.blocks.append(self._open)
        return [*events, BlockEvent(Change.BEGUN, self._open)]

    def _end(self) -> list[BlockEvent]:
        if self._open is None:
            return []
        ended, self._open = self._open, None
        return [BlockEvent(Change.ENDED, ended)]


def _token_by_token(whole: TextDelta) -> Iterable[TextDelta]:
    entries = whole.entries
    if not entries or entries[0].chosen is None:
        yield whole
        return
    begins = [0, *(entry.text_offset for entry in entries[1:])]
    for entry, begin, end in zip(entries, begins, [*begins[1:], len(whole.text)], strict=True):
        yield TextDelta(whole.text[begin:end], (entry,))
    yield TextDelta("", (), whole.finish_reason)
