"""One pool and the tiers below it: bytes go down when a block is overwritten, and come up for an open load.

Owns which blocks are *unsaved*, and the order of bytes between the pool and the tiers, of which it trusts none. Knows
no requests, no steps and no other ranks: what is saved and loaded is decided by its caller, which for the pool of an
engine's first rank is `baton.engine.cache.offload`.

A block is saved when it is about to be overwritten, not when it is allocated. A prompt that takes a hundred blocks at
once writes them a chunk at a time, so each step saves as much as it computes, and no step is held up for all of them.
Until then the block is unsaved: its old content is there, nobody finds it, and only its owner can write into it.

Invariants:
- whoever writes into blocks of the pool says so first (`save`, `give_away`, `drop`); a load does it by itself;
- what a store gives is written into blocks of an open load only, and counts only if the bytes that lie in the pool
  afterwards have the checksum that was made when the block was saved;
- when a load was closed nothing writes into its blocks any more, so they can be released at once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from baton.engine.cache.last_blocks import LastBlock, LastBlocks, TimeLeft
from baton.engine.cache.store import BlockBytes, StoredBlock, checksum_of
from baton.engine.cache.tiers import Tiers

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


class Progress(Protocol):
    """What a load tells of itself. The calls may come from any thread, one at a time."""

    @property
    def is_over(self) -> bool:
        """Whether nobody need wait for it any longer."""
        ...

    def arrived(self, place: int) -> None:
        """The block of that place is in the pool."""
        ...

    def damaged(self) -> None:
        """The next block came with wrong bytes, and nothing more is taken."""
        ...

    def ended(self) -> None:
        """No more blocks come, whether all have arrived or not."""
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
    """One load: the block of `hashes[i]` is to come into the block `block_ids[i]` of `pool`. See `Landing`, which a
    store sees of it."""

    def __init__(self, hashes: Sequence[bytes], block_ids: Sequence[int], pool: TieredPool, progress: Progress) -> None:
        self._progress = progress
        self._hashes = hashes
        self._targets = {each: (place, block_ids[place]) for place, each in enumerate(hashes)}
        self._pool = pool
        self._lock = threading.Lock()
        self._came: set[bytes] = set()
        self._is_closed = False
        self._damaged: bytes | None = None

    @property
    def is_over(self) -> bool:
        """Whether nobody need wait for it any longer."""
        return self._progress.is_over

    def arrived(self, block: StoredBlock) -> bool:
        """The store has the bytes of one more block of this load, in order."""
        with self._lock:
            target = self._targets.get(block.block_hash)
            if self._is_closed or self._damaged is not None:
                return False
            if target is None or block.block_hash in self._came:
                return True
            place, block_id = target
            if self._pool.land(block_id, block):
                self._came.add(block.block_hash)
                self._progress.arrived(place)
            else:
                self._damaged = block.block_hash
                self._progress.damaged()
            return self._damaged is None

    def ended(self) -> None:
        """The store hands over nothing more for this load."""
        self._progress.ended()

    def close(self) -> int:
        """Take nothing any more, after at most one block that is being written. How many blocks from the first one on
        are there."""
        with self._lock:
            self._is_closed = True
        if self._damaged is not None:
            self._pool.tiers.forget(self._damaged)
        return next((place for place, each in enumerate(self._hashes) if each not in self._came), len(self._hashes))


class TieredPool:
    """The blocks of `pool` and the `tiers` below them. `counters`: those of stored and dropped blocks are counted
    here."""

    def __init__(self, tiers: Tiers, pool: PoolBytes) -> None:
        self.tiers = tiers
        self.counters = OffloadCounters()
        self.block_bytes = pool.block_bytes
        self._pool = pool
        self._unsaved: dict[int, bytes] = {}

    @property
    def has_unsaved(self) -> bool:
        """Whether some blocks hold what the pool has forgotten and no store has."""
        return bool(self._unsaved)

    def evicted(self, blocks: Iterable[tuple[int, bytes]]) -> None:
        """These blocks and hashes are not found any more. Each block has an owner now, and its content until that
        writes."""
        self._unsaved.update(blocks)

    def save(self, block_ids: Iterable[int]) -> None:
        """The owner of these blocks is about to write into them: save what they hold."""
        for block_id in block_ids:
            self._save(block_id)

    def give_away(self, block_ids: Iterable[int]) -> None:
        """As `save`, where all of them may be written at once by somebody who does not wait: what would take long is
        not saved."""
        most = max(1, MOST_AT_ONCE_BYTES // self.block_bytes)
        unsaved = [block_id for block_id in block_ids if block_id in self._unsaved]
        self.save(unsaved[:most])
        self.drop(unsaved[most:])

    def drop(self, block_ids: Iterable[int]) -> None:
        """These blocks are about to be written, and what they hold is not saved."""
        for block_id in block_ids:
            self.counters.num_dropped_blocks += self._unsaved.pop(block_id, None) is not None

    def load(self, hashes: Sequence[bytes], block_ids: Sequence[int], progress: Progress) -> Load:
        """Begin to load blocks. Nobody else writes into `block_ids` until the load was closed."""
        load = Load(hashes, block_ids, self, progress)
        self.tiers.load(hashes, load)
        return load

    def land(self, block_id: int, block: StoredBlock) -> bool:
        """Write what a store gave into a block of the pool. False: it is not what was put."""
        self._save(block_id)
        if block.content.nbytes != self.block_bytes or block.content.dtype.itemsize != 1:
            return False
        written = self._pool.write(block_id, block.content)
        return checksum_of(block.block_hash, written) == block.checksum

    def save_last(
        self, reused: Sequence[tuple[int, bytes]], others: Sequence[tuple[int, bytes]], time_left_s: TimeLeft
    ) -> None:
        """Before a planned end: have a tier that outlives this process keep these blocks and hashes, those first that
        were used again, while there is time. All loads were closed before. Waits."""
        self.tiers.save(LastBlocks(self._last_blocks(reused), self._last_blocks(others)), time_left_s)

    def close(self) -> None:
        """End the tiers. All loads were closed before."""
        self._unsaved.clear()
        self.tiers.close()

    def _save(self, block_id: int) -> None:
        # one call, so that it is atomic: a thread of a store comes here too, for blocks of its load
        block_hash = self._unsaved.pop(block_id, None)
        if block_hash is None or self.tiers.holds(block_hash):
            return
        if self.tiers.put(self._read(block_id, block_hash)):
            self.counters.num_stored_blocks += 1
        else:
            self.counters.num_dropped_blocks += 1

    def _read(self, block_id: int, block_hash: bytes) -> StoredBlock:
        content = self._pool.read(block_id)
        return StoredBlock(block_hash, checksum_of(block_hash, content), content)

    def _last_blocks(self, blocks: Sequence[tuple[int, bytes]]) -> list[LastBlock]:
        return [LastBlock(block_hash, partial(self._read, block_id, block_hash)) for block_id, block_hash in blocks]
