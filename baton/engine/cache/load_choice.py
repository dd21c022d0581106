"""Load or compute: whether KV that a store has is here sooner than the engine would have computed it.

Owns what is known of the times of tiers, the choice, and how long a load may take. Knows no store, no pool and no
request. Its predictions are about one prompt alone: others in the engine only make computing take longer.

The times of a tier are averages over loads: until its first block is here, and for each one behind that. A tier from
which nothing was loaded is believed to take no time. What is known fades while nothing is loaded, so that a tier has
another chance after a bad spell.

Invariant: a load is over when it has taken `PATIENCE` of what computing its blocks takes, and as long again as
computing those that came would have taken. So a request that waited in vain is that much later, whatever a store does.
Loads that wait before it count like its own, because a store may take one after another. A load whose blocks come more
slowly than they are computed is over as soon as that is seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

from baton.engine.cache.store import LATENCY_S
from baton.wire.step_cost import StepCost

PATIENCE = 0.1
TOLERANCE_S = 0.002
"""Less is no difference: a node that has nothing else to do looks as often as that whether a load is over."""
FADES_S = 30.0
"""After so long without a load, a tier is believed to be twice as fast."""
LEAST_BYTES_PER_S = 2**28
"""A load may take `LATENCY_S` and the bytes of all open loads at this rate, while nobody knows what computing takes."""
_NEWEST_SHARE = 0.3
_PACE_BLOCKS, _SLOW_PACE = 4, 1.05
"""After so many blocks it is seen how fast they come, and which share of the time for computing is slow."""


class LoadPlan(NamedTuple):
    """A load of as many blocks as it has `tiers`, from which they come. What it is expected to take, without those that
    wait before it; and what computing the blocks would, 0 where nobody knows."""

    tiers: Sequence[str]
    load_s: float
    compute_s: float


class TierTimes:
    """How long blocks of one tier take."""

    def __init__(self) -> None:
        self._first_s = self._next_s = 0.0
        self._learned_s = -math.inf

    def seconds(self, num_blocks: int, now_s: float) -> float:
        """What so many blocks are expected to take, 1 or more."""
        return (self._first_s + (num_blocks - 1) * self._next_s) * self._believed_share(now_s)

    def learn(self, num_blocks: int, first_s: float, others_s: float, now_s: float) -> None:
        """The first of so many blocks was here after `first_s`, and the last one `others_s` later."""
        share = self._believed_share(now_s)
        self._first_s = _mixed(share * self._first_s, first_s)
        if num_blocks > 1:
            self._next_s = _mixed(share * self._next_s, others_s / (num_blocks - 1))
        self._learned_s = now_s

    def _believed_share(self, now_s: float) -> float:
        return math.exp2((self._learned_s - now_s) / FADES_S)


def _mixed(average: float, newest: float) -> float:
    return average + _NEWEST_SHARE * (newest - average) if average else newest


class Arrivals:
    """When the last block of any load came, and what computing all that came would have taken. Threads of a store write
    it without a lock, so one of a great many may be missing."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.last_s = -math.inf
        self.earned_s = 0.0


class LoadProgress:
    """What has come of a load, and whether it may go on. `patience_s`: how long it may take without a block. `most_s`:
    what computing its blocks and those of the loads before it takes. `arrivals`: of all loads. `took`: by tier, how
    many blocks have come, how long the first of them was waited for, and how long the others."""

    def __init__(self, plan: LoadPlan, patience_s: float, most_s: float, arrivals: Arrivals) -> None:
        self.plan = plan
        self.num_blocks = 0
        self.is_damaged = self.has_ended = False
        self.took: dict[str, tuple[int, float, float]] = {}
        self._patience_s = patience_s
        self._most_s = most_s
        self._arrivals = arrivals
        self._begun_s = arrivals.clock()
        self._earned_before_s = arrivals.earned_s

    @property
    def is_over(self) -> bool:
        """Whether nobody need wait for it any longer."""
        return self.has_ended or self.is_late

    @property
    def is_late(self) -> bool:
        """Whether it has taken longer than it may, or will."""
        earned_s = min(self._arrivals.earned_s - self._earned_before_s, self._most_s)
        return self._arrivals.clock() - self._begun_s >= self._patience_s + earned_s or self._is_slow

    @property
    def _is_slow(self) -> bool:
        """Whether computing what has not come is sooner than waiting for it, as fast as blocks have come so far."""
        num_left = len(self.plan.tiers) - self.num_blocks
        # blocks come in bursts: in the middle of one, the time before it would count for too few of them
        if not num_left or self.num_blocks < _PACE_BLOCKS or self.waited_s < TOLERANCE_S or not self.plan.compute_s:
            return False
        took = list(self.took.values())
        pace_s = sum([others_s for _, _, others_s in took]) / max(1, self.num_blocks - len(took))
        block_s = self.plan.compute_s / len(self.plan.tiers)
        return pace_s > _SLOW_PACE * block_s and num_left * (pace_s - block_s) > TOLERANCE_S

    @property
    def taken_s(self) -> float:
        """How long what has come was waited for. To be asked when nothing comes any more."""
        return sum([first_s + others_s for _, first_s, others_s in self.took.values()])

    @property
    def left_s(self) -> float:
        """How long what has not come is expected to take."""
        return self.plan.load_s * (1.0 - self.num_blocks / len(self.plan.tiers))

    @property
    def waited_s(self) -> float:
        """How long it has waited for its next block, while no other load had one."""
        return self._arrivals.clock() - max(self._begun_s, self._arrivals.last_s)

    def arrived(self, place: int) -> None:
        """The block of that place is here."""
        tier, waited_s = self.plan.tiers[place], self.waited_s
        count, first_s, others_s = self.took.get(tier, (0, waited_s, -waited_s))
        self.took[tier] = count + 1, first_s, others_s + waited_s
        self.num_blocks += 1
        self._arrivals.last_s = self._arrivals.clock()
        self._arrivals.earned_s += self.plan.compute_s / len(self.plan.tiers)

    def damaged(self) -> None:
        """The next block came with wrong bytes."""
        self.is_damaged = True

    def ended(self) -> None:
        """No more blocks come, in time or not."""
        self.has_ended = True


