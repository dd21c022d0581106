"""KV offloading: what the block pool forgets goes to tiers of `KvStore`s, and comes back for requests that can use it.

Owns what is loaded, how long that may take, and what came of it. Bytes go between pool and tiers in
`baton.engine.cache.tiered_pool`; where several ranks have pools of their own, all of them do the same at once. It knows
no requests and no steps: who owns a block, and when it is written, is said by `baton.engine.scheduler.request_blocks`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from baton.engine.cache.block_pool import BlockPool
from baton.engine.cache.last_blocks import TimeLeft
from baton.engine.cache.load_choice import LoadChoice, LoadPlan, LoadProgress
from baton.engine.cache.tiered_pool import OffloadCounters, Progress
from baton.engine.cache.tiers import Tiers
from baton.wire.step_cost import StepCost
from baton.wire.tiers import TierUsage


class PoolLoad(Protocol):
    """A load into the pool of an engine."""

    @property
    def is_over(self) -> bool:
        """Whether nobody need wait for it any longer."""
        ...

    def close(self) -> int:
        """Take nothing any more. How many blocks from the first one on are there."""
        ...


class PoolTiers(Protocol):
    """The pool of an engine and the tiers below it: a `TieredPool`, or those of all ranks. `tiers`: of this rank;
    `block_bytes`: of its part of a block."""

    tiers: Tiers
    counters: OffloadCounters
    block_bytes: int

    @property
    def has_unsaved(self) -> bool:
        """Whether some blocks hold what the pool has forgotten and no store has."""
        ...

    def evicted(self, blocks: Iterable[tuple[int, bytes]]) -> None:
        """These blocks and hashes are not found any more, and each block has an owner."""
        ...

    def save(self, block_ids: Iterable[int]) -> None:
        """The owner of these blocks is about to write into them."""
        ...

    def give_away(self, block_ids: Iterable[int]) -> None:
        """Another node is about to write into these blocks, and does not wait."""
        ...

    def load(self, hashes: Sequence[bytes], block_ids: Sequence[int], progress: Progress) -> PoolLoad:
        """Begin to load blocks. Nobody else writes into `block_ids` until the load was closed."""
        ...

    def save_last(
        self, reused: Sequence[tuple[int, bytes]], others: Sequence[tuple[int, bytes]], time_left_s: TimeLeft
    ) -> None:
        """Before a planned end: have a tier keep these blocks and hashes, while there is time. Waits."""
        ...

    def close(self) -> None:
        """End the tiers. All loads were closed before."""
        ...


class KvOffload:
    """One engine's use of its KV stores: what is saved, and what is loaded. `pool`: blocks of `block_size` tokens, and
    the tiers below them. `cost`, `max_chunk`: see `LoadChoice`. All calls but `usage` come from the engine's thread."""

    def __init__(
        self,
        pool: PoolTiers,
        block_size: int,
        max_chunk: int,
        cost: Callable[[], StepCost | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = pool.counters
        self.tiers = pool.tiers.tiers
        self.block_bytes = pool.block_bytes
        # what happens to blocks is told to the pool as it is
        self.evicted = pool.evicted
        self.overwriting = pool.save
        self.give_away = pool.give_away
        self._pool = pool
        self._block_size = block_size
        self._choice = LoadChoice(block_size, pool.block_bytes, max_chunk, cost, clock)
        self._loads: dict[PoolLoad, LoadProgress] = {}

    @property
    def num_failures(self) -> int:
        """Calls of stores that have failed."""
        return sum([tier.counters.num_failures for tier in self.tiers])

    @property
    def num_loads(self) -> int:
        """Loads that somebody waits for."""
        return sum(not load.is_over for load in self._loads)

    @property
    def has_unsaved(self) -> bool:
        """Whether some blocks hold what the pool has forgotten and no store has."""
        return self._pool.has_unsaved

    @property
    def usage(self) -> float:
        """How full the store is, 0 to 1."""
        return self._pool.tiers.usage

    @property
    def usage_by_tier(self) -> tuple[TierUsage, ...]:
        """How full each tier is."""
        return tuple([TierUsage(tier.name, tier.usage) for tier in self.tiers])

    def plan(self, hashes: Sequence[bytes], start: int, num_tokens: int) -> LoadPlan | None:
        """What to load for a prompt of `num_tokens`, whose blocks from place `start` on have these hashes. None: the
        store has nothing, or computing is sooner."""
        if not hashes:
            return None
        self.counters.num_queried_tokens += len(hashes) * self._block_size
        tiers = self._pool.tiers.names(hashes)
        if not tiers:
            return None
        plan = self._choice.plan(tiers, start, num_tokens)
        num_planned = 0 if plan is None else len(plan.tiers)
        self.counters.num_refused_tokens += (len(tiers) - num_planned) * self._block_size
        return plan

    def load(self, plan: LoadPlan, hashes: Sequence[bytes], block_ids: Sequence[int]) -> PoolLoad:
        """Begin to load blocks. Nobody else writes into `block_ids` until `end` has returned."""
        progress = self._choice.begin(plan)
        load = self._pool.load(hashes, block_ids, progress)
        self._loads[load] = progress
        return load

    def end(self, load: PoolLoad) -> Sequence[str]:
        """Close a load. For each of its blocks that are there, from the first one on, the tier that had it."""
        progress = self._loads.pop(load)
        is_late = progress.is_over and not progress.has_ended
        num_blocks, tiers = load.close(), progress.plan.tiers
        self._choice.end(progress, was_late=is_late)
        self.counters.num_loaded_tokens += num_blocks * self._block_size
        if progress.is_damaged:
            self.counters.num_damaged_blocks += 1
        elif is_late:
            self.counters.num_late_loads += 1
        elif num_blocks == len(tiers):
            self._count_times(progress)
        return tiers[:num_blocks]

    def _count_times(self, progress: LoadProgress) -> None:
        plan = progress.plan
        self.counters.loading_s += progress.taken_s
        self.counters.expected_s += plan.load_s
        self.counters.computing_s += plan.compute_s

    def save(self, pool: BlockPool, time_left_s: TimeLeft) -> None:
        """Before a planned end: have a tier keep what is findable in `pool`, as far as there is time. Nothing is
        computed any more. Waits."""
        self._end_loads()
        self._pool.save_last(*pool.findable_blocks(), time_left_s)

    def close(self) -> None:
        """End all loads, then the store."""
        self._end_loads()
        self._pool.close()

    def _end_loads(self) -> None:
        for load in self._loads:
            load.close()
        self._loads.clear()
