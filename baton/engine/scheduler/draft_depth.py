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
from dataclasses import dataclass
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
_FORGOTTEN = 0.8
"""What is left after a rest of what a request's drafts have shown: it is tried again some time."""
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


class DraftDepth:
    """Chooses by `costs`, whose rows have to be learned. `bound`: the goals, if there are any."""

    def __init__(self, costs: StepCosts, bound: StepBound | None = None) -> None:
        self.costs = costs
        self._bound = bound
        self._acceptance = Acceptance()
        self._seen: dict[RequestKey, RequestAcceptance] = {}
        self._rest = 0
        self._rests_for = 0

    def is_resting(self, request: Request) -> bool:
        """Whether `request` goes on without drafts for now."""
        if self._rests_for:
            return True
        seen = self._seen.get(request.key)
        return seen is not None and len(request.token_ids) < seen.rests_until

    def planned(self) -> None:
        """One more step is planned."""
        self._rests_for = max(0, self._rests_for - 1)

    def wanted(self, at_most: Sequence[Wanted], proposer: Proposer, step: DecodingStep) -> list[Wanted]:
        """Those of `at_most` that drafts are worth making for, and how many. All, where making them is free."""
        costs = [proposer.cost(each.request) for each in at_most]
        if all(cost == FREE for cost in costs):
            return list(at_most)
        streams = []
        for each, cost in zip(at_most, costs, strict=True):
            chance = self._acceptance.usual_chance(proposer.method, self._of(each.request))
            left = min(_USUAL_LEFT, max(1, each.request.most_tokens - len(each.request.token_ids)))
            cost = DraftCost(cost.begin_s / left, cost.token_s)
            streams.append(_Stream(each.request.key, product_of(chance, each.max_tokens), cost))
        counts, token_s = self._best(streams, step)
        seconds, found = self._seconds_of(step), []
        for each, stream, count in zip(at_most, streams, counts, strict=True):
            if count:
                row_s = (seconds(count) - seconds(0)) / count
                found.append(each._replace(max_tokens=count, least_chance=(stream.cost.token_s + row_s) / token_s))
            else:
                self._let_rest(each.request)
        return found

    def chosen(self, requests: Sequence[Request], drafts: Sequence[Draft], step: DecodingStep) -> list[int]:
        """How many tokens of each of `drafts` are to be verified."""
        streams = [
            _Stream(request.key, self._acceptance.chances(draft, self._of(request)), FREE)
            for request, draft in zip(requests, drafts, strict=True)
        ]
        counts, _ = self._best(streams, step)
        for request, draft, count in zip(requests, drafts, counts, strict=True):
            if draft.token_ids and not count:
                self._let_rest(request)
        if any(counts):
            self._rest = 0
        elif any(draft.token_ids for draft in drafts):
            self._rest = self._rests_for = min(_LONGEST_REST, 2 * self._rest or 1)
        return counts

    def verified(self, request: Request, draft: Draft, num_accepted: int) -> None:
        """Of `draft` the first `num_accepted` tokens were right."""
        seen = self._of(request)
        self._acceptance.verified(draft, num_accepted, seen)
        if num_accepted:
            seen.rest = 0

    def forget(self, request: Request) -> None:
        """`request` has left."""
        self._seen.pop(request.key, None)

    def _of(self, request: Request) -> RequestAcceptance:
        return self._seen.setdefault(request.key, RequestAcceptance())

    def _let_rest(self, request: Request) -> None:
        seen = self._of(request)
        seen.rest = min(_LONGEST_REST, 2 * seen.rest or 1)
        seen.rests_until = len(request.token_ids) + seen.rest
        seen.expected *= _FORGOTTEN
        seen.accepted *= _FORGOTTEN

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
