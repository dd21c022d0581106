"""What of one grant has arrived at the receiver, and whether it is what was sent.

Owns which blocks are in the pool and the checksums computed over them there. Knows no transports and no messages.

Invariant: a block that arrives again is hashed again, so what `damaged` says is about the bytes that arrived last.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from kvtransfer.integrity import block_checksum
from kvtransfer.transports.base import Blocks


class ArrivedBlocks:
    """The blocks of one grant, by their index in it. Without `checksums`, what arrives is taken as it is."""

    def __init__(self, num_blocks: int, *, checksums: bool) -> None:
        self._num_blocks = num_blocks
        self._checksums = checksums
        self._arrived: set[int] = set()
        self._unhashed: dict[int, None] = {}
        self._found: dict[int, int] = {}

    @property
    def num_missing(self) -> int:
        """Blocks that have not arrived."""
        return self._num_blocks - len(self._arrived)

    @property
    def is_hashed(self) -> bool:
        """Whether the checksum of everything that arrived is known."""
        return not self._unhashed

    def note(self, indexes: Iterable[int]) -> None:
        """These have arrived, for the first time or again. Raises `IndexError` for what the grant does not have."""
        for index in indexes:
            if not 0 <= index < self._num_blocks:
                raise IndexError(f"block {index} of a grant of {self._num_blocks}")
            self._arrived.add(index)
            if self._checksums:
                self._unhashed[index] = None

    def note_rest(self) -> None:
        """All that had not arrived has arrived now."""
        self.note([index for index in range(self._num_blocks) if index not in self._arrived])

    def miss(self, indexes: Iterable[int]) -> None:
        """These are on their way once more."""
        for index in indexes:
            self._arrived.discard(index)
            self._unhashed.pop(index, None)
            self._found.pop(index, None)

    def hash(self, blocks: Blocks, block_ids: Sequence[int], end_s: float) -> None:
        """Compute checksums of what arrived in `blocks`, block `i` of the grant being block_ids[i], until `end_s`."""
        while self._unhashed:
            index = next(iter(self._unhashed))
            self._found[index] = block_checksum(blocks[block_ids[index]])
            del self._unhashed[index]
            if time.monotonic() >= end_s:
                return

    def damaged(self, checksums: Sequence[int]) -> list[int]:
        """Indexes whose bytes are not those of `checksums`, one for each block of the grant."""
        return [index for index, found in sorted(self._found.items()) if found != checksums[index]]
