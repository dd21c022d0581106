"""How fast the deployment works off requests, measured while some of them wait.

Tokens here are those that requests were charged when they came, so that a sum of waiting tokens divided by this speed
is a time, also when answers end long before their `max_tokens`. Time in which nothing waits is not counted: what an
idle server does says nothing about what it can do. The last while counts most.
"""

from __future__ import annotations

import math

_MEMORY_S = 30.0
_LEAST_S = 1.0
_MAX_WAIT_S = 600


class Speed:
    """Measures how many tokens a second are worked off while something waits. Times are seconds of any clock that never
    goes back."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._busy_since_s: float | None = None

    def begin(self, now_s: float) -> None:
        """Note that something waits from now on."""
        if self._busy_since_s is None:
            self._busy_since_s = now_s

    def end(self, now_s: float) -> None:
        """Note that nothing waits from now on."""
        self._advance(now_s)
        self._busy_since_s = None

    def done(self, num_tokens: int, now_s: float) -> None:
        """A request that was charged `num_tokens` has ended."""
        if self._busy_since_s is not None:
            self._advance(now_s)
            self._tokens += num_tokens

    def seconds_for(self, num_tokens: int, now_s: float) -> float | None:
        """How long `num_tokens` take; None as long as too little has been measured to say so."""
        self._advance(now_s)
        return num_tokens * self._seconds / self._tokens if self._tokens and self._seconds >= _LEAST_S else None

    def retry_after_s(self, num_tokens: int, now_s: float) -> int:
        """The same in whole seconds for a client that should come back then: at least 1, at most ten minutes."""
        seconds = self.seconds_for(num_tokens, now_s)
        return 1 if seconds is None else min(_MAX_WAIT_S, max(1, math.ceil(seconds)))

    def _advance(self, now_s: float) -> None:
        if self._busy_since_s is not None:
            passed_s = now_s - self._busy_since_s
            self._busy_since_s = now_s
            kept = math.exp(-passed_s / _MEMORY_S)
            self._tokens *= kept
            self._seconds = self._seconds * kept + passed_s
