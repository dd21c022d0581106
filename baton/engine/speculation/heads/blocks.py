"""The blocks into which a head writes between steps: which of them are its request's alone, and what they held before.

A block is published when it is full, and the slot of its last token is stored a step later. By then others may read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from baton.engine.attention.base import SequenceShare
from baton.engine.cache.block_pool import BlockPool
from baton.engine.cache.offload import KvOffload


class HeadBlocks:
    """Of `pool`, whose blocks have `block_size` tokens; `offload`: where the evicted ones go."""

    def __init__(self, pool: BlockPool, block_size: int, offload: KvOffload | None) -> None:
        self._pool = pool
        self._block_size = block_size
        self._offload = offload

    def first_own(self, block_table: Sequence[int], first: int, stop: int) -> int:
        """The first slot from `first` on, up to `stop`, from which no block has another owner."""
        for place in range(-(-stop // self._block_size) - 1, first // self._block_size - 1, -1):
            if self._pool.num_owners(block_table[place]) > 1:
                return min(stop, (place + 1) * self._block_size)
        return first

    def writing(self, shares: Iterable[SequenceShare]) -> None:
        """The slots of `shares` are about to be written: what their blocks held is saved before."""
        if self._offload is not None and self._offload.has_unsaved:
            size = self._block_size
            for share in shares:
                self._offload.overwriting(share.block_table[share.start // size : -(-share.context_len // size)])
