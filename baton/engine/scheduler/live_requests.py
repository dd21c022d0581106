"""The live requests, which have not left the engine: those that run, and those that wait, each in their order.

Owns the two lists and their order, and knows by their keys the forks that wait for the first token of a request. It
changes no state of a request but its place here and its forks, and knows neither steps nor blocks, except whether a
request holds any.

The waiting ones stand in the order in which they are admitted: those that hold blocks, because they came with their KV
or wait for it, in the order of their arrival; then those that lost their blocks, then all others by their turns, or as
they came. So nobody who needs room stands before one who gives it back when it was served.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from operator import attrgetter

from baton.engine.scheduler.request import Fork, Request, ScheduledRequest
from baton.wire.request_key import RequestKey

_ARRIVAL, TURN = attrgetter("arrival"), attrgetter("turn_s")


class LiveRequests:
    """`running`: by key, in the order of their admission. A key is that of one live request at most. `num_changes`
    rises when a request comes, leaves, or passes between running and waiting, and when its forks become others.
    `on_left` hears of each that leaves."""

    def __init__(self) -> None:
        self.running: dict[RequestKey, Request] = {}
        self.num_changes = 0
        self.on_left: Callable[[Request], None] = lambda request: None
        self._waiting: deque[Request] = deque()
        self._leaders: dict[RequestKey, Request] = {}
        self._num_running_forks = 0
        self._num_arrivals = 0

    @property
    def num_running(self) -> int:
        """Requests that hold blocks and are served each step."""
        return len(self.running)

    @property
    def num_rows(self) -> int:
        """Tokens that a step may have to sample: one for each running request and each of its forks."""
        return len(self.running) + self._num_running_forks

    @property
    def num_waiting(self) -> int:
        """Requests that are not in the running batch."""
        return len(self._waiting)

    @property
    def is_empty(self) -> bool:
        """Whether no request is left."""
        return not (self.running or self._waiting)

    @property
    def first_waiting(self) -> Request | None:
        """The request to admit next. One that is not ready yet holds nobody up."""
        return next((request for request in self._waiting if request.is_ready), None)

    @property
    def waiting(self) -> Iterator[Request]:
        """The requests that are not in the running batch, in the order in which they are admitted."""
        return iter(self._waiting)

    @property
    def awaits_readiness(self) -> bool:
        """Whether a request waits that is not ready yet."""
        return any(not request.is_ready for request in self._waiting)

    @property
    def first_without_blocks(self) -> Request | None:
        """The first of the waiting requests that could be admitted and holds no blocks yet."""
        return next((request for request in self._waiting if not request.block_table and request.is_ready), None)

    def __iter__(self) -> Iterator[Request]:
        yield from self.running.values()
        yield from self._waiting

    def __contains__(self, key: RequestKey) -> bool:
        """Whether there is a request or a fork of that key."""
        return self.get(key) is not None or key in self._leaders

    def get(self, key: RequestKey) -> Request | None:
        """The request of that key."""
        return self.running.get(key) or next((request for request in self._waiting if request.key == key), None)

    def wanted_keys(self) -> list[RequestKey]:
        """Keys of all requests and forks that are wanted."""
        return [*(request.key for request in self if request.is_wanted), *self._leaders]

    def owner(self, share: ScheduledRequest) -> Request | None:
        """The request that has this share of a step, unless it was removed; its key may be another's by now."""
        request = self.running.get(share.key)
        return request if request is not None and request.arrival == share.arrival else None

    def add(self, request: Request) -> None:
        """Let a new request wait. One that holds blocks already comes before all that hold none."""
        self.num_changes += 1
        self._num_arrivals += 1
        request.arrival = self._num_arrivals
        place = len(self._waiting)
        if request.block_table:
            place = self._num_holders()
        else:
            while place and (before := self._waiting[place - 1]).turn_s > request.turn_s and not before.block_table:
                place -= 1
        self._waiting.insert(place, request)
        for fork in request.forks:
            self._leaders[fork.key] = request

    def remove(self, key: RequestKey) -> Request | None:
        """Forget a request, wherever it is, and its forks."""
        request = self.get(key)
        if request is None:
            return None
        self.num_changes += 1
        if request.forks:
            self.take_forks(request)
        if self.running.pop(key, None) is None:
            self._waiting.remove(request)
        self.on_left(request)
        return request

    def take_forks(self, request: Request) -> tuple[Fork, ...]:
        """Forget the forks of a request; returns them."""
        forks = request.forks
        self._keep_forks(request, ())
        return forks

    def remove_fork(self, key: RequestKey) -> Request | None:
        """Forget a fork; the request that it waited for. None when there is no such fork."""
        leader = self._leaders.get(key)
        if leader is not None:
            self._keep_forks(leader, tuple(fork for fork in leader.forks if fork.key != key))
        return leader

    def admit(self, request: Request) -> Request:
        """Let a waiting request run."""
        self.num_changes += 1
        self._waiting.remove(request)
        self.running[request.key] = request
        self._num_running_forks += len(request.forks)
        return request

    def preempt(self, request: Request) -> None:
        """Let a request that has lost its blocks wait ahead of all others that hold none."""
        self.num_changes += 1
        if self.running.pop(request.key, None) is not None:
            self._num_running_forks -= len(request.forks)
        else:
            self._waiting.remove(request)
        self._waiting.insert(self._num_holders(), request)

    def hold(self, request: Request) -> None:
        """Let a waiting request that was given blocks wait among the others that hold some."""
        self._waiting.remove(request)
        self._waiting.insert(self._num_holders(request.arrival), request)

    def waiting_holders(self) -> list[Request]:
        """The waiting requests that hold blocks already."""
        return [request for request in self._waiting if request.block_table]

    def by_age(self, num_stages: int = 1) -> tuple[list[Request], list[Request]]:
        """Running requests that decode, the oldest first, and those with more to compute, by their turns; without those
        whose last token is being sampled.

        Of several stages the first does not know tokens that are being sampled, and each is to have a step: so only
        those that decode and lack none, and no more of them than their part of a step for each stage.
        """
        decoding: list[Request] = []
        prompts: list[Request] = []
        for request in sorted(self.running.values(), key=_ARRIVAL):
            if request.num_pending_tokens and request.awaits_last_token:
                continue
            is_decoding = len(request.token_ids) - request.num_computed_tokens == 1
            (decoding if is_decoding else prompts).append(request)
        prompts.sort(key=TURN)
        if num_stages > 1:
            at_most = -(-len(decoding) // num_stages)
            decoding = [request for request in decoding if not request.num_pending_tokens][:at_most]
        return decoding, prompts

    def _num_holders(self, before: float = math.inf) -> int:
        """Waiting requests that hold blocks, of the arrivals `before`: they stand first."""
        others = (i for i, each in enumerate(self._waiting) if not each.block_table or each.arrival >= before)
        return next(others, len(self._waiting))

    def _keep_forks(self, request: Request, forks: tuple[Fork, ...]) -> None:
        """Forget the forks of `request` that are not among `forks`."""
        self.num_changes += 1
        for fork in request.forks:
            del self._leaders[fork.key]
        for fork in forks:
            self._leaders[fork.key] = request
        if request.key in self.running:
            self._num_running_forks += len(forks) - len(request.forks)
        request.forks = forks
