"""How much of prompts a step may take beside requests that decode, and whose prompts come first, so that both kinds of
goals are met.

Owns when the first and the last token of each request are due, the turns of prompts, and the choice between those who
wait for their first token and those who wait for their next one. Knows no blocks, and changes nothing else of a
request.

A step ends within the tightest goal between tokens of the requests that decode in it, as long as the prompts that
wait are expected in time with such steps. If one is not, steps become as long as it needs. Prompts that are late
whatever is done wait with everybody behind them, so the sooner they are computed the better: they get all that there
is. Neither may cost a stream its goal that can still meet both of its own. However prompts are cut, they delay a
stream by the time that they take: a stream that can spare what those in time take bounds no step. One that cannot,
and each one beside a late prompt, keeps to what it needs on average until its end. Streams that have lost a goal
already take what comes, one token a step.

So beyond the capacity of a node, where every first token is late, it computes as much as it can, as one without a goal
between tokens. A node without a goal for the first token knows of no late prompt, and its steps always keep to theirs:
that is for nodes whose prompts have another place to go to, and where the router refuses who would be late.

With a goal for the first token a short prompt does not wait for a long one that came just before it: a prompt's turn
comes when it has waited for as long as it takes itself, or for its goal. Whoever comes later is behind it, so nobody
waits for ever, however wrong the costs are.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence

from baton.engine.scheduler.request import Request
from baton.engine.scheduler.step_costs import StepCosts
from baton.wire.step_cost import PLANNED_SHARE, SMALLEST_CHUNK, StepCost

FIRST_CHUNK = 32
"""Prompt tokens beside running requests as long as their cost is not known."""
_PLANNED_WAIT = 0.8
"""The share of a goal for the first token within which a prompt is to be computed: what is predicted is the least that
it takes, and who comes while it waits would be late if only the last moment were kept."""
_NO_BOUND = 2**31


class StepBound:
    """Bounds what prompts take of a step. `tpot_s`, `ttft_s`: the goals of requests without goals of their own; 0 for
    `ttft_s`: none. `clock`: seconds."""

    def __init__(
        self, costs: StepCosts, tpot_s: float, ttft_s: float = 0.0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._costs = costs
        self._tpot_s = tpot_s
        self._ttft_s = ttft_s
        self._clock = clock

    def queued(self, request: Request) -> None:
        """The request waits for its first token from now on."""
        now_s, goal_s, cost = self._clock(), self._ttft_of(request), self._costs.cost
        request.first_due_s = now_s + (goal_s or math.inf)
        if goal_s:
            prompt_s = 0.0 if cost is None else cost.tokens_s(request.num_uncomputed_tokens, 0)
            request.turn_s = now_s + min(prompt_s, goal_s)

    def begun(self, request: Request) -> None:
        """The request has its first token, or is about to have it."""
        now_s = self._clock()
        num_left = request.most_tokens - len(request.token_ids)
        is_late = now_s > request.first_due_s
        request.last_due_s = -math.inf if is_late else now_s + self.tpot_s_of(request) * num_left

    def prompt_tokens(self, decoding: Collection[Request], prompts: Sequence[Request]) -> int:
        """At least `SMALLEST_CHUNK`. `prompts`: those that wait, at least one, in the order in which they come."""
        cost = self._costs.cost
        if cost is None or not cost.knows_prompts:
            return FIRST_CHUNK
        context = sum([request.num_computed_tokens for request in decoding])
        beside_s = cost.without_prompt_s(len(decoding), context)
        planned_s = PLANNED_SHARE * min([self.tpot_s_of(request) for request in decoding], default=self._tpot_s)
        start = prompts[0].num_computed_tokens
        least = max(SMALLEST_CHUNK, cost.chunk_within(planned_s - beside_s, start))
        if not decoding:
            return least
        now_s = self._clock()
        within_s = max(planned_s - beside_s, cost.prompt_token_s * SMALLEST_CHUNK)
        needed, pressing_s, is_late = self._needed_share(prompts, cost, now_s)
        wanted_s = 0.0
        is_pressing = needed > within_s / (within_s + beside_s)
        if is_pressing or is_late:
            spared_s, spared_always_s = self._spared_s(decoding, now_s, beside_s, pressing_s)
            if is_pressing:
                wanted_s = beside_s * needed / (1.0 - needed) if needed < 1.0 else math.inf
                wanted_s = min(wanted_s, spared_s - beside_s)
            if is_late:
                wanted_s = max(wanted_s, spared_always_s - beside_s)
        within_s = max(within_s, wanted_s)
        return _NO_BOUND if within_s == math.inf else max(least, cost.chunk_within(within_s, start))

    def _needed_share(self, prompts: Iterable[Request], cost: StepCost, now_s: float) -> tuple[float, float, bool]:
        """The share of the time that has to go to prompts so that all that can be in time are, how long it takes to
        compute everything up to the last one that needs it, and whether there are others, late whatever is done."""
        prompts_s, pressing_s, needed, is_late = 0.0, 0.0, 0.0, False
        for request in prompts:
            prompts_s += cost.tokens_s(request.num_uncomputed_tokens, request.num_computed_tokens)
            left_s = request.first_due_s - now_s
            if left_s < prompts_s:
                is_late = True
                continue
            planned_s = left_s - (1.0 - _PLANNED_WAIT) * self._ttft_of(request)
            share = min(1.0, prompts_s / planned_s) if planned_s > 0.0 else 1.0
            if share >= needed:
                needed, pressing_s = share, prompts_s
        return needed, pressing_s, is_late

    def _spared_s(
        self, decoding: Iterable[Request], now_s: float, beside_s: float, prompts_s: float
    ) -> tuple[float, float]:
        """How long a step may be that costs no stream a goal which can still meet both of its own: when `prompts_s` of
        prompts are computed in such steps, beside what takes `beside_s` of each, and when they never end."""
        spared_s = spared_always_s = math.inf
        for request in decoding:
            if request.last_due_s is None:  # it was the only one to be computed when it had its first token
                self.begun(request)
            assert request.last_due_s is not None
            goal_s = self.tpot_s_of(request)
            num_left = max(1, request.most_tokens - len(request.token_ids))
            pace_s = (request.last_due_s - now_s) / num_left
            if pace_s >= PLANNED_SHARE * goal_s:
                longest_s = PLANNED_SHARE * max(pace_s, goal_s)
                spared_always_s = min(spared_always_s, longest_s)
                if num_left * (pace_s - beside_s) < prompts_s:
                    spared_s = min(spared_s, longest_s)
        return spared_s, spared_always_s

    def tpot_s_of(self, request: Request) -> float:
        """The goal between its tokens."""
        return request.params.goal_tpot_s or self._tpot_s

    def _ttft_of(self, request: Request) -> float:
        return (request.params.goal_ttft_s or self._ttft_s) if self._ttft_s else 0.0
