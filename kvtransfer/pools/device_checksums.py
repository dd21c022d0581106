"""dot64 on a device: totals of many blocks in a few operations, one small copy to the host for all of them.

Owns the weights on the device and the temporaries: `_SLAB_WORDS` words of blocks, gathered, and as many products.
Blocks are gathered with `index_select`, so that scattered ones cost no more launches than neighbours.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from baton.device.base import DeviceFailed
from baton.device.events import Event
from baton.device.stream import COPY_TIMEOUT_S, Stream
from baton.kvtransfer.pools.base import Parts, Pending
from baton.kvtransfer.pools.dot64 import WORD_BYTES, Weights, require_words, value, weights

_SLAB_WORDS = 2**21


class DeviceDot64:
    """dot64 of the blocks of `pool` [num_blocks, block_bytes] uint8. See `Checksums`. `own`: the weights of their words
    where they are parts of other blocks: it gives totals then, and no checksums.

    Takes twice the bytes of one block on the device for its weights.
    """

    max_blocks = 256

    def __init__(self, pool: Tensor, stream: Stream, own: Weights | None = None) -> None:
        self.block_bytes = pool.shape[1]
        self.gives_totals = own is not None
        self.stream = stream
        self._pool = pool
        # most pools can be seen as words; one with odd blocks is gathered byte by byte
        self._words = pool.view(torch.int32) if self.block_bytes % WORD_BYTES == 0 else None
        chosen = weights(-(-self.block_bytes // WORD_BYTES)) if own is None else own
        self._weights = torch.from_numpy(chosen).to(pool.device)
        self._held: deque[tuple[Event, Tensor]] = deque()
        # CUDA loads kernels at their first launch, which can take long, and must not be while a graph is recorded.
        # Those for one block and for many differ, and what the largest request needs stays with the allocator
        for count in (1, self.max_blocks):
            self.begin([0] * count)

    def begin(self, block_ids: Sequence[int]) -> Pending:
        """Issue the sums of whole blocks on the device."""
        totals = _Totals(self, block_ids)
        totals.add(0, self.block_bytes)
        return totals.finish()

    def begin_parts(self, block_ids: Sequence[int]) -> Parts:
        """Sums of blocks whose bytes are added as they are computed."""
        return _Totals(self, block_ids)

    def hold(self, host: Tensor) -> Event:
        """Keep host memory until the device is done with it, whatever becomes of who asked; the event behind that."""
        while self._held and self._held[0][0].is_passed():
            self._held.popleft()
        event = self.stream.record_event()
        self._held.append((event, host))
        return event

    def to_device(self, host: Tensor) -> Tensor:
        """A copy there, in the order of the stream."""
        return host.to(self._pool.device, non_blocking=True)

    def add(self, totals: Tensor, ids: Tensor, begin_byte: int, end_byte: int) -> None:
        """Add the words of a part of each block of `ids` [n] to `totals` [n]. To be called by the stream."""
        begin, end = begin_byte // WORD_BYTES, -(-end_byte // WORD_BYTES)
        num_columns = max(1, min(end - begin, _SLAB_WORDS))
        num_rows = max(1, _SLAB_WORDS // num_columns)
        for first in range(0, len(ids), num_rows):
            rows = ids[first : first + num_rows]
            for column in range(begin, end, num_columns):
                last = min(end, column + num_columns)
                # the product of 32 and 64 bit integers is one of 64 bits, and wraps around as the sum does
                products = self._gathered(rows, column, last) * self._weights[column:last]
                totals[first : first + num_rows].add_(products.sum(dim=1))

    def _gathered(self, rows: Tensor, begin: int, end: int) -> Tensor:
        """[len(rows), end - begin] words of these blocks."""
        if self._words is not None:
            return self._words[:, begin:end].index_select(0, rows)
        columns = self._pool[:, begin * WORD_BYTES : end * WORD_BYTES].index_select(0, rows)
        padded = torch.nn.functional.pad(columns, (0, (end - begin) * WORD_BYTES - columns.shape[1]))
        return padded.view(torch.int32)


class _Totals:
    """Totals of some blocks, being summed up on the device. See `Parts`."""

    def __init__(self, computer: DeviceDot64, block_ids: Sequence[int]) -> None:
        self._computer = computer
        self._host = _host_words(computer.stream, len(block_ids))
        self._host.numpy()[:] = block_ids
        self._ids: Tensor | None = None
        self._totals: Tensor | None = None
        computer.stream.run(self._begin)
        computer.hold(self._host)

    def add(self, begin_byte: int, end_byte: int) -> None:
        """Issue the sums of these bytes of every block. Both ends have to be multiples of a word."""
        require_words(begin_byte, end_byte, self._computer.block_bytes)
        self._computer.stream.run(lambda: self._add(begin_byte, end_byte))

    def finish(self) -> Pending:
        """Issue the copy of all sums to the host."""
        self._computer.stream.run(self._fetch)
        event = self._computer.hold(self._host)
        num_bytes = None if self._computer.gives_totals else self._computer.block_bytes
        return _DevicePending(self._host.numpy(), event, num_bytes)

    def _begin(self) -> None:
        self._ids = self._computer.to_device(self._host)
        self._totals = torch.zeros_like(self._ids)

    def _add(self, begin_byte: int, end_byte: int) -> None:
        if self._ids is not None and self._totals is not None:
            self._computer.add(self._totals, self._ids, begin_byte, end_byte)

    def _fetch(self) -> None:
        # into the memory that the ids came from: they have long been read by then
        if self._totals is not None:
            self._host.copy_(self._totals, non_blocking=True)


class _DevicePending:
    """Sums that are on their way to the host. `block_bytes`: None where totals are wanted as they are."""

    def __init__(self, totals: npt.NDArray[np.int64], event: Event, block_bytes: int | None) -> None:
        self._totals = totals
        self._event = event
        self._block_bytes = block_bytes
        self._deadline_s = time.monotonic() + COPY_TIMEOUT_S

    def take(self) -> Sequence[int] | None:
        """A checksum or a total for each block, or None while they are computed. Raises `DeviceFailed` when the device
        has failed, or takes more than `COPY_TIMEOUT_S` seconds."""
        if self._event.is_passed():
            totals = self._totals.tolist()
            return totals if self._block_bytes is None else [value(total, self._block_bytes) for total in totals]
        if time.monotonic() > self._deadline_s:
            raise DeviceFailed(f"the device of the KV pool did not compute checksums in {COPY_TIMEOUT_S:g} s")
        return None


def _host_words(stream: Stream, count: int) -> Tensor:
    """[count] int64 in host memory that the device reaches."""
    return torch.from_numpy(stream.host_memory(count * 8).view(np.int64))
