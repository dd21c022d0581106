"""A pool of KV blocks as the transfer layer sees it, wherever its memory is; and pools in host memory.

Owns the contract and `HostPool`. A pool knows blocks and bytes; no handoffs, no sockets, no torch (pools in device
memory are in `device_pool`). It allocates and frees nothing: which blocks may be read or written is for its callers.

Everything is called by the transfer thread and returns soon: copies of a few MiB are waited for, checksums, which may
have to wait for a device that is busy with a step, are begun and asked for later.

The order of things, which pools in device memory rely on (they read and write apart from the engine's stream):
- a block is read only after the step that wrote it was collected, or the layer was counted (`LayerProgress`): then the
  bytes are there for every stream. It is not written while its handoff reads it;
- a block is written only while it is granted: no step that was launched still reads or writes it. It is reported as
  arrived after `settle`, and given to the engine after that;
- a checksum that nobody waits for any more may read blocks that belong to somebody else by then: its value is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import xxhash

from kvtransfer import dot64
from kvtransfer.integrity import DOT64, NONE, XXH3, block_checksum
from kvtransfer.layout import coalesce
from kvtransfer.transports.base import Blocks

_SHORT_RUN_BYTES = 2**17
"""Below this one more copy is cheaper than one more frame."""


class Pending(Protocol):
    """Checksums under way."""

    def take(self) -> Sequence[int] | None:
        """One for each block, in the order in which they were asked for; None as long as they are computed."""
        ...


class Parts(Protocol):
    """Checksums of some blocks that are complete only part by part."""

    def add(self, begin_byte: int, end_byte: int) -> None:
        """Bytes `begin_byte` .. `end_byte - 1` of every block are there. In ascending order, each once."""
        ...

    def finish(self) -> Pending:
        """All bytes were added."""
        ...


class Checksums(Protocol):
    """Computes checksums of a pool's blocks, as the blocks are when it is asked. `max_blocks`: how many to ask for at
    once; fewer cost more each.
    """

    max_blocks: int

    def begin(self, block_ids: Sequence[int]) -> Pending:
        """Begin with whole blocks."""
        ...

    def begin_parts(self, block_ids: Sequence[int]) -> Parts:
        """Begin with blocks whose parts are added later."""
        ...


class Lent(Protocol):
    """Bytes of blocks in host memory, lent until `give_back`."""

    @property
    def frames(self) -> Sequence[Blocks]:
        """The bytes, [n, block_bytes] each."""
        ...

    @property
    def is_pool(self) -> bool:
        """Whether they are the pool itself, and no copy."""
        ...

    def give_back(self) -> None:
        """Nobody reads the bytes any more."""
        ...


class Outlet(Protocol):
    """Lends one connection the bytes of blocks, a bounded amount at a time."""

    def has_room(self, num_blocks: int) -> bool:
        """Whether so many blocks can be lent now."""
        ...

    def lend(self, block_ids: Sequence[int]) -> Lent:
        """The bytes of these blocks, in this order: frames of whole blocks. There must be room."""
        ...


class Pin(Protocol):
    """Host memory that a device may copy from and to directly, until `close`."""

    @property
    def is_direct(self) -> bool:
        """Whether it really may."""
        ...

    def close(self) -> None:
        """The memory is about to go."""
        ...


class Pool(Protocol):
    """Blocks [num_blocks, block_bytes]. `memory` is what the pool is made of (a numpy array, or a torch tensor where it
    `is_device`), for transports that reach into it by themselves.
    """

    num_blocks: int
    block_bytes: int
    is_device: bool
    memory: Any

    def enter(self) -> None:
        """Make the calling thread the one that uses this pool: to be called once, before anything else on it."""
        ...

    def checksums(self, kind: str) -> Checksums:
        """What computes this kind (see `integrity`). Raises `ValueError` for one that cannot be computed here."""
        ...

    def outlet(self, max_frame_blocks: int) -> Outlet:
        """An outlet whose frames hold at most so many blocks."""
        ...

    def read(self, block_ids: Sequence[int], into: Blocks) -> None:
        """Copy blocks to the host, [n, block_bytes] of `into`. The bytes are there when it returns."""
        ...

    def write(self, block_ids: Sequence[int], payload: Blocks, *, is_direct: bool = False) -> None:
        """Begin to copy `payload` [n, block_bytes] into blocks. `is_direct`: `payload` lies in memory of a `Pin` that
        is, and does not change before `settle`; else it may change at once.
        """
        ...

    def settle(self) -> None:
        """Wait until all that was written is in place."""
        ...

    def pin(self, region: Blocks) -> Pin:
        """Prepare host memory that stays, [num_bytes], for many copies from and to this pool."""
        ...


@dataclass(frozen=True, slots=True)
class Known:
    """Checksums that are known already. See `Pending`."""

    values: Sequence[int]

    def take(self) -> Sequence[int] | None:
        """See `Pending.take`."""
        return self.values


class NoChecksums:
    """Zeros: both sides have agreed not to look. See `Checksums`."""

    max_blocks = 2**20

    def begin(self, block_ids: Sequence[int]) -> Pending:
        """See `Checksums.begin`."""
        return Known([0] * len(block_ids))

    def begin_parts(self, block_ids: Sequence[int]) -> Parts:
        """See `Checksums.begin_parts`."""
        return _NoParts(len(block_ids))


@dataclass(frozen=True, slots=True)
class _NoParts:
    num_blocks: int

    def add(self, begin_byte: int, end_byte: int) -> None:
        """See `Parts.add`."""

    def finish(self) -> Pending:
        """See `Parts.finish`."""
        return Known([0] * self.num_blocks)


class _HostXxh3:
    """See `Checksums`. One block at a time, so that whoever asks can stop between two."""

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
    """See `Checksums`."""

    max_blocks = 1

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._dot64 = dot64.Dot64(blocks.shape[1])

    def begin(self, block_ids: Sequence[int]) -> Pending:
        return Known([self._dot64.checksum(self._blocks[block_id]) for block_id in block_ids])

    def begin_parts(self, block_ids: Sequence[int]) -> Parts:
        return _Dot64Parts(self._blocks, self._dot64, block_ids)


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
    """See `Lent`. A gathered copy counts as the pool: it is not worth telling the two apart."""

    frames: Sequence[Blocks]
    is_pool: bool = True

    def give_back(self) -> None:
        """Nothing was taken."""


@dataclass(frozen=True, slots=True)
class _HostOutlet:
    """See `Outlet`: the pool itself where blocks lie together, a gathered copy where the runs are short."""

    blocks: Blocks
    max_frame_blocks: int

    def has_room(self, num_blocks: int) -> bool:
        """Always."""
        return True

    def lend(self, block_ids: Sequence[int]) -> Lent:
        """See `Outlet.lend`."""
        runs = coalesce(block_ids, range(len(block_ids)), self.max_frame_blocks)
        if len(runs) > 1 and len(block_ids) * self.blocks.shape[1] < len(runs) * _SHORT_RUN_BYTES:
            gathered, size = self.blocks[list(block_ids)], self.max_frame_blocks
            return _HostLent([gathered[first : first + size] for first in range(0, len(gathered), size)])
        return _HostLent([self.blocks[run.source : run.source + run.count] for run in runs])


@dataclass(frozen=True, slots=True)
class HostPin:
    """See `Pin`: the CPU copies from and to everything."""

    is_direct: bool = True

    def close(self) -> None:
        """Nothing was done."""


class HostPool:
    """A pool in host memory, [num_blocks, block_bytes] uint8. See `Pool`."""

    is_device = False

    def __init__(self, blocks: Blocks) -> None:
        self.num_blocks, self.block_bytes = blocks.shape
        self.memory: Blocks = blocks

    def enter(self) -> None:
        """See `Pool.enter`: any thread may."""

    def checksums(self, kind: str) -> Checksums:
        """See `Pool.checksums`."""
        computers: dict[str, type[_HostXxh3 | _HostDot64]] = {XXH3: _HostXxh3, DOT64: _HostDot64}
        if kind == NONE:
            return NoChecksums()
        if kind not in computers:
            raise ValueError(f"there is no checksum {kind!r} for host memory")
        return computers[kind](self.memory)

    def outlet(self, max_frame_blocks: int) -> Outlet:
        """See `Pool.outlet`."""
        return _HostOutlet(self.memory, max_frame_blocks)

    def read(self, block_ids: Sequence[int], into: Blocks) -> None:
        """See `Pool.read`."""
        for run in coalesce(block_ids, range(len(block_ids)), len(block_ids)):
            into[run.target : run.target + run.count] = self.memory[run.source : run.source + run.count]

    def write(self, block_ids: Sequence[int], payload: Blocks, *, is_direct: bool = False) -> None:
        """See `Pool.write`."""
        for run in coalesce(range(len(block_ids)), block_ids, len(block_ids)):
            self.memory[run.target : run.target + run.count] = payload[run.source : run.source + run.count]

    def settle(self) -> None:
        """Everything is in place when `write` returns."""

    def pin(self, region: Blocks) -> Pin:
        """See `Pool.pin`."""
        return HostPin()
