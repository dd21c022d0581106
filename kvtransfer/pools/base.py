"""A pool of KV blocks as the transfer layer sees it, wherever its memory is.

Owns nothing but the contract; `host` and `device` keep it. A pool knows blocks and bytes; no handoffs, no sockets. It
allocates and frees nothing: which blocks may be read or written is for its callers.

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

from baton.device.pinning import Pin
from baton.kvtransfer.pools.dot64 import Weights
from baton.kvtransfer.transports.base import Blocks


class Pending(Protocol):
    """Checksums that are being computed."""

    def take(self) -> Sequence[int] | None:
        """One number for each block, in the order in which they were asked for; None as long as they are computed."""
        ...


class Sums(Protocol):
    """Computes one number of each block, as the blocks are when it is asked."""

    def begin(self, block_ids: Sequence[int]) -> Pending:
        """Begin to compute the sums of whole blocks."""
        ...


class Parts(Protocol):
    """Checksums of blocks whose bytes become available part by part."""

    def add(self, begin_byte: int, end_byte: int) -> None:
        """Add bytes `begin_byte` .. `end_byte - 1` of every block, which are there now. In ascending order, each byte
        once."""
        ...

    def finish(self) -> Pending:
        """End: all bytes were added. Returns the checksums, which may still be computed."""
        ...


class Checksums(Sums, Protocol):
    """Computes checksums of a pool's blocks. `max_blocks`: how many to ask for at once; fewer cost more each."""

    max_blocks: int

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
        """Whether the frames are the pool itself, and no copy."""
        ...

    def give_back(self) -> None:
        """Give the bytes back: nobody reads them any more."""
        ...


class Outlet(Protocol):
    """Lends one connection the bytes of blocks, a bounded amount at a time."""

    def has_room(self, num_blocks: int) -> bool:
        """Whether so many blocks can be lent now."""
        ...

    def lend(self, block_ids: Sequence[int]) -> Lent:
        """The bytes of these blocks, in this order: frames of whole blocks. There must be room."""
        ...


class HashedPool(Protocol):
    """The pool as the sides of a handoff need it, wherever its bytes are: blocks of `block_bytes`."""

    block_bytes: int

    def enter(self) -> None:
        """Make the calling thread the one that uses this pool. Once, before anything else."""
        ...

    def checksums(self, kind: str) -> Checksums:
        """The checksums of this kind (see `integrity`). Raises `ValueError` for one that cannot be computed here."""
        ...


class BlockSource(Protocol):
    """Blocks of `block_bytes` that a sender reads."""

    block_bytes: int

    def outlet(self, max_frame_blocks: int) -> Outlet:
        """An outlet that lends blocks in host memory, in frames of at most `max_frame_blocks` blocks."""
        ...

    def read(self, block_ids: Sequence[int], into: Blocks) -> None:
        """Copy blocks into `into`, [n, block_bytes] of host memory. The bytes are there when it returns."""
        ...

    def pin(self, region: Blocks) -> Pin:
        """Prepare `region`, [num_bytes] of host memory, for many copies from this pool."""
        ...


class BlockSink(Protocol):
    """Blocks of `block_bytes` that a receiver writes."""

    block_bytes: int

    def write(self, block_ids: Sequence[int], payload: Blocks, *, is_direct: bool = False) -> None:
        """Begin to copy `payload` [n, block_bytes] into blocks. With `is_direct` it must not change before `settle`."""
        ...

    def settle(self) -> None:
        """Wait until all that was written is in place."""
        ...


class KvPool(Protocol):
    """Blocks [num_blocks, block_bytes]. `memory` is what the pool is made of, for transports that reach into it by
    themselves: a numpy array, or a torch tensor where it `is_device`."""

    num_blocks: int
    block_bytes: int
    is_device: bool
    memory: Any

    def enter(self) -> None:
        """Make the calling thread the one that uses this pool: to be called once, before anything else on it."""
        ...

    def checksums(self, kind: str) -> Checksums:
        """The checksums of this kind (see `integrity`). Raises `ValueError` for one that cannot be computed here."""
        ...

    def totals(self, weights: Weights) -> Sums:
        """Sums of the words of blocks, each times its weight: see `dot64`."""
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
        """The checksums, at once."""
        return self.values


class NoChecksums:
    """Zeros in the place of checksums: both sides have agreed not to look. See `Checksums`."""

    max_blocks = 2**20

    def begin(self, block_ids: Sequence[int]) -> Pending:
        """A zero for each block."""
        return Known([0] * len(block_ids))

    def begin_parts(self, block_ids: Sequence[int]) -> Parts:
        """A zero for each block, whatever parts are added."""
        return _NoParts(len(block_ids))


@dataclass(frozen=True, slots=True)
class _NoParts:
    num_blocks: int

    def add(self, begin_byte: int, end_byte: int) -> None:
        """Do nothing: no byte is looked at."""

    def finish(self) -> Pending:
        """A zero for each block."""
        return Known([0] * self.num_blocks)


class CopiedOut:
    """Frames of a copy of blocks, which nobody waits for."""

    is_pool = False

    def __init__(self, frames: Sequence[Blocks]) -> None:
        self.frames = frames

    def give_back(self) -> None:
        """Do nothing: the copy goes with its last reference."""


class Gathers(Protocol):
    """A part of each block of a pool."""

    def gathered(self, block_ids: Sequence[int]) -> Blocks:
        """A copy of the part of these blocks, [n, block_bytes]."""
        ...


class CopyingOutlet:
    """Lends copies of a part of each block, in frames of at most `max_frame_blocks` blocks."""

    def __init__(self, part: Gathers, max_frame_blocks: int) -> None:
        self._part, self._size = part, max_frame_blocks

    def has_room(self, num_blocks: int) -> bool:
        """True: the sender bounds the bytes that are not read yet."""
        return True

    def lend(self, block_ids: Sequence[int]) -> Lent:
        """Copy the part of these blocks, and lend the copy: frames [n, part bytes]."""
        copy = self._part.gathered(block_ids)
        return CopiedOut([copy[first : first + self._size] for first in range(0, len(copy), self._size)])
