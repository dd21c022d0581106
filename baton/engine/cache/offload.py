"""KV offloading: what the block pool forgets goes to tiers of `KvStore`s, and comes back for requests that can use it.

Owns the order of bytes between the pool and the tiers, and trusts none. It knows no requests and no steps: who owns a
block, and when it is written, is said by `baton.engine.scheduler.request_blocks`.

A block is saved when it is about to be overwritten, not when it is allocated. A prompt that takes a hundred blocks at
once writes them a chunk at a time, so each step saves as much as it computes, and no step is held up for all of them.
Until then the block is *unsaved*: its old content is there, nobody finds it, and only its owner can write into it.

Invariants:
- whoever writes into blocks of the pool says so first (`overwriting`, `give_away`); a load does it by itself;
- what a store gives is written into blocks of an open load only, and counts only if the bytes that lie in the pool
  afterwards have the checksum that was made when the block was saved;
- when a load was closed nothing writes into its blocks any more, so they can be released at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from baton.engine.cache.block_pool import BlockPool
from baton.engine.cache.last_blocks import LastBlock, LastBlocks, TimeLeft
from baton.engine.cache.load_choice import LoadChoice, LoadPlan, LoadProgress
from baton.engine.cache.store import BlockBytes, StoredBlock, checksum_of
from baton.engine.cache.tiers import Tiers
from baton.wire.step_cost import StepCost
from baton.wire.tiers import TierUsage

MOST_AT_ONCE_BYTES = 2**24
"""What is saved of blocks that are given away: 4 ms of copying."""


class PoolBytes(Protocol):
    """The bytes of the pool's blocks. Its calls may come from several threads, each about other blocks."""

    block_bytes: int

    def read(self, block_id: int) -> BlockBytes:
        """The bytes of a block that no step writes: the pool's own, or a copy."""
        ...

    def write(self, block_id: int, content: BlockBytes) -> BlockBytes:
        """Copy `content` into a block; the bytes that were written, which nobody else can change."""
        ...


@dataclass(slots=True)
class OffloadCounters:
    """Since the start. Tokens are those of whole blocks; refused are those that are computed sooner than loaded. Stored
    and dropped blocks are counted by two threads without a lock, so one of a great many may be missing.

    Of the loads that were whole, `loading_s` is what they took, `expected_s` what they were expected to take, and
    `computing_s` what computing would have."""

    num_queried_tokens: int = 0
    num_loaded_tokens: int = 0
    num_refused_tokens: int = 0
    loading_s: float = 0.0
    expected_s: float = 0.0
    computing_s: float = 0.0
    num_stored_blocks: int = 0
    num_dropped_blocks: int = 0
    num_late_loads: int = 0
    num_damaged_blocks: int = 0


class Load:
    """One load: the block of `hashes[i]` is to come into the block `block_ids[i]`. See `Landing`, which a store sees of
    it. `progress`: when it is over at the latest."""

    def __init__(
        self,
        hashes: Sequence[bytes],
        block_ids: Sequence[int],
        write: Callable[[int, StoredBlock], bool],
        progress: LoadProgress,
    ) -> None:
        self.progress = progress
        self._hashes = hashes
        self._targets = {each: (place, block_ids[place]) for place, each in enumerate(hashes)}
        self._write = write
        self._lock = threading.Lock()
        self._came: set[bytes] = set()
        self._has_ended = False
        self._is_closed = False
        self.damaged: bytes | None = None
        """The block whose bytes were wrong, after which nothing is taken."""

    @property
    def is_over(self) -> bool:
        """Whether nobody need wait for it any longer."""
        return self._has_ended or self.progress.is_late

    @property
    def has_ended(self) -> bool:
        """Whether the store has ended it, in time or not."""
        return self._has_ended

    def arrived(self, block: StoredBlock) -> bool:
        """The store has the bytes of one more block of this load, in order."""
        with self._lock:
            target = self._targets.get(block.block_hash)
            if self._is_closed or self.damaged is not None:
                return False
            if target is None or block.block_hash in self._came:
                return True
            place, block_id = target
            if self._write(block_id, block):
                self._came.add(block.block_hash)
                self.progress.arrived(place)
            else:
                self.damaged = block.block_hash
            return self.damaged is None

    def ended(self) -> None:
        """The store hands over nothing more for this load."""
        self._has_ended = True

    def close(self) -> int:
        """Take nothing any more, after at most one block that is being written. How many blocks from the first one on
        are there."""
        with self._lock:
            self._is_closed = True
        return next((place for place, each in enumerate(self._hashes) if each not in self._came), len(self._hashes))


