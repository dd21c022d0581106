"""A node without a model: the real scheduler, block pool and cost model, over steps that take what a `StepCost` says.

Owns one engine core and the virtual time of its steps. Knows no router and no clock but the one it is told. What it
samples means nothing; how many tokens there are and when is all that counts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

from baton.engine.attention.base import LayerStored
from baton.engine.cache.block_pool import BlockPool
from baton.engine.core import EngineCore, FirstToken
from baton.engine.first_costs import measure_first_costs
from baton.engine.held_blocks import Reservation
from baton.engine.scheduler.limits import SchedulerLimits
from baton.engine.scheduler.request import PromptScores, RequestOutput, SampledToken, Step
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.step_bound import StepBound
from baton.engine.scheduler.step_costs import USUAL_PAIR, StepCosts, work_of
from baton.node.lent_cores import LentCores
from baton.router.routing.goals import NO_GOALS, Goals
from baton.wire.messages import Decode, NodeStatus, Prefill
from baton.wire.request_key import RequestKey
from baton.wire.step_cost import StepCost

_TOKEN = SampledToken(1, None)
BLOCK_SIZE = 16
FINGERPRINT = "plan"
_START_S = -1000.0
"""Nodes start long before the load, which begins at 0."""
_GUEST_SHARE = 0.7
"""What threads on cores of another node have of the time in which these are lent: they are woken, and leave between two
tiles. Measured with 512/64 at 2 and 4 requests/s (docs/performance.md)."""
_SPELL_S = 0.7
"""How long it lasts on average that steps take longer, or shorter, than they cost."""


@dataclass(frozen=True, slots=True)
class NodeShape:
    """What a simulated node can do. `step_cost`: what its steps really take; the node does not know it beforehand.
    `goals`: what its steps keep to, see `StepBound`. `noise`: by which share steps take longer or shorter than that
    for about a second on end, as where other programs use the processors too (standard deviation). `between_steps_s`:
    what the node does when a step has ended, until the next one can begin. `lent_cost`: what its steps would take if
    the cores of its partner were its own too; None: it has no partner. `max_rest_s`: see `LentCores`."""

    step_cost: StepCost
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int
    goals: Goals = NO_GOALS
    noise: float = 0.0
    between_steps_s: float = 0.0
    lent_cost: StepCost | None = None
    max_rest_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Computed:
    """See `RunningStep`."""

    sampled: Mapping[RequestKey, SampledToken]

    def result(self) -> Mapping[RequestKey, SampledToken]:
        return self.sampled

    def prompt_scores(self) -> Mapping[RequestKey, PromptScores]:
        return {}


class _TimedRunner:
    """See `Runner`. `now_s` moves by what each step takes. `lent_share`: of the time of its next step in which it has
    the cores of its partner too."""

    is_asynchronous = False

    def __init__(self, shape: NodeShape) -> None:
        self.now_s = _START_S
        self.lent_share = 0.0
        self._cost = shape.step_cost
        self._lent_cost = shape.lent_cost
        self._noise = shape.noise
        self._chance = random.Random(0)
        self._factor = 1.0
        self._changes_s = 0.0

    def launch(self, step: Step, layer_stored: LayerStored | None = None) -> _Computed:
        if self._noise and self.now_s >= self._changes_s:
            self._changes_s = self.now_s + self._chance.expovariate(1 / _SPELL_S)
            self._factor = math.exp(self._chance.gauss(0.0, self._noise))
        work = work_of(step)
        seconds = self._cost.seconds(work)
        if self._lent_cost is not None:
            rate = (1.0 - self.lent_share) / seconds + self.lent_share / self._lent_cost.seconds(work)
            seconds = min(seconds, 1.0 / rate)
        self.now_s += self._factor * seconds
        return _Computed({share.key: _TOKEN for share in step.requests if share.needs_sample})


@dataclass(slots=True)
class _Awaited:
    """A decode leg whose KV is computed elsewhere. `has_arrived`: it is here, once there is a reservation for it."""

    leg: Decode
    reservation: Reservation | None = None
    has_arrived: bool = False


@dataclass(frozen=True, slots=True)
class _Loans:
    """See `Loans`: who computes is known, and who waits for work has lent its cores."""

    node: SimulatedNode

    def give(self, for_s: float = -1.0) -> None:
        pass

    def take_back(self) -> None:
        pass

    def is_wanted(self, within_s: float) -> bool:
        return self.node.partner is not None and self.node.partner.is_stepping


class SimulatedNode:
    """See the module. `is_stepping`: a step is being computed, whose outputs the owner has. `partner`: the node with
    which it lends and borrows cores; the owner sets it before the first step. `rests_until_s`: it begins no step before
    that, so that its partner has its cores."""

    def __init__(self, shape: NodeShape) -> None:
        pool = BlockPool(shape.num_blocks)
        self.is_stepping = False
        self.partner: SimulatedNode | None = None
        self.rests_until_s = -math.inf
        self._cores = LentCores(_Loans(self), shape.max_rest_s, shape.goals.tpot_s)
        self._step_s = 0.0
        self._between_steps_s = shape.between_steps_s
        self._runner = _TimedRunner(shape)
        self._awaited: dict[RequestKey, _Awaited] = {}
        expected = shape.step_cost.prompt_pair_s / (shape.step_cost.prompt_token_s or 1.0)  # a config tells that
        costs = StepCosts(clock := lambda: self._runner.now_s, expected or USUAL_PAIR)
        goals = shape.goals
        bound = StepBound(costs, goals.tpot_s, goals.ttft_s, clock) if goals.tpot_s else None
        most = shape.num_blocks * BLOCK_SIZE
        limits = SchedulerLimits(BLOCK_SIZE, shape.max_num_seqs, shape.max_num_batched_tokens, most, 10**6)
        scheduler = Scheduler(pool, limits, frozenset(), bound)
        self.core = EngineCore(pool, scheduler, self._runner, FINGERPRINT, None, costs)
        measure_first_costs(self._runner, costs, limits, most_s=math.inf)  # real time must change nothing here

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
        begin_s = self._runner.now_s = now_s + self._between_steps_s
        self.is_stepping = True
        self._runner.lent_share = 0.0 if self.partner is None else self.partner.lent_share
        outputs = self.core.step()
        self.is_stepping = bool(outputs)
        end_s = self._runner.now_s
        self._step_s = end_s - begin_s
        self.rests_until_s = end_s + self._cores.rest_s(self._step_s)
        return end_s, outputs

    @property
    def lent_share(self) -> float:
        """The share of the time in which its partner has its cores, as far as it can be told now."""
        if not (self.is_stepping or self.core.has_work):
            return _GUEST_SHARE
        rest_s = self._cores.rest_s(self._step_s)
        return _GUEST_SHARE * rest_s / (self._step_s + rest_s) if rest_s else 0.0

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
