"""Who is next: a queue that is fair between keys, by deficit round robin over tokens.

Each key has a line of its own. In every round a line may use `QUANTUM` tokens more; a request is taken when its line
has as many as it asks for, and what is left over stays with the line while anything waits in it. So keys that ask for
much and keys that ask for little get the same number of tokens, whatever the number and size of their requests. Within
a line requests go by priority (a lower number is earlier) and then by arrival: a priority helps against requests of
the same key only.

Knows neither time nor capacity. Items are compared by identity.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

QUANTUM = 1024
ItemT = TypeVar("ItemT")


@dataclass(frozen=True, slots=True)
class _Entry(Generic[ItemT]):
    rank: tuple[int, int]
    num_tokens: int
    item: ItemT


@dataclass(slots=True)
class _Line(Generic[ItemT]):
    name: str
    entries: list[_Entry[ItemT]] = field(default_factory=list)
    num_tokens: int = 0
    deficit: int = 0

    @property
    def missing(self) -> int:
        """Tokens that the line still has to get before its first request is taken; not above 0: none."""
        return self.entries[0].num_tokens - self.deficit


class FairQueue(Generic[ItemT]):
    """Items of several lines, and whose turn it is. `num_requests` and `num_tokens` are those of all that wait."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_tokens = 0
        self._lines: dict[str, _Line[ItemT]] = {}
        self._turns: deque[_Line[ItemT]] = deque()
        self._arrivals = count()

    def __len__(self) -> int:
        return self.num_requests

    def push(self, line_name: str, item: ItemT, num_tokens: int, priority: int) -> None:
        """Add an item at the end of its line, or before those of less priority there."""
        line = self._lines.get(line_name)
        if line is None:
            line = self._lines[line_name] = _Line(line_name)
            self._turns.append(line)
        insort(line.entries, _Entry((priority, next(self._arrivals)), num_tokens, item), key=lambda entry: entry.rank)
        line.num_tokens += num_tokens
        self._count(1, num_tokens)

    def first(self) -> ItemT:
        """The item whose turn it is; it stays. Raises `IndexError` when nothing waits."""
        return self._turn().entries[0].item

    def pop(self) -> ItemT:
        """Take the item whose turn it is. Raises `IndexError` when nothing waits."""
        line = self._turn()
        entry = line.entries[0]
        line.deficit -= entry.num_tokens
        self._take_out(line, 0)
        return entry.item

    def remove(self, line_name: str, item: ItemT) -> None:
        """Take an item out, wherever it stands. Does nothing when it is not here."""
        line = self._lines.get(line_name)
        if line is not None:
            for place, entry in enumerate(line.entries):
                if entry.item is item:
                    self._take_out(line, place)
                    return

    def tokens_ahead(self, line_name: str) -> int:
        """About how many tokens are taken before a new item of that line. Lines take turns, so no other line gets much
        more than this one meanwhile."""
        line = self._lines.get(line_name)
        own = 0 if line is None else line.num_tokens
        num_lines = len(self._lines) + (line is None)
        return min(self.num_tokens, own * num_lines)

    def _turn(self) -> _Line[ItemT]:
        """The line whose turn it is; it can pay for its first item."""
        turns = self._turns
        if turns[0].missing <= 0:
            return turns[0]
        turns.rotate(-1)
        # rounds in which nobody could pay are not walked through
        rounds = min(-(-line.missing // QUANTUM) for line in turns) - 1
        for line in turns:
            line.deficit += max(0, rounds) * QUANTUM
        while True:
            turns[0].deficit += QUANTUM
            if turns[0].missing <= 0:
                return turns[0]
            turns.rotate(-1)

    def _take_out(self, line: _Line[ItemT], place: int) -> None:
        num_tokens = line.entries.pop(place).num_tokens
        line.num_tokens -= num_tokens
        self._count(-1, -num_tokens)
        if not line.entries:
            del self._lines[line.name]
            self._turns.remove(line)

    def _count(self, num_requests: int, num_tokens: int) -> None:
        self.num_requests += num_requests
        self.num_tokens += num_tokens