class LoadChoice:
    """The choice for one engine and its store. A block has `block_size` tokens and `block_bytes` bytes. `cost`: what
    is known of the engine's steps, which have at most `max_chunk` tokens of a prompt."""

    def __init__(
        self,
        block_size: int,
        block_bytes: int,
        max_chunk: int,
        cost: Callable[[], StepCost | None],
        clock: Callable[[], float],
    ) -> None:
        self._block_size = block_size
        self._least_s = block_bytes / LEAST_BYTES_PER_S
        self._max_chunk = max_chunk
        self._cost = cost
        self._arrivals = Arrivals(clock)
        self._times: dict[str, TierTimes] = {}
        self._open: set[LoadProgress] = set()

    def plan(self, tiers: Sequence[str], start: int, num_tokens: int) -> LoadPlan | None:
        """Which of the blocks with these tiers to load, from the first one on, for a prompt of `num_tokens` of which
        `start` are here. None: all of it is computed sooner.

        Computing a token takes the longer the more are before it, and loading does not. So it is all blocks of a tier
        or none.
        """
        cost = self._cost()
        if cost is None or not cost.knows_prompts:
            return LoadPlan(tiers, 0.0, 0.0) if tiers else None
        before_s = sum([progress.left_s for progress in self._open])
        plans = [
            LoadPlan(tiers[:end], self._load_s(tiers[:end]), self._compute_s(cost, end, start, num_tokens))
            for end in accumulate(len(list(same)) for _, same in groupby(tiers))
        ]
        best = max(plans, key=lambda plan: plan.compute_s - plan.load_s, default=None)
        if best is None or best.load_s + before_s > best.compute_s + TOLERANCE_S:
            return None
        return best if self._load_s(tiers[:1]) <= PATIENCE * best.compute_s + TOLERANCE_S else None

    def begin(self, plan: LoadPlan) -> LoadProgress:
        """A load begins, behind those that have not ended."""
        most_s = sum([progress.plan.compute_s for progress in self._open]) + plan.compute_s
        num_blocks = sum([len(progress.plan.tiers) for progress in self._open]) + len(plan.tiers)
        patience_s = PATIENCE * most_s + TOLERANCE_S if plan.compute_s else LATENCY_S + num_blocks * self._least_s
        progress = LoadProgress(plan, patience_s, most_s, self._arrivals)
        self._open.add(progress)
        return progress

    def end(self, progress: LoadProgress, *, was_late: bool) -> None:
        """A load is closed: its times are what its tiers are expected to take from now on. A tier of which nothing came
        in time takes twice as long at least."""
        self._open.discard(progress)
        now_s, took = self._arrivals.clock(), progress.took
        missing = progress.plan.tiers[progress.num_blocks :]
        if was_late and missing and missing[0] not in took:
            took[missing[0]] = 1, 2.0 * progress.waited_s, 0.0
        for tier, (num_blocks, first_s, others_s) in took.items():
            self._times.setdefault(tier, TierTimes()).learn(num_blocks, first_s, others_s, now_s)

    def _load_s(self, tiers: Sequence[str]) -> float:
        now_s = self._arrivals.clock()
        counts = [(tier, tiers.count(tier)) for tier in dict.fromkeys(tiers)]
        return sum([self._times[tier].seconds(count, now_s) for tier, count in counts if tier in self._times])

    def _compute_s(self, cost: StepCost, num_blocks: int, start: int, num_tokens: int) -> float:
        """What the engine is spared by these blocks: their tokens, and the steps that no longer are."""
        num_loaded, num_left = num_blocks * self._block_size, num_tokens - start
        num_steps = -(-num_left // self._max_chunk) + (num_loaded - num_left) // self._max_chunk
        return num_steps * cost.step_s + cost.tokens_s(num_loaded, start)