class KvOffload:
    """One engine's use of its KV stores: what is saved, and what is loaded. `pool`: the
    bytes of the blocks, of `block_size` tokens each. `cost`, `max_chunk`: see `LoadChoice`. All calls but `usage` come
    from the engine's thread."""

    def __init__(
        self,
        tiers: Tiers,
        pool: PoolBytes,
        block_size: int,
        max_chunk: int,
        cost: Callable[[], StepCost | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = OffloadCounters()
        self.tiers = tiers.tiers
        self.block_bytes = pool.block_bytes
        self._tiers = tiers
        self._pool = pool
        self._block_size = block_size
        self._choice = LoadChoice(block_size, pool.block_bytes, max_chunk, cost, clock)
        self._unsaved: dict[int, bytes] = {}
        self._loads: set[Load] = set()

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
        return bool(self._unsaved)

    @property
    def usage(self) -> float:
        """How full the store is, 0 to 1."""
        return self._tiers.usage

    @property
    def usage_by_tier(self) -> tuple[TierUsage, ...]:
        """How full each tier is."""
        return tuple([TierUsage(tier.name, tier.usage) for tier in self.tiers])

    def evicted(self, blocks: Iterable[tuple[int, bytes]]) -> None:
        """These blocks and hashes are not found any more. Each block has an owner now, and its content until that
        writes."""
        self._unsaved.update(blocks)

    def overwriting(self, block_ids: Iterable[int]) -> None:
        """The owner of these blocks is about to write into them: save what they hold."""
        for block_id in block_ids:
            self._save(block_id)

    def give_away(self, block_ids: Iterable[int]) -> None:
        """As `overwriting`, where all of them may be written at once by somebody who does not wait: what would take
        long is not saved."""
        most = max(1, MOST_AT_ONCE_BYTES // self._pool.block_bytes)
        unsaved = [block_id for block_id in block_ids if block_id in self._unsaved]
        self.overwriting(unsaved[:most])
        for block_id in unsaved[most:]:
            del self._unsaved[block_id]
            self.counters.num_dropped_blocks += 1

    def plan(self, hashes: Sequence[bytes], start: int, num_tokens: int) -> LoadPlan | None:
        """What to load for a prompt of `num_tokens`, whose blocks from place `start` on have these hashes. None: the
        store has nothing, or computing is sooner."""
        if not hashes:
            return None
        self.counters.num_queried_tokens += len(hashes) * self._block_size
        tiers = self._tiers.names(hashes)
        if not tiers:
            return None
        plan = self._choice.plan(tiers, start, num_tokens)
        num_planned = 0 if plan is None else len(plan.tiers)
        self.counters.num_refused_tokens += (len(tiers) - num_planned) * self._block_size
        return plan

    def load(self, plan: LoadPlan, hashes: Sequence[bytes], block_ids: Sequence[int]) -> Load:
        """Begin to load blocks. Nobody else writes into `block_ids` until `end` has returned."""
        load = Load(hashes, block_ids, self._land, self._choice.begin(plan))
        self._loads.add(load)
        self._tiers.load(hashes, load)
        return load

    def end(self, load: Load) -> Sequence[str]:
        """Close a load. For each of its blocks that are there, from the first one on, the tier that had it."""
        self._loads.discard(load)
        is_late = load.is_over and not load.has_ended
        num_blocks, tiers = load.close(), load.progress.plan.tiers
        self._choice.end(load.progress, was_late=is_late)
        self.counters.num_loaded_tokens += num_blocks * self._block_size
        if load.damaged is not None:
            self.counters.num_damaged_blocks += 1
            self._tiers.forget(load.damaged)
        elif is_late:
            self.counters.num_late_loads += 1
        elif num_blocks == len(tiers):
            self._count_times(load.progress)
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
        reused, others = map(self._last_blocks, pool.findable_blocks())
        self._tiers.save(LastBlocks(reused, others), time_left_s)

    def close(self) -> None:
        """End all loads, then the store."""
        self._end_loads()
        self._unsaved.clear()
        self._tiers.close()

    def _save(self, block_id: int) -> None:
        # one call, so that it is atomic: a thread of a store comes here too, for blocks of its load
        block_hash = self._unsaved.pop(block_id, None)
        if block_hash is None or self._tiers.holds(block_hash):
            return
        if self._tiers.put(self._read(block_id, block_hash)):
            self.counters.num_stored_blocks += 1
        else:
            self.counters.num_dropped_blocks += 1

    def _read(self, block_id: int, block_hash: bytes) -> StoredBlock:
        content = self._pool.read(block_id)
        return StoredBlock(block_hash, checksum_of(block_hash, content), content)

    def _last_blocks(self, blocks: Sequence[tuple[int, bytes]]) -> list[LastBlock]:
        return [LastBlock(block_hash, partial(self._read, block_id, block_hash)) for block_id, block_hash in blocks]

    def _end_loads(self) -> None:
        for load in self._loads:
            load.close()
        self._loads.clear()

    def _land(self, block_id: int, block: StoredBlock) -> bool:
        """Write what a store gave into a block of the pool. False: it is not what was put."""
        self._save(block_id)
        if block.content.nbytes != self._pool.block_bytes or block.content.dtype.itemsize != 1:
            return False
        written = self._pool.write(block_id, block.content)
        return checksum_of(block.block_hash, written) == block.checksum
