"""A series: the steps in which one batch decodes and nothing has to be decided. Each has the requests of the step
before it, a token further.

Owns what differs from one of these steps to the next, found without looking at each request again: whose block is full,
and when the first reaches its most tokens. Does not know when a series begins, or that a request came or left, which
ends it: `baton.engine.scheduler.scheduler` does.

Invariant: a step of a series is the one that the scheduler would choose, and its outputs are those that it would find,
were it asked. Where that is not certain the answer here is None, and nothing has changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat

from baton.engine.scheduler.request import PENDING_TOKEN, Request, ScheduledRequest
from baton.engine.scheduler.request_blocks import RequestBlocks
from baton.engine.scheduler.step import RequestOutput, SampledTokens, Step
from baton.wire.request_key import RequestKey


def can_begin(shares: Sequence[ScheduledRequest], requests: Sequence[Request]) -> bool:
    """Whether a step over `shares`, of `requests` in the order of their arrival, says what the next one will be: each
    decodes, and only its tokens can end it. Forks change more than that, and so does a grammar that forces a token."""
    arrival = 0
    for share, request in zip(shares, requests, strict=True):
        if share.num_tokens != 1 or not share.needs_sample or share.arrival <= arrival:
            return False
        if share.forks or share.block_copy is not None or request.first_token_only:
            return False
        if request.matcher is not None and not request.matcher.leaves_choice:
            return False
        arrival = share.arrival
    return bool(shares)


class StepSeries:
    """The series that begins with a step over `shares` of `requests`, in the same order. `num_changes`: that of the
    live requests then."""

    def __init__(
        self,
        shares: tuple[ScheduledRequest, ...],
        requests: Sequence[Request],
        blocks: RequestBlocks,
        end_token_ids: frozenset[int],
        num_changes: int,
    ) -> None:
        self.num_changes = num_changes
        self.is_applied = False
        """Whether the newest of its steps was applied: only then there can be another."""
        self._shares = shares
        self.requests = requests
        self._blocks = blocks
        self._number = 0
        self._keys = [share.key for share in shares]
        self._context = sum([share.start for share in shares])
        self._num_computed = [share.start + 1 for share in shares]
        self._indexes = [len(share.token_ids) - share.prompt.num_tokens for share in shares]
        self._cached = [request.num_cached_tokens or 0 for request in requests]
        self._tiers = [request.tiers for request in requests]
        self._first_limit = min([request.most_tokens - len(request.token_ids) for request in requests]) - 1
        self._matchers = [(place, each.matcher) for place, each in enumerate(requests) if each.matcher is not None]
        self._ends: set[int] = set()
        self._filling: list[list[Request]] = [[] for _ in range(blocks.block_size)]
        for request in requests:
            params = request.params
            if not params.ignore_eos:
                self._ends |= end_token_ids
            if params.stop_token_ids:
                self._ends.update(params.stop_token_ids)
            self._filling[-len(request.token_ids) % blocks.block_size].append(request)

    def first_step(self) -> Step:
        """The step that it begins with."""
        return Step(self._shares, (), self, 0, self._context)

    def next_step(self) -> Step | None:
        """The step after the newest. None where a block is wanted that is not there."""
        filled = self._filling[self._number % len(self._filling)]
        if filled and not self._extend(filled):
            return None
        self._number += 1
        self.is_applied = False
        return Step(self._shares, (), self, self._number, self._context + self._number * len(self._keys))

    def _extend(self, filled: Sequence[Request]) -> bool:
        """Blocks for the next tokens of those whose last block is full."""
        blocks = self._blocks
        missing = [request for request in filled if blocks.num_missing(request)]
        if len(missing) > blocks.num_available:
            return False
        for request in missing:
            blocks.extend(request)
        return True

    def advance(self) -> None:
        """Record that the newest step of the series was launched."""
        for request in self.requests:
            request.num_computed_tokens += 1
            request.num_steps_in_flight += 1
            request.num_pending_tokens += 1
            request.token_ids.append(PENDING_TOKEN)

    def apply(self, sampled: Mapping[RequestKey, SampledTokens]) -> list[RequestOutput] | None:
        """Record what the newest step has sampled, when nothing else is in flight. None where a request may end, and
        where a grammar may, or forces a token: then the series is over."""
        self.is_applied = True
        keys, number = self._keys, self._number
        if number >= self._first_limit or len(sampled) != len(keys):
            return None
        tokens = [sampled[key] for key in keys]
        token_ids = [token.token_id for (token,) in tokens]
        for place, matcher in self._matchers:
            if not matcher.goes_on_with(token_ids[place]):
                self.is_applied = False
                return None
        if not self._ends.isdisjoint(token_ids):
            return None
        for place, matcher in self._matchers:
            matcher.take(token_ids[place])
        for request, token_id in zip(self.requests, token_ids, strict=True):
            request.token_ids[-1] = token_id
            request.num_pending_tokens -= 1
            request.num_steps_in_flight -= 1
        for request in self._filling[number % len(self._filling)]:
            self._blocks.publish(request, request.num_computed_tokens)
        values = zip(
            keys,
            repeat(1),
            [count + number for count in self._num_computed],
            self._cached,
            [index + number for index in self._indexes],
            tokens,
            repeat(""),
            repeat(False),
            repeat(False),
            repeat(""),
            repeat(0),
            repeat(None),
            self._tiers,
            repeat(None),
        )
        # as calling the class, in a third of the time
        return list(map(tuple.__new__, repeat(RequestOutput), values))
