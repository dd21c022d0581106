"""Admission: which requests run now, which wait for their turn, and which are refused.

Owns the count of what runs and the queue in front of it. A request runs at once when there is room and nobody waits;
that path awaits nothing. Otherwise it waits in a queue that is fair between keys (`fair_queue.py`), until there is
room, its client leaves, or it has waited `max_queue_s`. One whose expected wait is longer than that is refused at once.

Invariants: what runs never exceeds `max_concurrent_requests`; the queue is bounded in requests and in tokens; every
admitted request gives its room back exactly once, by closing its permit. Does not know nodes: `capacity` says for how
many requests they have use. Lives on one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from baton.router.http.access.identity import Identity
from baton.router.http.admission.fair_queue import FairQueue
from baton.router.http.admission.speed import Speed
from baton.wire.errors import BatonError, InvalidRequest, Overloaded, RateLimited

QUEUE_FULL, QUEUE_TIMEOUT, TOO_LARGE, SHUTTING_DOWN = "queue_full", "queue_timeout", "too_large", "shutting_down"
_SHUTDOWN_RETRY_S = 5
_ASSUMED_OUTPUT_TOKENS = 512
"""Of a request without `max_tokens`. What it uses beyond that is charged when it has ended."""


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """Limits of what runs and of what waits. `max_queued_requests` 0: nothing waits."""

    max_concurrent_requests: int
    max_queued_requests: int
    max_queued_tokens: int
    max_queue_s: float


@dataclass(frozen=True, slots=True)
class Demand:
    """The needs of a request: so many choices at once, and at most about `num_tokens` of prompt and output. A lower
    priority is earlier. `identity` is None where no keys are in use."""

    identity: Identity | None
    num_choices: int
    num_tokens: int
    priority: int = 0

    @classmethod
    def of_prompts(
        cls,
        identity: Identity | None,
        prompt_lengths: Iterable[int],
        num_choices: int,
        max_tokens: int | None,
        priority: int | None,
    ) -> Demand:
        """The needs of `num_choices` answers to each prompt. Each prompt is computed once."""
        lengths = list(prompt_lengths)
        total = num_choices * len(lengths)
        num_output_tokens = total * (_ASSUMED_OUTPUT_TOKENS if max_tokens is None else max_tokens)
        return cls(identity, total, sum(lengths) + num_output_tokens, priority or 0)

    @property
    def line(self) -> str:
        """The line in which it waits."""
        return "" if self.identity is None else self.identity.name


class Permit:
    """The right to run. Has to be closed, also after a failure."""

    def __init__(self, admission: Admission, demand: Demand, waited_s: float) -> None:
        self.waited_s = waited_s
        self._admission = admission
        self._demand: Demand | None = demand

    def close(self, num_prompt_tokens: int, num_generated_tokens: int) -> None:
        """The request is over and has used so many tokens. Does nothing the second time."""
        demand, self._demand = self._demand, None
        if demand is not None:
            if demand.identity is not None:
                demand.identity.account.settle(demand.num_tokens, num_prompt_tokens, num_generated_tokens)
            self._admission.release(demand)


@dataclass(eq=False, slots=True)
class _Ticket:
    """A request that waits. `turn` has its result when the request may run."""

    demand: Demand
    turn: asyncio.Future[None]

    @property
    def is_admitted(self) -> bool:
        return self.turn.done() and not self.turn.cancelled() and self.turn.exception() is None


class Admission:
    """Admits requests as long as `capacity()` has room, lets a bounded number wait for their turn, and refuses
    others."""

    def __init__(
        self, settings: AdmissionSettings, capacity: Callable[[], int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.rejected: Counter[str] = Counter()
        """Requests that were refused, by reason."""
        self.num_running = 0
        """Choices that have been admitted and are not over."""
        self._settings = settings
        self._capacity = capacity
        self._clock = clock
        self._queue: FairQueue[_Ticket] = FairQueue()
        self._speed = Speed()
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        """The number of requests in the queue."""
        return len(self._queue)

    async def admit(self, demand: Demand) -> Permit:
        """Return when the request may run. Raises `InvalidRequest` when it never may, and `RateLimited` when its key
        has used up its tokens. Raises `Overloaded` when the queue is full or the wait too long."""
        try:
            self._check(demand)
            if demand.identity is not None:
                demand.identity.account.charge(demand.num_tokens)
        except BatonError as error:
            self.rejected[error.limit if isinstance(error, RateLimited) else TOO_LARGE] += 1
            raise
        if not self._queue and self._has_room(demand):
            self.num_running += demand.num_choices
            return Permit(self, demand, 0.0)
        begun_s = self._clock()
        try:
            await self._wait(demand)
        except BaseException:
            if demand.identity is not None:
                demand.identity.account.settle(demand.num_tokens, 0, 0)
            raise
        return Permit(self, demand, self._clock() - begun_s)

    def release(self, demand: Demand) -> None:
        """Free the room of a request. Called by its permit."""
        self._speed.done(demand.num_tokens, self._clock())
        self.num_running -= demand.num_choices
        self.fill()

    def fill(self) -> None:
        """Let those run for whom there is room now. To be called when the capacity has grown."""
        while self._queue and self._has_room(self._queue.first().demand):
            ticket = self._queue.pop()
            if ticket.turn.done():
                continue  # its client has left, and its task has not heard of that yet
            self.num_running += ticket.demand.num_choices
            ticket.turn.set_result(None)
        self._note_whether_busy()

    def close(self) -> None:
        """The router shuts down: nobody waits any more."""
        self._is_closed = True
        while self._queue:
            self._refuse(self._queue.pop(), SHUTTING_DOWN, self._shutting_down())
        self._note_whether_busy()

    def _check(self, demand: Demand) -> None:
        limit = self._settings.max_concurrent_requests
        if demand.num_choices > limit:
            raise InvalidRequest(f"{demand.num_choices} choices were asked for; this router runs {limit} at once", "n")

    def _has_room(self, demand: Demand) -> bool:
        # a request with many choices may go beyond what nodes have use for, otherwise it would wait until all are idle
        is_useful = self.num_running < self._capacity()
        return is_useful and self.num_running + demand.num_choices <= self._settings.max_concurrent_requests

    async def _wait(self, demand: Demand) -> None:
        """Wait in the queue. Raises `Overloaded`."""
        self._check_queue(demand)
        loop = asyncio.get_running_loop()
        ticket = _Ticket(demand, loop.create_future())
        self._queue.push(demand.line, ticket, demand.num_tokens, demand.priority)
        self._speed.begin(self._clock())
        self.fill()  # the capacity may have grown since a request ended
        timer = loop.call_later(self._settings.max_queue_s, self._expire, ticket)
        try:
            await ticket.turn
        except BaseException:
            if ticket.is_admitted:  # its client left at the moment of its turn
                self.release(demand)
            else:
                self._queue.remove(demand.line, ticket)
                self.fill()  # what stood behind it may fit where it did not
            raise
        finally:
            timer.cancel()

    def _check_queue(self, demand: Demand) -> None:
        """Raise `Overloaded` when there is no place, or when the wait would be too long."""
        if self._is_closed:
            self.rejected[SHUTTING_DOWN] += 1
            raise self._shutting_down()
        settings, queue = self._settings, self._queue
        num_tokens = queue.tokens_ahead(demand.line) + demand.num_tokens
        wait_s = self._speed.seconds_for(num_tokens, self._clock())
        is_full = (
            queue.num_requests >= settings.max_queued_requests
            or queue.num_tokens + demand.num_tokens > settings.max_queued_tokens
        )
        if is_full or (wait_s is not None and wait_s > settings.max_queue_s):
            self.rejected[QUEUE_FULL] += 1
            raise self._overloaded(
                f"{self.num_running} requests run and {queue.num_requests} wait for their turn", num_tokens
            )

    def _expire(self, ticket: _Ticket) -> None:
        if not ticket.turn.done():
            demand = ticket.demand
            self._queue.remove(demand.line, ticket)
            num_tokens = self._queue.tokens_ahead(demand.line) + demand.num_tokens
            message = f"the request has waited {self._settings.max_queue_s:g} s for its turn"
            self._refuse(ticket, QUEUE_TIMEOUT, self._overloaded(message, num_tokens))

    def _refuse(self, ticket: _Ticket, reason: str, error: Overloaded) -> None:
        if not ticket.turn.done():
            self.rejected[reason] += 1
            ticket.turn.set_exception(error)

    def _overloaded(self, message: str, num_tokens: int) -> Overloaded:
        return Overloaded(message, self._speed.retry_after_s(num_tokens, self._clock()))

    @staticmethod
    def _shutting_down() -> Overloaded:
        return Overloaded("the router is shutting down", _SHUTDOWN_RETRY_S)

    def _note_whether_busy(self) -> None:
        if not self._queue:
            self._speed.end(self._clock())
