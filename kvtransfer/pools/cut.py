"""A part of each block of a pool, as if it were a block of its own, and checksums of such parts.

Owns how the bytes of a part are gathered and scattered in host memory (`device_cut` does it on a device), and the sums
of which the checksum of a whole block is made. Which bytes they are is `baton.kvtransfer.parts`.

dot64 is a sum over the words of a block, so each rank adds up its own words with the weights that they have in the
whole block, and the driver adds up those sums: the result is the checksum of the whole block, whoever computes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from baton.device.pinning import HostPin, Pin
from baton.kvtransfer.parts import ByteRun, strands
from baton.kvtransfer.pools import dot64
from baton.kvtransfer.pools.base import CopyingOutlet, KvPool, Pending
from baton.kvtransfer.pools.host import HostPool
from baton.kvtransfer.transports.base import Blocks
from baton.wire.kv_shard import KvDivision, KvShard
from baton.wire.layout import KvLayout

if TYPE_CHECKING:
    from baton.kvtransfer.pools.device_cut import DeviceCutPool

_MASK = 2**64 - 1


class CutPool:
    """The bytes `runs` (offset, number) of each block of `pool`. See `BlockSource` and `BlockSink`."""

    def __init__(self, pool: HostPool, runs: Sequence[tuple[int, int]]) -> None:
        self.block_bytes = sum(num_bytes for _, num_bytes in runs)
        self._memory = pool.memory
        self._runs: list[tuple[slice, slice]] = []
        begin = 0
        for offset, num_bytes in runs:
            self._runs.append((slice(offset, offset + num_bytes), slice(begin, begin + num_bytes)))
            begin += num_bytes

    def outlet(self, max_frame_blocks: int) -> CopyingOutlet:
        """An outlet that lends copies of the part."""
        return CopyingOutlet(self, max_frame_blocks)

    def gathered(self, block_ids: Sequence[int]) -> Blocks:
        """A copy of the part of these blocks, [n, block_bytes]."""
        copy = np.empty((len(block_ids), self.block_bytes), dtype=np.uint8)
        self.read(block_ids, copy)
        return copy

    def read(self, block_ids: Sequence[int], into: Blocks) -> None:
        """Gather the part of each block into `into` [n, block_bytes]."""
        rows = list(block_ids)
        for in_pool, in_part in self._runs:
            into[:, in_part] = self._memory[rows, in_pool]

    def pin(self, region: Blocks) -> Pin:
        """A pin that registers nothing: this is host memory."""
        return HostPin()

    def write(self, block_ids: Sequence[int], payload: Blocks, *, is_direct: bool = False) -> None:
        """Scatter `payload` [n, block_bytes] to the part of each block, at once."""
        rows = list(block_ids)
        for in_pool, in_part in self._runs:
            self._memory[rows, in_pool] = payload[:, in_part]

    def settle(self) -> None:
        """Everything is in place when `write` returns."""


Part: TypeAlias = "KvPool | CutPool | DeviceCutPool"
"""What a rank reads for, or writes from, another one."""


def source_of(pool: KvPool, runs: Sequence[ByteRun]) -> Part:
    """The blocks that a rank sends another from: the pool itself, where that is all of it."""
    return _cut(pool, [(run.source, run.num_bytes) for run in runs])


def sink_of(pool: KvPool, runs: Sequence[ByteRun]) -> Part:
    """The blocks that a rank writes what comes from another to: the pool itself, where that is all of it."""
    return _cut(pool, [(run.target, run.num_bytes) for run in runs])


def _cut(pool: KvPool, runs: Sequence[tuple[int, int]]) -> Part:
    if list(runs) == [(0, pool.block_bytes)]:
        return pool
    if isinstance(pool, HostPool):
        return CutPool(pool, runs)
    from baton.kvtransfer.pools.device import DevicePool
    from baton.kvtransfer.pools.device_cut import DeviceCutPool

    assert isinstance(pool, DevicePool)
    return DeviceCutPool(pool, runs)


class StrandTotals:
    """Adds up a rank's words of a block of `layout`: one total for each of its `strands`. Raises `ValueError` for a
    layout whose heads are no whole words."""

    def __init__(self, pool: KvPool, layout: KvLayout, shard: KvShard) -> None:
        self._sums = [
            pool.totals(_weights(pool.block_bytes, layout.block_bytes, runs))
            for runs in strands(layout, shard).values()
        ]

    def begin(self, block_ids: Sequence[int]) -> Pending:
        """Begin the totals: of one block after another, those of its strands."""
        return _StrandsPending([sums.begin(block_ids) for sums in self._sums])


class _StrandsPending:
    """Totals of several strands, which are asked for one after another."""

    def __init__(self, strands: Sequence[Pending]) -> None:
        self._missing, self._found = list(strands), list[Sequence[int]]()

    def take(self) -> Sequence[int] | None:
        """For each block the totals of all strands, or None while one of them is still computed."""
        while self._missing:
            totals = self._missing[0].take()
            if totals is None:
                return None
            self._found.append(totals)
            del self._missing[0]
        return [total for of_block in zip(*self._found, strict=True) for total in of_block]


def _weights(own_bytes: int, whole_bytes: int, runs: Sequence[ByteRun]) -> dot64.Weights:
    """The weights of a rank's words: those that they have in the whole block, and 0 for what is of no run."""
    whole = dot64.weights(-(-whole_bytes // dot64.WORD_BYTES))
    own = np.zeros(-(-own_bytes // dot64.WORD_BYTES), dtype=np.int64)
    for run in runs:
        if (run.source | run.target | run.num_bytes) % dot64.WORD_BYTES:
            raise ValueError("dot64 sums whole words, and this model's heads are none")
        source, target, count = (number // dot64.WORD_BYTES for number in (run.source, run.target, run.num_bytes))
        own[source : source + count] = whole[target : target + count]
    return own


class WholeChecksums:
    """Makes the checksums of whole blocks of what the ranks of `division` have added up.

    Where several ranks have the same head, each set of ranks that has every head once gives a value. One that differs
    makes a value that no such set has, so that the block counts as damaged.
    """

    def __init__(self, layout: KvLayout, division: KvDivision) -> None:
        self._num_bytes = layout.block_bytes
        self._copies = {shard: tuple(strands(layout, shard)) for shard in division.shards}
        self._num_sets = max(max(copies) for copies in self._copies.values())

    def values(self, num_blocks: int, totals: Mapping[KvShard, Sequence[int]]) -> list[int]:
        """The checksums of `num_blocks` blocks, made of the `StrandTotals` of each rank."""
        return [self._value(block, totals) for block in range(num_blocks)]

    def _value(self, block: int, totals: Mapping[KvShard, Sequence[int]]) -> int:
        sums = [0] * self._num_sets
        for shard, copies in self._copies.items():
            for strand, num_copies in enumerate(copies):
                total = totals[shard][block * len(copies) + strand]
                for number in range(shard.rank % num_copies, self._num_sets, num_copies):
                    sums[number] += total
        found = dot64.value(sums[0], self._num_bytes)
        return found if len({each & _MASK for each in sums}) == 1 else found ^ 1
