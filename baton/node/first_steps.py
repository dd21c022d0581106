"""Timestamps of the first tokens of each request.

Owns the stamps of requests whose first tokens are still to come; afterwards it holds nothing of a request, so that a
later token costs one lookup in a dictionary. A step that is launched while another one runs begins when that one ends,
because the device computes one after the other. Knows neither legs nor transfers: a leg says how many tokens of a
request to watch, and forgets the request when it ends early.

Invariant: a request that has left the engine with an output, or was forgotten, leaves nothing here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from baton.engine.scheduler.step import RequestOutput
from baton.runtime.clock import now_us
from baton.wire.messages.output import StepTimes
from baton.wire.request_key import RequestKey


@dataclass(slots=True)
class _Watched:
    num_tokens: int
    ready_us: int | None
    begun_us: int | None = None


class FirstSteps:
    """Stamps by `clock` (microseconds). Used by one thread: a step begins, ends, and is asked about its outputs. Steps
    end in the order in which they began; the next one may begin before a step ends.
    """

    def __init__(self, clock: Callable[[], int] = now_us) -> None:
        self._clock = clock
        self._watched: dict[RequestKey, _Watched] = {}
        self._launched_us: deque[int] = deque()
        self._begun_us = 0
        self._ended_us = 0

    def __len__(self) -> int:
        """Requests whose first tokens are still to come."""
        return len(self._watched)

    def watch(self, key: RequestKey, num_tokens: int, ready_us: int | None = None) -> None:
        """Time the next `num_tokens` tokens of a request. `ready_us`: when the KV of its handoff was verified."""
        self._watched[key] = _Watched(num_tokens, ready_us)

    def forget(self, key: RequestKey) -> None:
        """The request is over. Harmless when unknown."""
        self._watched.pop(key, None)

    def step_begins(self) -> None:
        """A step is about to be launched."""
        self._launched_us.append(self._clock())

    def step_ends(self) -> None:
        """The tokens of the oldest step are sampled. Harmless when there is none."""
        if self._launched_us:
            self._begun_us = max(self._launched_us.popleft(), self._ended_us)
            self._ended_us = self._clock()

    def steps_lost(self) -> None:
        """The steps in flight have failed: none of them will end."""
        self._launched_us.clear()

    def times_of(self, output: RequestOutput) -> StepTimes | None:
        """The times of the token that the step which ended last sampled, None when its request is not watched.

        To be asked of every output.
        """
        watched = self._watched.get(output.key)
        if watched is None:
            return None
        if watched.begun_us is None:
            watched.begun_us = self._begun_us
        times = None
        if output.tokens:
            times = StepTimes(watched.ready_us, watched.begun_us, self._ended_us)
            watched.num_tokens -= 1
            watched.ready_us = watched.begun_us = None
        if output.has_left or not watched.num_tokens:
            del self._watched[output.key]
        return times
