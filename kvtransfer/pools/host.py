"""Pools in host memory: everything is in place, and every checksum known, when a call returns.

Owns how blocks are copied and lent there, and the checksums that a CPU computes. Knows no device and no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from baton.device.pinning import HostPin, Pin
from baton.kvtransfer.integrity import DOT64, NONE, XXH3, block_checksum
from baton.kvtransfer.pools import dot64
from baton.kvtransfer.pools.base import Checksums, Known, Lent, NoChecksums, Outlet, Parts, Pending, Sums
from baton.kvtransfer.runs import coalesce
from baton.kvtransfer.transports.base import Blocks

_SHORT_RUN_BYTES = 2**17
"""Below this one more copy is cheaper than one more frame."""


class _HostXxh3:
    """xxh3 of blocks in host memory, one block at a time, so that the caller can stop between two."""

    max_blocks = 1

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks

    def begin(self, block_ids: Sequence[int]) -> Pending:
        return Known([block_checksum(self._blocks[block_id]) for block_id in block_ids])

    def begin_parts(self, block_ids: Sequence[int]) -> Parts:
        return _Xxh3Parts(self._blocks, block_ids)


class _Xxh3Parts:
    def __init__(self, blocks: Blocks, block_ids: Sequence[int]) -> None:
        self._blocks = blocks
        self._hashes = [(block_id, xxhash.xxh3_64()) for block_id in block_ids]

    def add(self, begin_byte: int, end_byte: int) -> None:
        for block_id, block_hash in self._hashes:
            block_hash.update(self._blocks[block_id, begin_byte:end_byte].data)

    def finish(self) -> Pending:
        return Known([block_hash.intdigest() for _, block_hash in self._hashes])


class _HostDot64:
    """dot64 of blocks in host memory, one block at a time, so that the caller can stop between two."""

    max_blocks = 1

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._dot64 = dot64.Dot64(blocks.shape[1])

    def begin(self, block_ids: Sequence[int]) -> Pending:
        return Known([self._dot64.checksum(self._blocks[block_id]) for block_id in block_ids])

    def begin_parts(self, block_ids: Sequence[int]) -> Parts:
        return _Dot64Parts(self._blocks, self._dot64, block_ids)


@dataclass(frozen=True, slots=True)
class _HostTotals:
    """Weighted sums over the words of blocks in host memory."""

    blocks: Blocks
    sums: dot64.Dot64

    def begin(self, block_ids: Sequence[int]) -> Pending:
        return Known([self.sums.total(self.blocks[block_id]) for block_id in block_ids])


class _Dot64Parts:
    def __init__(self, blocks: Blocks, computer: dot64.Dot64, block_ids: Sequence[int]) -> None:
        self._blocks = blocks
        self._dot64 = computer
        self._block_ids = block_ids
        self._totals = [0] * len(block_ids)

    def add(self, begin_byte: int, end_byte: int) -> None:
        dot64.require_words(begin_byte, end_byte, self._blocks.shape[1])
        for place, block_id in enumerate(self._block_ids):
            self._totals[place] += self._dot64.total(self._blocks[block_id, begin_byte:end_byte], begin_byte)

    def finish(self) -> Pending:
        return Known([dot64.value(total, self._blocks.shape[1]) for total in self._totals])


@dataclass(frozen=True, slots=True)
class _HostLent:
    """Frames in host memory. A gathered copy counts as the pool: it is not worth telling the two apart."""

    frames: Sequence[Blocks]
    is_pool: bool = True

    def give_back(self) -> None:
        """Nothing was taken."""


@dataclass(frozen=True, slots=True)
class _HostOutlet:
    """Lends the pool itself where blocks lie together, and a gathered copy where the runs are short."""

    blocks: Blocks
    max_frame_blocks: int

    def has_room(self, num_blocks: int) -> bool:
        """Always."""
        return True

    def lend(self, block_ids: Sequence[int]) -> Lent:
        """Frames [n, block_bytes] of the pool, or of a copy where runs of neighbouring blocks are short."""
        runs = coalesce(block_ids, range(len(block_ids)), self.max_frame_blocks)
        if len(runs) > 1 and len(block_ids) * self.blocks.shape[1] < len(runs) * _SHORT_RUN_BYTES:
            gathered, size = self.blocks[list(block_ids)], self.max_frame_blocks
            return _HostLent([gathered[first : first + size] for first in range(0, len(gathered), size)])
        return _HostLent([self.blocks[run.source : run.source + run.count] for run in runs])


class HostPool:
    """A pool in host memory, [num_blocks, block_bytes] uint8. See `KvPool`."""

    is_device = False

    def __init__(self, blocks: Blocks) -> None:
        self.num_blocks, self.block_bytes = blocks.shape
        self.memory: Blocks = blocks

    def enter(self) -> None:
        """Do nothing: any thread may use it."""

    def checksums(self, kind: str) -> Checksums:
        """Checksums that this thread computes: `XXH3`, `DOT64` or `NONE`. Raises `ValueError` for others."""
        computers: dict[str, type[_HostXxh3 | _HostDot64]] = {XXH3: _HostXxh3, DOT64: _HostDot64}
        if kind == NONE:
            return NoChecksums()
        if kind not in computers:
            raise ValueError(f"there is no checksum {kind!r} for host memory")
        return computers[kind](self.memory)

    def totals(self, weights: dot64.Weights) -> Sums:
        """Sums, on this thread, of the words of blocks, each times its weight."""
        return _HostTotals(self.memory, dot64.Dot64(self.block_bytes, weights))

    def outlet(self, max_frame_blocks: int) -> Outlet:
        """An outlet that lends the pool itself where it can."""
        return _HostOutlet(self.memory, max_frame_blocks)

    def read(self, block_ids: Sequence[int], into: Blocks) -> None:
        """Copy blocks into `into` [n, block_bytes], run by run."""
        for run in coalesce(block_ids, range(len(block_ids)), len(block_ids)):
            into[run.target : run.target + run.count] = self.memory[run.source : run.source + run.count]

    def write(self, block_ids: Sequence[int], payload: Blocks, *, is_direct: bool = False) -> None:
        """Copy `payload` [n, block_bytes] into blocks, at once."""
        for run in coalesce(range(len(block_ids)), block_ids, len(block_ids)):
            self.memory[run.target : run.target + run.count] = payload[run.source : run.source + run.count]

    def settle(self) -> None:
        """Do nothing: everything is in place when `write` returns."""

    def pin(self, region: Blocks) -> Pin:
        """A pin that registers nothing: this is host memory."""
        return HostPin()
