"""The memory of this machine, as far as this process may have it.

Owns the reading: of the system, and of a container's limit, where that is lower. Imports no torch: the launcher asks
before it starts anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

CGROUP_FOLDER = Path("/sys/fs/cgroup")
GIB = 2**30
SMALLER = "a lower --max-model-len or --kv-cache-memory-bytes, --dtype bfloat16, or fewer nodes"
"""What makes nodes take less memory, for messages."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes: all there is, and what can be had now without taking it from other processes."""

    total: int
    free: int

    def __str__(self) -> str:
        return f"{self.free / GIB:.1f} of {self.total / GIB:.1f} GiB are free"


def read_host_memory(folder: Path = CGROUP_FOLDER) -> HostMemory:
    """The memory of this process's machine or container now."""
    memory = psutil.virtual_memory()
    found = HostMemory(int(memory.total), int(memory.available))
    limit = _number(folder / "memory.max")
    if limit is None or limit >= found.total:
        return found
    used = (_number(folder / "memory.current") or 0) - _reclaimable(folder / "memory.stat")
    return HostMemory(limit, max(0, min(found.free, limit - used)))


def _number(file: Path) -> int | None:
    """The number in a file of a cgroup, None where there is none or it says "max"."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _reclaimable(file: Path) -> int:
    """Bytes of cached files: the kernel drops them when somebody needs the memory."""
    try:
        entries = dict(line.split() for line in file.read_text().splitlines())
        return int(entries.get("inactive_file", 0))
    except (OSError, ValueError):
        return 0
