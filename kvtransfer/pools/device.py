"""Pools in device memory: blocks come to the host and go from there through pinned memory, by direct copies.

Owns the staging memory of one pool and the order of its copies; see `base` for what may be read and written when.

Copies go by runs of neighbouring blocks, not through a gathered buffer: a block is large (0.1 to 2 MiB), the copy
engines move it without the multiprocessors, which a step keeps busy, and nothing but the bytes themselves is read.

Bounds: `_WRITE_SLOTS` slots of `_SLOT_BYTES` (or one block) for what is written, `_OUTLET_SLOTS` frames for each
outlet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from baton.device.choose import open_stream
from baton.device.events import Event
from baton.device.pinning import Pin
from baton.device.stream import COPY_TIMEOUT_S, Stream
from baton.kvtransfer.integrity import DOT64, NONE
from baton.kvtransfer.pools.base import Checksums, Lent, NoChecksums, Outlet, Sums
from baton.kvtransfer.pools.device_checksums import DeviceDot64
from baton.kvtransfer.pools.dot64 import Weights
from baton.kvtransfer.runs import coalesce
from baton.kvtransfer.transports.base import Blocks

_SLOT_BYTES = 2**20
_WRITE_SLOTS = 4
_OUTLET_SLOTS = 16


class DevicePool:
    """A pool in a contiguous tensor [num_blocks, block_bytes] uint8 of any device. See `KvPool`.

    `stream`: where its work is issued; by default one of its own. Raises `ValueError` for another kind of tensor.
    """

    is_device = True

    def __init__(self, memory: Tensor, stream: Stream | None = None) -> None:
        if memory.dtype != torch.uint8 or memory.dim() != 2 or not memory.is_contiguous():
            raise ValueError(f"a pool is a contiguous uint8 tensor [num_blocks, block_bytes], not {memory.shape}")
        self.num_blocks, self.block_bytes = memory.shape
        self.memory = memory
        self.stream = stream if stream is not None else open_stream(memory.device)
        self._slot_blocks = max(1, _SLOT_BYTES // self.block_bytes)
        self._slots = deque(_Slot(memory) for memory in self.staging(_WRITE_SLOTS, self._slot_blocks))

    def enter(self) -> None:
        """Make the device the current one of the calling thread."""
        self.stream.enter()

    def checksums(self, kind: str) -> Checksums:
        """Checksums that the device computes: `DOT64` or `NONE`. Raises `ValueError` for others."""
        if kind == NONE:
            return NoChecksums()
        if kind != DOT64:
            raise ValueError(f"there is no checksum {kind!r} for device memory")
        return DeviceDot64(self.memory, self.stream)

    def totals(self, weights: Weights) -> Sums:
        """Sums, on the device, of the words of blocks, each times its weight."""
        return DeviceDot64(self.memory, self.stream, weights)

    def outlet(self, max_frame_blocks: int) -> Outlet:
        """An outlet with a ring of pinned memory of its own."""
        return _DeviceOutlet(self, max_frame_blocks)

    def read(self, block_ids: Sequence[int], into: Blocks) -> None:
        """Copy blocks into `into` [n, block_bytes] of host memory, run by run, and wait for it."""
        target = torch.from_numpy(into)
        for run in coalesce(block_ids, range(len(block_ids)), len(block_ids)):
            self.stream.copy(
                target[run.target : run.target + run.count], self.memory[run.source : run.source + run.count]
            )
        self.stream.synchronize()

    def write(self, block_ids: Sequence[int], payload: Blocks, *, is_direct: bool = False) -> None:
        """Begin to copy `payload` [n, block_bytes] into blocks: by way of pinned slots, or from where it is with
        `is_direct`. Waits for a slot that is still being copied from."""
        if is_direct:
            self._write_from(torch.from_numpy(payload), block_ids)
            return
        for first in range(0, len(block_ids), self._slot_blocks):
            part = block_ids[first : first + self._slot_blocks]
            slot = self._slots[0]
            self._slots.rotate(-1)
            slot.wait()
            np.copyto(slot.memory[: len(part)], payload[first : first + len(part)])
            self._write_from(torch.from_numpy(slot.memory), part)
            slot.taken = self.stream.record_event()

    def settle(self) -> None:
        """Wait until the stream is idle. Raises `DeviceFailed`."""
        self.stream.synchronize()

    def pin(self, region: Blocks) -> Pin:
        """Register `region` [num_bytes] with the device's driver."""
        return self.stream.pin(region)

    def staging(self, num_slots: int, slot_blocks: int) -> Blocks:
        """Host memory that the device reaches directly, [num_slots, slot_blocks, block_bytes]."""
        memory = self.stream.host_memory(num_slots * slot_blocks * self.block_bytes)
        return memory.reshape(num_slots, slot_blocks, self.block_bytes)

    def _write_from(self, source: Tensor, block_ids: Sequence[int]) -> None:
        for run in coalesce(range(len(block_ids)), block_ids, len(block_ids)):
            self.stream.copy(
                self.memory[run.target : run.target + run.count], source[run.source : run.source + run.count]
            )


@dataclass(slots=True)
class _Slot:
    """Staging memory [n, block_bytes], and when it may be written again."""

    memory: Blocks
    taken: Event | None = None

    def wait(self) -> None:
        if self.taken is not None:
            self.taken.wait(COPY_TIMEOUT_S)
            self.taken = None


@dataclass(slots=True)
class _DeviceLent:
    """Frames of pinned memory that blocks were copied to. Their slots go back to the ring."""

    frames: Sequence[Blocks]
    slots: list[Blocks]
    home: deque[Blocks]
    is_pool: bool = field(default=False, init=False)

    def give_back(self) -> None:
        """Its slots are free again."""
        self.home.extend(self.slots)
        self.slots.clear()


class _DeviceOutlet:
    """Lends blocks that were copied to pinned memory. Each connection has a ring of its own: one that is slow keeps no
    other from sending.

    What is larger than the whole ring gets memory of its own, once nothing else is lent.
    """

    def __init__(self, pool: DevicePool, max_frame_blocks: int) -> None:
        self._pool = pool
        self._max_frame_blocks = max_frame_blocks
        self._free = deque(pool.staging(_OUTLET_SLOTS, max_frame_blocks))

    def has_room(self, num_blocks: int) -> bool:
        """Whether the ring has a free slot for each frame, or is all free for what is larger than the ring."""
        return len(self._free) >= min(_OUTLET_SLOTS, self._num_frames(num_blocks))

    def lend(self, block_ids: Sequence[int]) -> Lent:
        """Copy the blocks to pinned memory, and lend that, in frames [n, block_bytes]."""
        count, num_frames = self._max_frame_blocks, self._num_frames(len(block_ids))
        slots: list[Blocks] = []
        if num_frames <= len(self._free):
            slots = [self._free.popleft() for _ in range(num_frames)]
        parts = [block_ids[first : first + count] for first in range(0, len(block_ids), count)]
        memory = slots or self._pool.staging(num_frames, count)
        frames = [slot[: len(part)] for slot, part in zip(memory, parts, strict=True)]
        lent = _DeviceLent(frames, slots, self._free)
        try:
            for frame, part in zip(frames, parts, strict=True):
                self._pool.read(part, frame)
        except BaseException:
            lent.give_back()
            raise
        return lent

    def _num_frames(self, num_blocks: int) -> int:
        return -(-num_blocks // self._max_frame_blocks)
