"""How many drafts each request gets in a step: as many as make the tokens of all who decode come sooner, on average.

Owns that choice, and the rests of requests for which drafts do not pay. It weighs the chance that each draft is right
(`baton.engine.scheduler.acceptance`) against what a row more costs the step (`baton.engine.scheduler.row_costs`), which
every request in it waits for. Two things bound it: drafts never make a step longer than a goal between tokens of
somebody else allows, nor anybody's tokens later by more than a tenth. It decides time alone, never which token comes.

With one stream rows are nearly free, so a draft pays at a small chance. The more requests share a step, the more its
rows cost, and the more of them wait for it: drafts become fewer by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from baton.engine.scheduler.acceptance import Acceptance, RequestAcceptance, product_of
from baton.engine.scheduler.proposer import FREE, Draft, DraftCost, Proposer, Wanted
from baton.engine.scheduler.request import Request, ScheduledRequest
from baton.engine.scheduler.step_bound import StepBound
from baton.engine.scheduler.step_costs import StepCosts
from baton.wire.request_key import RequestKey
from baton.wire.step_cost import PLANNED_SHARE

_LEAST_GAIN = 0.03
"""Drafts that are expected to gain less than this share are left out: costs are not known better."""
_MOST_SLOWED = 1.1
"""How much longer drafts of others make a step for a stream that has none itself."""
_LONGEST_REST = 64
_LONGEST_FREE_REST = 16
"""Tokens without drafts that cost nothing to make: text that is copied may begin at any moment."""
_USUAL_LEFT = 128
"""Tokens over which the cost to begin with a request is spread, where its output may be longer."""


@dataclass(frozen=True, slots=True)
class DecodingStep:
    """A planned step without drafts: the requests that decode in it, its rows, and the seconds of all but rows."""

    decoding: Sequence[Request]
    num_rows: int
    beside_s: float

    @classmethod
    def of(cls, shares: Sequence[ScheduledRequest], decoding: Sequence[Request], costs: StepCosts) -> DecodingStep:
        """The step over `shares`, of which `decoding` have one token each."""
        cost, beside_s = costs.cost, 0.0
        if cost is not None:
            beside_s = cost.context_token_s * sum([request.num_computed_tokens for request in decoding])
            chunks = [share for share in shares if share.num_tokens > 1]
            beside_s += sum([cost.tokens_s(share.num_tokens, share.start) for share in chunks])
        return cls(decoding, len(decoding), beside_s)


class _Stream(NamedTuple):
    """A request that can have drafts: the chance that each of them and all before it are right, and their costs."""

    key: RequestKey
    chances: Sequence[float]
    cost: DraftCost


@dataclass(slots=True)
class _Rest:
    """`length` tokens without drafts, more each time and at most `longest`, until there are `until`."""

    longest: int
    length: int = 0
    until: int = 0

    def begin(self, num_tokens: int) -> None:
        self.length = min(self.longest, 2 * self.length or 1)
        self.until = num_tokens + self.length


@dataclass(slots=True)
class _Seen:
    """What drafts of a request have shown, by method. `rest`: from all of them; `declined`: from those that cost time
    to make."""

    methods: dict[str, RequestAcceptance] = field(default_factory=dict)
    rest: _Rest = field(default_factory=partial(_Rest, _LONGEST_FREE_REST))
    declined: _Rest = field(default_factory=partial(_Rest, _LONGEST_REST))

    def of(self, method: str) -> RequestAcceptance:
        return self.methods.setdefault(method, RequestAcceptance())


class DraftDepth:
    """Chooses by `costs`, whose rows have to be learned. `bound`: the goals, if there are any."""

    def __init__(self, costs: StepCosts, bound: StepBound | None = None) -> None:
        self.costs = costs
        self._bound = bound
        self._acceptance = Acceptance()
        self._seen: dict[RequestKey, _Seen] = {}
        self._rest = 0
        self._rests_for = 0

    def is_resting(self, request: Request) -> bool:
        """Whether `request` goes on without drafts for now."""
        if self._rests_for:
            return True
        seen = self._seen.get(request.key)
        return seen is not None and len(request.token_ids) < seen.rest.until

    def is_declined(self, request: Request) -> bool:
        """Whether drafts that cost time to make are not wanted of `request` for now."""
        seen = self._seen.get(request.key)
        return seen is not None and len(request.token_ids) < seen.declined.until

    def planned(self) -> None:
        """One more step is planned."""
        self._rests_for = max(0, self._rests_for - 1)

    def wanted(self, at_most: Sequence[Wanted], proposer: Proposer, step: DecodingStep) -> list[Wanted]:
        """Those of `at_most` that drafts are worth making for, and how many. All of those that are free."""
        costs = [proposer.cost(each.request) for each in at_most]
        costly = [(each, cost) for each, cost in zip(at_most, costs, strict=True) if cost != FREE]
        if not costly:
            return list(at_most)
        found = [each for each, cost in zip(at_most, costs, strict=True) if cost == FREE]
        streams = [self._costly_stream(each, cost, proposer.method) for each, cost in costly]
        counts, token_s = self._best(streams, step)
        seconds = self._seconds_of(step)
        for (each, _), stream, count in zip(costly, streams, counts, strict=True):
            declined = self._of(each.request).declined
            if count:
                row_s = (seconds(count) - seconds(0)) / count
                found.append(each._replace(max_tokens=count, least_chance=(stream.cost.token_s + row_s) / token_s))
                declined.length = 0
            else:
                declined.begin(len(each.request.token_ids))
                self._acceptance.declined(proposer.method, self._of(each.request).of(proposer.method))
        return found

    def chosen(self, requests: Sequence[Request], drafts: Sequence[Draft], step: DecodingStep) -> list[int]:
        """How many tokens of each of `drafts` are to be verified."""
        streams = [
            _Stream(request.key, self._acceptance.chances(draft, self._of(request).of(draft.method)), FREE)
            for request, draft in zip(requests, drafts, strict=True)
        ]
        counts, _ = self._best(streams, step)
        for request, draft, count in zip(requests, drafts, counts, strict=True):
            if draft.token_ids and not count:
                seen = self._of(request)
                seen.rest.begin(len(request.token_ids))
                seen.of(draft.method).fade()
        if any(counts):
            self._rest = 0
        elif any(draft.token_ids for draft in drafts):
            self._rest = self._rests_for = min(_LONGEST_REST, 2 * self._rest or 1)
        return counts

    def verified(self, request: Request, draft: Draft, num_accepted: int) -> None:
        """Of `draft` the first `num_accepted` tokens were right."""
        seen = self._of(request)
        self._acceptance.verified(draft, num_accepted, seen.of(draft.method))
        if num_accepted:
            seen.rest.length = 0

    def forget(self, request: Request) -> None:
        """`request` has left."""
        self._seen.pop(request.key, None)

    def _of(self, request: Request) -> _Seen:
        return self._seen.setdefault(request.key, _Seen())

    def _costly_stream(self, wanted: Wanted, cost: DraftCost, method: str) -> _Stream:
        """What may be expected of drafts before they are made."""
        request = wanted.request
        chance = self._acceptance.usual_chance(method, self._of(request).of(method))
        left = min(_USUAL_LEFT, max(1, request.most_tokens - len(request.token_ids)))
        made = DraftCost(cost.begin_s / left, cost.token_s)
        return _Stream(request.key, product_of(chance, wanted.max_tokens), made)

    def _best(self, streams: Sequence[_Stream], step: DecodingStep) -> tuple[list[int], float]:
        """How many drafts of each of `streams` make the mean time of a token the least, and the mean of one then.

        Drafts are taken in the order of their chances, as far as the best sum: the cost of rows is a staircase, so the
        next row may cost much and those behind it nothing.
        """
        by_chance = sorted([(-chance, number) for number, each in enumerate(streams) for chance in each.chances])
        seconds, expected, others = self._seconds_of(step), [1.0] * len(streams), float(len(step.decoding))
        least, best, made_s = seconds(0) * others * (1.0 - _LEAST_GAIN), 0, 0.0
        for count, (negative, number) in enumerate(by_chance, 1):
            cost, had = streams[number].cost, expected[number]
            made_s += cost.token_s + (cost.begin_s if had == 1.0 else 0.0)
            expected[number] = had - negative
            others += 1.0 / expected[number] - 1.0 / had
            step_s = seconds(count) + made_s
            if step_s * others < least and self._is_bearable(step_s, seconds(0), step, streams, expected):
                least, best = step_s * others, count
        counts = [0] * len(streams)
        for _, number in by_chance[:best]:
            counts[number] += 1
        return counts, least / max(1.0, float(len(step.decoding)))

    def _seconds_of(self, step: DecodingStep) -> Callable[[int], float]:
        """The seconds of `step` with so many drafts."""
        rows, num_rows, beside_s = self.costs.rows, step.num_rows, step.beside_s
        return lambda count: beside_s + rows.seconds(num_rows + count)

    def _is_bearable(
        self, step_s: float, plain_s: float, step: DecodingStep, streams: Sequence[_Stream], expected: Sequence[float]
    ) -> bool:
        """Whether a step of `step_s`, which takes `plain_s` without drafts, is no worse for anybody than it may be: for
        none of those who decode, `streams` of which are expected to get so many tokens of it."""
        tokens = {stream.key: count for stream, count in zip(streams, expected, strict=True)}
        for request in step.decoding:
            token_s = step_s / tokens.get(request.key, 1.0)
            if token_s > _MOST_SLOWED * plain_s:
                return False
            if self._bound is not None and token_s > max(PLANNED_SHARE * self._bound.tpot_s_of(request), plain_s):
                return False
        return True
