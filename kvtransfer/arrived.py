"""Tracks which blocks of one grant have arrived at the receiver, and whether their bytes are those that were sent.

Owns which blocks are in the pool and the checksums computed over them there. Knows no transports and no messages.

Checksums are computed one batch at a time. In host memory a batch is done at once; on a device it takes a while, and
the blocks that arrive in the meantime form the next batch.

Invariant: a block that arrives again is hashed again, so `damaged` always describes the bytes that arrived last.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Sequence

from baton.kvtransfer.pools.base import Checksums, Pending


class ArrivedBlocks:
    """The blocks of one grant, by their index in it. Without `checksums`, blocks are not verified."""

    def __init__(self, num_blocks: int, *, checksums: bool) -> None:
        self._num_blocks = num_blocks
        self._checksums = checksums
        self._arrived: set[int] = set()
        self._unhashed: dict[int, None] = {}
        self._found: dict[int, int] = {}
        self._batch: list[int] = []
        self._stale: set[int] = set()
        self._pending: Pending | None = None

    @property
    def num_missing(self) -> int:
        """The number of blocks that have not arrived."""
        return self._num_blocks - len(self._arrived)

    @property
    def is_hashed(self) -> bool:
        """Whether the checksum of everything that arrived is known."""
        return not self._unhashed and self._pending is None

    @property
    def is_waiting(self) -> bool:
        """Whether a device is computing checksums, so that all one can do is to ask again soon."""
        return self._pending is not None

    def note(self, indexes: Iterable[int]) -> None:
        """Record blocks that have arrived, for the first time or again. Raises `IndexError` for an index outside the
        grant.
        """
        for index in indexes:
            if not 0 <= index < self._num_blocks:
                raise IndexError(f"block {index} of a grant of {self._num_blocks}")
            self._arrived.add(index)
            if self._checksums:
                self._drop_checksum(index)
                self._unhashed[index] = None

    def note_rest(self) -> None:
        """Record that all blocks that were missing have arrived now."""
        self.note([index for index in range(self._num_blocks) if index not in self._arrived])

    def expect_again(self, indexes: Iterable[int]) -> None:
        """Record that these blocks are missing again, because the sender pushes them once more."""
        for index in indexes:
            self._arrived.discard(index)
            self._unhashed.pop(index, None)
            self._drop_checksum(index)

    def hash(self, checksums: Checksums, block_ids: Sequence[int], end_s: float) -> None:
        """Compute checksums of the blocks that arrived, until `end_s` or until only a device is left to wait for.

        Block `i` of the grant is block `block_ids[i]` of the pool.
        """
        while not self.is_hashed:
            if self._pending is None:
                self._begin(checksums, block_ids)
            if not self._collect() or time.monotonic() >= end_s:
                return

    def has(self, index: int, checksum: int) -> bool:
        """Whether this block has arrived, and its bytes have that checksum."""
        return self._found.get(index) == checksum

    def damaged(self, checksums: Sequence[int]) -> list[int]:
        """Indexes of blocks whose bytes do not match. `checksums` has one entry for each block of the grant."""
        return [index for index, found in sorted(self._found.items()) if found != checksums[index]]

    def _drop_checksum(self, index: int) -> None:
        """Discard the checksum of a block, also one that is being computed: its bytes have been overwritten."""
        self._found.pop(index, None)
        if self._pending is not None:
            self._stale.add(index)

    def _begin(self, checksums: Checksums, block_ids: Sequence[int]) -> None:
        self._batch = list(itertools.islice(self._unhashed, checksums.max_blocks))
        self._stale.clear()
        for index in self._batch:
            del self._unhashed[index]
        self._pending = checksums.begin([block_ids[index] for index in self._batch])

    def _collect(self) -> bool:
        """Collect the checksums that are being computed. Returns False if they are not finished yet."""
        values = self._pending.take() if self._pending is not None else ()
        if values is None:
            return False
        self._pending = None
        found = zip(self._batch, values, strict=True)
        self._found.update((index, value) for index, value in found if index not in self._stale)
        return True
