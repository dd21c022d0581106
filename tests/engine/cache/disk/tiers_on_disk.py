"""Disk tiers for tests, and what their folder holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from baton.engine.cache.disk.disk_tier import DiskTier
from baton.engine.cache.disk.folder import CacheFolder
from baton.engine.cache.store import BlockKind, StoredBlock, TierCounters
from baton.testing.kv_stores import BLOCK_BYTES, hash_of

KIND = BlockKind(BLOCK_BYTES, b"k" * 16)
OTHER_KIND = BlockKind(BLOCK_BYTES, b"o" * 16)
GIB = 2**30
_DEADLINE_S = 10.0


class Opened(DiskTier):
    """A disk tier, and what it counts."""

    def __init__(
        self,
        path: Path,
        kind: BlockKind = KIND,
        max_bytes: int = GIB,
        min_free_bytes: int = 0,
        on_evicted: Callable[[StoredBlock], object] | None = None,
    ) -> None:
        self.counters = TierCounters()
        self.cache_folder = CacheFolder(path, max_bytes, min_free_bytes)
        super().__init__(self.cache_folder, kind, self.counters, on_evicted)

    def has(self, *numbers: int) -> list[int]:
        """Those of the blocks that it knows."""
        return [number for number in numbers if self.lookup([hash_of(number)])]

    def has_written(self, *numbers: int) -> bool:
        """Whether these blocks are in files, and no others wait to be."""
        with self._lock:
            return not self._blocks.staged and all(hash_of(number) in self._blocks for number in numbers)


def until(is_done: Callable[[], object]) -> None:
    """Wait until it is."""
    deadline_s = time.monotonic() + _DEADLINE_S
    while not is_done():
        assert time.monotonic() < deadline_s, "it is never done"
        time.sleep(0.002)


def files_in(path: Path) -> list[Path]:
    """All files below a folder, hidden ones too, the oldest first."""
    found = [each for each in path.rglob("*") if each.is_file()]
    return sorted(found, key=lambda each: (each.stat().st_mtime_ns, each.name))
