"""The host tier: a `KvStore` in a bounded piece of host memory, in which blocks that were used again outlive others.

Owns which block lies in which slot of the memory it was given, and a thread that copies blocks out of it. Blocks are
copied in by whoever puts them.

The block that was not used for longest gives way, of those that were never asked for as long as there are any. Blocks
that were asked for have `_REUSED_SHARE` of the slots for themselves, however many others come; beyond that, the one of
them that was not used for longest counts as any other. `python -m tests.engine.cache.policies` compares this with
other policies, and with the best that one could do.

Invariant: a slot is free, or it holds the block of one hash. While the thread reads a slot it is not given to another
block.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

from baton.engine.cache.block_changes import BlockChanges
from baton.engine.cache.last_blocks import LastBlock, LastBlocks
from baton.engine.cache.store import BlockBytes, Landing, StoredBlock, TierCounters

_REUSED_SHARE = 0.5
_MAX_WAITING = 256
"""Loads that wait for the thread; more end at once."""
_CLOSE_S = 5.0
_log = logging.getLogger(__name__)


class _Slot(NamedTuple):
    number: int
    checksum: int


class _Order(NamedTuple):
    hashes: Sequence[bytes]
    landing: Landing


class HostTier:
    """A KV store in host memory. `memory`: [slots, block_bytes], whose pages are there already. `on_evicted`: is given
    each block that gives way, and has read it when it returns, if it wants it. What it does not want is lost, and
    counted in `counters`: keeping it would cost another block its slot."""

    def __init__(
        self,
        memory: BlockBytes,
        on_evicted: Callable[[StoredBlock], bool] | None = None,
        counters: TierCounters | None = None,
    ) -> None:
        self._memory = memory
        self._on_evicted = on_evicted
        self._counters = counters or TierCounters()
        self._free = list(range(len(memory)))
        self._slots: dict[bytes, _Slot] = {}
        self._once: OrderedDict[bytes, None] = OrderedDict()
        self._reused: OrderedDict[bytes, None] = OrderedDict()
        self._max_reused = int(_REUSED_SHARE * len(memory))
        self._reading: bytes | None = None
        self._changes: BlockChanges | None = None
        self._lock = threading.Lock()
        self._orders: queue.Queue[_Order | None] = queue.Queue(_MAX_WAITING)
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, name="host-tier", daemon=True)
        self._thread.start()

    @property
    def usage(self) -> float:
        """How much of its room is taken, 0 to 1."""
        return len(self._slots) / len(self._memory)

    def follow(self, changes: BlockChanges) -> None:
        """Tell `changes` which blocks are there, and which come and leave."""
        with self._lock:
            changes.came(self._slots)
            self._changes = changes

    def lookup(self, hashes: Sequence[bytes]) -> int:
        """How many of these blocks it has, from the first on."""
        with self._lock:
            num_found = next((place for place, each in enumerate(hashes) if each not in self._slots), len(hashes))
            # the last first: of a prompt whose end is gone the beginning is of use, but not the other way round
            for block_hash in reversed(hashes[:num_found]):
                self._used(block_hash)
        return num_found

    def holds(self, block_hash: bytes) -> bool:
        """Whether it has a block."""
        return self.lookup((block_hash,)) > 0

    def put(self, block: StoredBlock) -> None:
        """Copy a block in, in place of another one where all slots are taken."""
        with self._lock:
            if block.block_hash in self._slots or (number := self._slot_to_fill()) is None:
                return
            self._memory[number] = block.content
            self._slots[block.block_hash] = _Slot(number, block.checksum)
            self._once[block.block_hash] = None
            if self._changes is not None:
                self._changes.came((block.block_hash,))

    def load(self, hashes: Sequence[bytes], landing: Landing) -> None:
        """Have the thread hand over these blocks, one after another."""
        try:
            self._orders.put_nowait(_Order(hashes, landing))
        except queue.Full:
            landing.ended()

    def forget(self, block_hash: bytes) -> None:
        """Drop a block."""
        with self._lock:
            if block_hash in self._slots:
                self._free.append(self._drop(block_hash).number)

    def last_blocks(self) -> LastBlocks:
        """All blocks, those that would give way last first."""
        with self._lock:
            reused, once = [*reversed(self._reused)], [*reversed(self._once)]
        return LastBlocks(*([LastBlock(each, partial(self._read, each)) for each in part] for part in (reused, once)))

    def _read(self, block_hash: bytes) -> StoredBlock:
        slot = self._slots[block_hash]
        return StoredBlock(block_hash, slot.checksum, self._memory[slot.number])

    def close(self) -> None:
        """End the thread and drop everything. Waits for the thread, which is in the middle of one block at most."""
        self._is_closed = True
        while not self._orders.empty():
            self._end_next()
        self._orders.put(None, timeout=_CLOSE_S)
        self._thread.join(_CLOSE_S)

    def _end_next(self) -> None:
        try:
            order = self._orders.get_nowait()
        except queue.Empty:
            return
        if order is not None:
            order.landing.ended()

    def _used(self, block_hash: bytes) -> None:
        """This block was asked for: of all, it gives way last."""
        self._once.pop(block_hash, None)
        self._reused[block_hash] = None
        self._reused.move_to_end(block_hash)
        if len(self._reused) > self._max_reused:
            oldest, _ = self._reused.popitem(last=False)
            self._once[oldest] = None

    def _slot_to_fill(self) -> int | None:
        """A free slot, or that of the block that gives way."""
        if self._free:
            return self._free.pop()
        oldest = next((each for each in chain(self._once, self._reused) if each != self._reading), None)
        if oldest is None:
            return None
        slot = self._drop(oldest)
        evicted = StoredBlock(oldest, slot.checksum, self._memory[slot.number])
        if self._on_evicted is not None and not self._on_evicted(evicted):
            self._counters.num_dropped_blocks += 1
        return slot.number

    def _drop(self, block_hash: bytes) -> _Slot:
        self._once.pop(block_hash, None)
        self._reused.pop(block_hash, None)
        if self._changes is not None:
            self._changes.left((block_hash,))
        return self._slots.pop(block_hash)

    def _serve(self) -> None:
        while (order := self._orders.get()) is not None:
            try:
                self._deliver(*order)
            except Exception:  # whatever became of the landing, others wait for this thread
                _log.exception("a load from the host tier failed")
            finally:
                order.landing.ended()

    def _deliver(self, hashes: Sequence[bytes], landing: Landing) -> None:
        for block_hash in hashes:
            block = None if self._is_closed else self._begin_reading(block_hash)
            if block is None or not landing.arrived(block):
                break
        self._reading = None

    def _begin_reading(self, block_hash: bytes) -> StoredBlock | None:
        with self._lock:
            slot = self._slots.get(block_hash)
            self._reading = block_hash
        return None if slot is None else self._read(block_hash)
