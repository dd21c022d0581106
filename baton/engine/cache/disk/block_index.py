"""Which blocks a disk tier has: those that are staged in memory, and the places of those in files.

Owns both, and tells whoever follows what comes and what leaves. Knows no file but its name, and no thread: whoever has
it calls it with a lock.

Invariant: a block that goes from memory into a file, or lies in both, is there all the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.engine.cache.block_changes import BlockChanges
from baton.engine.cache.disk.batch_file import BatchHeader
from baton.engine.cache.disk.reader import Place
from baton.engine.cache.store import StoredBlock


class BlockIndex:
    """The blocks of one kind. `staged`: those that are not written yet, the oldest first; to be read."""

    def __init__(self) -> None:
        self.staged: dict[bytes, StoredBlock] = {}
        self._places: dict[bytes, Place] = {}
        self._hashes: dict[str, list[bytes]] = {}
        self._changes: BlockChanges | None = None

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._places or block_hash in self.staged

    def follow(self, changes: BlockChanges) -> None:
        """Tell `changes` which blocks are there, and which come and leave."""
        changes.came(self._places.keys() | self.staged.keys())
        self._changes = changes

    def place_of(self, block_hash: bytes) -> Place | None:
        """Where in which file a block is."""
        return self._places.get(block_hash)

    def blocks_of(self, file: str) -> Sequence[bytes]:
        """The blocks that are looked for in a file."""
        return self._hashes.get(file, ())

    def stage(self, block: StoredBlock) -> None:
        """A block that is not there yet is in memory."""
        self._came(block.block_hash)
        self.staged[block.block_hash] = block

    def unstage(self, block_hash: bytes) -> None:
        """A block is not in memory any more, if it was."""
        if self.staged.pop(block_hash, None) is not None:
            self._left(block_hash)

    def note(self, file: str, header: BatchHeader, is_wanted: Callable[[bytes], bool]) -> None:
        """Those blocks of a file are there that are wanted, and in no other file."""
        noted = self._hashes[file] = []
        for number, (block_hash, checksum) in enumerate(header.entries):
            if block_hash not in self._places and is_wanted(block_hash):
                self._came(block_hash)
                self._places[block_hash] = Place(file, header.block_offset(number), checksum)
                noted.append(block_hash)

    def lose(self, file: str) -> None:
        """The blocks of a file cannot be loaded any more."""
        for block_hash in self._hashes.pop(file, ()):
            place = self._places.get(block_hash)
            if place is not None and place.file == file:
                self._displace(block_hash)

    def forget(self, block_hash: bytes) -> None:
        """A block is not there any more, wherever it was."""
        self.unstage(block_hash)
        if block_hash in self._places:
            self._displace(block_hash)

    def _displace(self, block_hash: bytes) -> None:
        del self._places[block_hash]
        self._left(block_hash)

    def _came(self, block_hash: bytes) -> None:
        if self._changes is not None and block_hash not in self:
            self._changes.came((block_hash,))

    def _left(self, block_hash: bytes) -> None:
        if self._changes is not None and block_hash not in self:
            self._changes.left((block_hash,))
