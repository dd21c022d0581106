"""Rings: slots in shared memory through which a prefill node hands copies of blocks to a decode node of its host.

Owns the segment of a sender and the mapping of a receiver (see `segment`). A ring is written by its sender only. One
whose lock is free belongs to a sender that has ended.

Both sides register the memory with their device, where they have one: copies go directly between slots and blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from baton.device.pinning import Pin
from baton.kvtransfer.pools.base import BlockSource, KvPool
from baton.kvtransfer.transports.base import Blocks
from baton.kvtransfer.transports.shm.segment import Mapping, Segment
from baton.wire.errors import TransferFailed


@dataclass(frozen=True, slots=True)
class RingShape:
    """`num_slots` slots for `slot_blocks` blocks of `block_bytes` each."""

    num_slots: int
    slot_blocks: int
    block_bytes: int

    @property
    def num_bytes(self) -> int:
        """The bytes of all slots."""
        return self.num_slots * self.slot_blocks * self.block_bytes

    def slots(self, region: Blocks) -> Blocks:
        """A region [num_bytes] as [num_slots, slot_blocks, block_bytes]."""
        return region.reshape(self.num_slots, self.slot_blocks, self.block_bytes)


class OwnRing:
    """A sender's ring: a new segment. Raises `TransferFailed` when there is no room for it."""

    def __init__(self, shape: RingShape, pool: BlockSource) -> None:
        try:
            segment = Segment(shape.num_bytes)
        except OSError as error:
            raise TransferFailed(f"no shared memory for a ring of {shape.num_bytes} bytes: {error.strerror}") from None
        self.name = segment.name
        self.slots = shape.slots(segment.array)
        self._segment: Segment | None = segment
        self._pin: Pin = pool.pin(segment.array)

    def close(self) -> None:
        """Unmap the ring and remove its name. The memory goes when the last receiver has unmapped it, too."""
        if self._segment is not None:
            self._pin.close()
            self._segment.close()
            # the mapping ends with the last reference to it
            self._segment, self.slots = None, _nothing()


class PeerRing:
    """A ring of a sender, mapped. Raises `TransferFailed` when what `name` leads to cannot be one of this shape."""

    def __init__(self, name: str, shape: RingShape, pool: KvPool) -> None:
        self.name, self.shape = name, shape
        self._mapping = Mapping(name, shape.num_bytes)
        self._pin: Pin = pool.pin(self._mapping.array)
        self.slots = shape.slots(self._mapping.array)

    @property
    def is_direct(self) -> bool:
        """Whether the pool's device may copy from the slots as they are."""
        return self._pin.is_direct

    def has_ended(self) -> bool:
        """Whether the ring's sender has closed it, or is dead. Its name is removed in that case."""
        return self._mapping.has_lost_its_owner()

    def require_whole(self) -> None:
        """Raise `TransferFailed` when the ring does not have its size any more, or has holes."""
        self._mapping.require_whole(self.shape.num_bytes)

    def close(self) -> None:
        """Unmap the ring. The mapping ends with its last reference: the caller may still hold a slot."""
        self._pin.close()
        self.slots = _nothing()
        self._mapping.close()


def _nothing() -> Blocks:
    return np.empty((0, 0, 0), dtype=np.uint8)
