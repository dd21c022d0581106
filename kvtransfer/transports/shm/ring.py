"""Rings: slots in shared memory through which a prefill node hands copies of blocks to a decode node of its host.

Owns the segment of a sender and the mapping of a receiver. A ring is written by its sender only. Its name comes from a
peer: it must look like one of ours, and whatever it leads to must be a plain file of this user with exactly the right
size, else it is refused. A ring whose lock is free belongs to a sender that has ended (see `segment`).

Both sides register the memory with their device, where they have one: copies go directly between slots and blocks.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
from dataclasses import dataclass

import numpy as np

from device.pinning import Pin
from kvtransfer.pools.base import KvPool
from kvtransfer.transports.base import Blocks
from kvtransfer.transports.shm.segment import FOLDER, SEGMENT_NAME, Segment
from wire.errors import TransferFailed


@dataclass(frozen=True, slots=True)
class RingShape:
    """`num_slots` slots for `slot_blocks` blocks of `block_bytes` each."""

    num_slots: int
    slot_blocks: int
    block_bytes: int

    @property
    def num_bytes(self) -> int:
        """Of all slots."""
        return self.num_slots * self.slot_blocks * self.block_bytes

    def slots(self, region: Blocks) -> Blocks:
        """A region [num_bytes] as [num_slots, slot_blocks, block_bytes]."""
        return region.reshape(self.num_slots, self.slot_blocks, self.block_bytes)


class OwnRing:
    """A sender's ring: a new segment. Raises `TransferFailed` when there is no room for it."""

    def __init__(self, shape: RingShape, pool: KvPool) -> None:
        try:
            segment = Segment(shape.num_bytes)
        except OSError as error:
            raise TransferFailed(f"no shared memory for a ring of {shape.num_bytes} bytes: {error.strerror}") from None
        self.name = segment.name
        self.slots = shape.slots(segment.array)
        self._segment: Segment | None = segment
        self._pin: Pin = pool.pin(segment.array)

    def close(self) -> None:
        """Unmap it and remove its name. The memory goes when the last receiver has unmapped it, too."""
        if self._segment is not None:
            self._pin.close()
            self._segment.close()
            # the mapping ends with the last reference to it
            self._segment, self.slots = None, _nothing()


class PeerRing:
    """A ring of a sender, mapped. Raises `TransferFailed` when what `name` leads to cannot be one of this shape."""

    def __init__(self, name: str, shape: RingShape, pool: KvPool) -> None:
        if not SEGMENT_NAME.fullmatch(name):
            raise TransferFailed("the peer named something that is not a segment")
        self.name, self.shape = name, shape
        try:
            self._descriptor = os.open(FOLDER / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise TransferFailed(f"the peer's ring cannot be opened: {error.strerror}") from None
        try:
            _require_plain_file(self._descriptor, shape.num_bytes)
            mapped = mmap.mmap(self._descriptor, shape.num_bytes)
        except (OSError, ValueError, OverflowError) as error:
            os.close(self._descriptor)
            raise TransferFailed(f"the peer's ring cannot be mapped: {error}") from None
        except TransferFailed:
            os.close(self._descriptor)
            raise
        region: Blocks = np.frombuffer(mapped, dtype=np.uint8)
        self._pin: Pin = pool.pin(region)
        self.slots = shape.slots(region)

    @property
    def is_direct(self) -> bool:
        """Whether the pool's device may copy from the slots as they are."""
        return self._pin.is_direct

    def has_ended(self) -> bool:
        """Whether its sender has closed it, or is dead. Its name is removed in that case."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        (FOLDER / self.name).unlink(missing_ok=True)
        return True

    def close(self) -> None:
        """Unmap it. The mapping ends with the last reference to it: whoever closes may still hold a slot."""
        self._pin.close()
        self.slots = _nothing()
        os.close(self._descriptor)


def _require_plain_file(descriptor: int, num_bytes: int) -> None:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise TransferFailed("the peer's ring is not a segment of this user")
    if found.st_size != num_bytes:
        raise TransferFailed(f"the peer's ring has {found.st_size} bytes, not {num_bytes}")


def _nothing() -> Blocks:
    return np.empty((0, 0, 0), dtype=np.uint8)
