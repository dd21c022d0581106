"""Watches a stream of text for stop strings.

Owns the text of one stream that is not yet released. Invariants: a released character can belong to no stop
string; the result does not depend on how the text was split; the work per character does not depend on the
number or length of the stops.

The stop string that is complete first ends the stream, as it would if the text came character by character;
of several that are complete at the same character, the longest, so that the text is cut as early as
possible.

The search is the automaton of Aho and Corasick, "Efficient string matching" (CACM 1975).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from baton.wire.errors import InvalidRequest

_ROOT = 0


@dataclass(frozen=True)
class StopResult:
    """`text` is released to the client; `stop` is the stop string that ended the stream, None while it goes
    on."""

    text: str
    stop: str | None = None


class StopStringMatcher:
    """Releases text until a stop string appears. With `include_stop` the stop string itself is released
    too."""

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        """Raises `InvalidRequest` for an empty stop string, which would match everywhere."""
        if not all(stops):
            raise InvalidRequest("a stop string must not be empty", param="stop")
        self._include_stop = include_stop
        self._automaton = _Automaton(stops)
        self._state = _ROOT
        self._held = ""
        self._stop: str | None = None

    def push(self, text: str) -> StopResult:
        """Take the next text, return what is now certain. After a match every further text is dropped."""
        if self._stop is not None:
            return StopResult("", self._stop)
        buffer = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            self._state = self._automaton.follow(self._state, char)
            self._stop = self._automaton.stops[self._state]
            if self._stop is not None:
                self._held = ""
                return StopResult(buffer[: end if self._include_stop else end - len(self._stop)], self._stop)
        # the state is the longest end of the text that is the beginning of a stop string
        num_released = len(buffer) - self._automaton.depths[self._state]
        self._held = buffer[num_released:]
        return StopResult(buffer[:num_released])

    def finish(self) -> str:
        """No more text comes: release what was held."""
        held, self._held = self._held, ""
        self._state = _ROOT
        return held


class _Automaton:
    """One state per beginning of a stop string. Per state: its length, and the longest stop string it ends
    with."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.depths = [0]
        self.stops: list[str | None] = [None]
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [_ROOT]
        for stop in stops:
            self._insert(stop)
        self._link()

    def follow(self, state: int, char: str) -> int:
        """The state after one more character."""
        while char not in self._next[state]:
            if state == _ROOT:
                return _ROOT
            state = self._fallback[state]
        return self._next[state][char]

    def _insert(self, stop: str) -> None:
        state = _ROOT
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self.depths.append(self.depths[state] + 1)
                self.stops.append(None)
                self._next.append({})
                self._fallback.append(_ROOT)
            state = self._next[state][char]
        self.stops[state] = stop

    def _link(self) -> None:
        """Breadth first, so that a state's fallback, which is shorter, is complete before the state
        itself."""
        queue = deque(self._next[_ROOT].values())
        while queue:
            state = queue.popleft()
            for char, child in self._next[state].items():
                self._fallback[child] = self.follow(self._fallback[state], char)
                if self.stops[child] is None:
                    self.stops[child] = self.stops[self._fallback[child]]
                queue.append(child)
