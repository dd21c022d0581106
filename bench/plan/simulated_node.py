"""A node without a model: the real scheduler, block pool and cost model, over steps that take what a `StepCost` says.

Owns one engine core and the virtual time of its steps. Knows no router and no clock but the one it is told. What it
samples means nothing; how many tokens there are and when is all that counts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

from engine.attention.base import LayerStored
from engine.cache.block_pool import BlockPool
from engine.core import EngineCore, FirstToken
from engine.first_costs import measure_first_costs
from engine.held_blocks import Reservation
from engine.scheduler.limits import SchedulerLimits
from engine.scheduler.request import PromptScores, RequestOutput, SampledToken, Step
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.step_bound import StepBound
from engine.scheduler.step_costs import StepCosts, work_of
from router.goals import NO_GOALS, Goals
from wire.messages import Decode, NodeStatus, Prefill
from wire.request_key import RequestKey
from wire.step_cost import StepCost

_TOKEN = SampledToken(1, None)
BLOCK_SIZE = 16
FINGERPRINT = "plan"
_START_S = -1000.0
"""Nodes start long before the load, which begins at 0."""
_SPELL_S = 0.7
"""How long it lasts on average that steps take longer, or shorter, than they cost."""


@dataclass(frozen=True, slots=True)
class NodeShape:
    """What a simulated node can do. `step_cost`: what its steps really take; the node does not know it beforehand.
    `goals`: what its steps keep to, see `StepBound`. `noise`: by which share steps take longer or shorter than that
    for about a second on end, as where other programs use the processors too (standard deviation). `between_steps_s`:
    what the node does when a step has ended, until the next one can begin."""

    step_cost: StepCost
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    goals: Goals = NO_GOALS
    noise: float = 0.0
    between_steps_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Computed:
    """See `RunningStep`."""

    sampled: Mapping[RequestKey, SampledToken]

    def result(self) -> Mapping[RequestKey, SampledToken]:
        return self.sampled

    def prompt_scores(self) -> Mapping[RequestKey, PromptScores]:
        return {}


class _TimedRunner:
    """See `Runner`. `now_s` moves by what each step takes."""

    is_asynchronous = False

    def __init__(self, cost: StepCost, noise: float) -> None:
        self.now_s = _START_S
        self._cost = cost
        self._noise = noise
        self._chance = random.Random(0)
        self._factor = 1.0
        self._changes_s = 0.0

    def launch(self, step: Step, layer_stored: LayerStored | None = None) -> _Computed:
        if self._noise and self.now_s >= self._changes_s:
            self._changes_s = self.now_s + self._chance.expovariate(1 / _SPELL_S)
            self._factor = math.exp(self._chance.gauss(0.0, self._noise))
        self.now_s += self._factor * self._cost.seconds(work_of(step))
        return _Computed({share.key: _TOKEN for share in step.requests if share.needs_sample})


@dataclass(slots=True)
class _Awaited:
    """A decode leg whose KV is computed elsewhere. `has_arrived`: it is here, once there is a reservation for it."""

    leg: Decode
    reservation: Reservation | None = None
    has_arrived: bool = False


class SimulatedNode:
    """See the module. `is_stepping`: a step is being computed, whose outputs the owner has."""

    def __init__(self, shape: NodeShape) -> None:
        pool = BlockPool(shape.num_blocks)
        self.is_stepping = False
        self._between_steps_s = shape.between_steps_s
        self._runner = _TimedRunner(shape.step_cost, shape.noise)
        self._awaited: dict[RequestKey, _Awaited] = {}
        costs = StepCosts(clock := lambda: self._runner.now_s)
        goals = shape.goals
        bound = StepBound(costs, goals.tpot_s, goals.ttft_s, clock) if goals.tpot_s else None
        most = shape.num_blocks * BLOCK_SIZE
        limits = SchedulerLimits(BLOCK_SIZE, shape.max_num_seqs, shape.max_num_batched_tokens, most, 10**6)
        scheduler = Scheduler(pool, limits, frozenset(), bound)
        self.core = EngineCore(pool, scheduler, self._runner, FINGERPRINT, None, costs)
        sizes = BLOCK_SIZE, shape.num_blocks, shape.max_num_batched_tokens
        measure_first_costs(self._runner, costs, *sizes, most_s=math.inf)  # real time must change nothing here

    @property
    def status(self) -> NodeStatus:
        """What a heartbeat would say."""
        return self.core.status()

    def prefill(self, leg: Prefill, now_s: float) -> None:
        """Take a prefill leg."""
        self._runner.now_s = now_s
        self.core.add(_key(leg), leg.token_ids, leg.params, first_token_only=True)

    def decode(self, leg: Decode, now_s: float) -> None:
        """Take a decode leg."""
        self._runner.now_s = now_s
        if leg.prefill_peer is None:
            self.core.add(_key(leg), leg.token_ids, leg.params)
        else:
            self._awaited[_key(leg)] = _Awaited(leg)
            self._reserve()

    def arrived(self, key: RequestKey, now_s: float) -> None:
        """The KV of a decode leg would be here, had it room."""
        self._runner.now_s = now_s
        self._awaited[key].has_arrived = True
        self._deliver()

    def release(self, key: RequestKey) -> None:
        """The KV of a prefill leg was taken over, or nobody waits for that of a decode leg any more."""
        self._awaited.pop(key, None)
        self.core.release(key)

    def step(self, now_s: float) -> tuple[float, list[RequestOutput]]:
        """Compute a step that comes next: when it ends, and what comes of it then."""
        self._runner.now_s = now_s + self._between_steps_s
        outputs = self.core.step()
        return self._runner.now_s, outputs

    def take_in(self, now_s: float) -> None:
        """Take in what waits, as far as there is room."""
        self._runner.now_s = now_s
        self._reserve()
        self._deliver()

    def _reserve(self) -> None:
        for key, awaited in self._awaited.items():
            if awaited.reservation is None:
                awaited.reservation = self.core.reserve(key, awaited.leg.token_ids)
                if awaited.reservation is None:
                    return

    def _deliver(self) -> None:
        here = [key for key, each in self._awaited.items() if each.has_arrived and each.reservation is not None]
        for key in here:
            awaited = self._awaited.pop(key)
            leg, reservation = awaited.leg, awaited.reservation
            assert reservation is not None
            first = FirstToken(key, leg.params, _TOKEN.token_id)
            self.core.add_reserved(reservation, leg.token_ids, [first], num_prompt_tokens=len(leg.token_ids))


def _key(leg: Prefill | Decode) -> RequestKey:
    return RequestKey(leg.handoff_id, leg.attempt)
