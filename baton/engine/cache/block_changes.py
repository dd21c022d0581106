"""Which blocks have come into a tier and which have left it, from its threads to the one that tells others.

Owns what nobody has taken yet. A block that comes and leaves in between is in neither, so there is a bound: what the
tier had at the last look, and what it has now. Knows no tier, and nothing of a block but its hash.

Invariant: for each block, coming and leaving take turns, here and for whoever takes them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from itertools import islice


class BlockChanges:
    """Net changes of a set of blocks. Its calls may come from any thread."""

    def __init__(self) -> None:
        self._came: dict[bytes, bool] = {}
        self._lock = threading.Lock()

    def came(self, hashes: Iterable[bytes]) -> None:
        """These blocks are in the tier now, and were not before."""
        self._note(hashes, has_come=True)

    def left(self, hashes: Iterable[bytes]) -> None:
        """These blocks were in the tier, and are not any more."""
        self._note(hashes, has_come=False)

    def take(self, most: int) -> list[tuple[bytes, bool]]:
        """The oldest changes that were not taken, at most so many: blocks, and whether each has come or left."""
        if not self._came:
            return []
        with self._lock:
            taken = list(islice(self._came.items(), most))
            for block_hash, _ in taken:
                del self._came[block_hash]
        return taken

    def _note(self, hashes: Iterable[bytes], *, has_come: bool) -> None:
        with self._lock:
            for block_hash in hashes:
                if self._came.pop(block_hash, None) is None:
                    self._came[block_hash] = has_come
