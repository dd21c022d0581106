"""A part of each block of a pool in device memory, as if it were a block of its own.

Owns how its bytes are gathered and scattered: by the number of each word of the part in a block, in one operation for
many blocks, and through pinned memory of the host in one copy. Which bytes they are is `baton.kvtransfer.parts`.

Bounds: what is asked for at once, twice on the device; `_NUM_SLOTS` slots of the host, of as many blocks as a caller
writes at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import gcd

import numpy as np
import torch
from torch import Tensor

from baton.device.events import Event
from baton.device.pinning import HostPin, Pin
from baton.device.stream import COPY_TIMEOUT_S
from baton.kvtransfer.pools.base import CopyingOutlet
from baton.kvtransfer.pools.device import DevicePool
from baton.kvtransfer.transports.base import Blocks

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_NUM_SLOTS = 4


class DeviceCutPool:
    """The bytes `runs` (offset, number) of each block of `pool`. See `BlockSource` and `BlockSink`. Used by the thread
    that uses the pool."""

    def __init__(self, pool: DevicePool, runs: Sequence[tuple[int, int]]) -> None:
        self.block_bytes = sum(num_bytes for _, num_bytes in runs)
        self._pool, self._stream = pool, pool.stream
        size = gcd(pool.block_bytes, *(number for run in runs for number in run), 8)
        self._words = pool.memory.view(_WORDS[size])
        numbers = np.concatenate([np.arange(begin // size, (begin + count) // size) for begin, count in runs])
        self._columns = torch.from_numpy(numbers).to(pool.memory.device)
        self._in_flight: deque[tuple[Event, Blocks]] = deque()

    def outlet(self, max_frame_blocks: int) -> CopyingOutlet:
        """An outlet that lends copies of the part."""
        return CopyingOutlet(self, max_frame_blocks)

    def gathered(self, block_ids: Sequence[int]) -> Blocks:
        """A copy of the part of these blocks, [n, block_bytes], in host memory."""
        copy = self._host(len(block_ids))
        self._stream.run(lambda: self._gather(block_ids, torch.from_numpy(copy)))
        self._stream.synchronize()
        return copy

    def read(self, block_ids: Sequence[int], into: Blocks) -> None:
        """Gather the part of each block on the device, and copy it into `into` [n, block_bytes] of host memory."""
        np.copyto(into, self.gathered(block_ids))

    def pin(self, region: Blocks) -> Pin:
        """A pin without effect: bytes pass through memory of this pool's own."""
        return HostPin(is_direct=False)

    def write(self, block_ids: Sequence[int], payload: Blocks, *, is_direct: bool = False) -> None:
        """Begin to scatter `payload` [n, block_bytes] to the part of each block. Waits for the oldest of `_NUM_SLOTS`
        writes."""
        if len(self._in_flight) == _NUM_SLOTS:
            self._in_flight.popleft()[0].wait(COPY_TIMEOUT_S)
        copy = self._host(len(block_ids))
        np.copyto(copy, payload)
        self._stream.run(lambda: self._scatter(block_ids, torch.from_numpy(copy)))
        self._in_flight.append((self._stream.record_event(), copy))

    def settle(self) -> None:
        """Wait until the stream is idle. Raises `DeviceFailed`."""
        self._stream.synchronize()
        self._in_flight.clear()

    def _host(self, num_blocks: int) -> Blocks:
        return self._stream.host_memory(num_blocks * self.block_bytes).reshape(num_blocks, self.block_bytes)

    def _gather(self, block_ids: Sequence[int], into: Tensor) -> None:
        rows = self._words.index_select(0, self._rows(block_ids))
        into.copy_(rows.index_select(1, self._columns).view(torch.uint8), non_blocking=True)

    def _scatter(self, block_ids: Sequence[int], payload: Tensor) -> None:
        words = payload.to(self._words.device, non_blocking=True).view(self._words.dtype)
        self._words.index_put_((self._rows(block_ids)[:, None], self._columns), words)

    def _rows(self, block_ids: Sequence[int]) -> Tensor:
        return torch.tensor(block_ids, dtype=torch.int64, device=self._words.device)
