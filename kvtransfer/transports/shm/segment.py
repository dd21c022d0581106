"""Shared-memory segments: memory in /dev/shm that processes of one host map by name or by descriptor.

Owns the segments of this process: random names, mode 0600, space reserved before use (a full tmpfs is an error at
start, not a SIGBUS later), locked by their owner for as long as it lives. The lock is how a later start recognises and
sweeps the segment of a process that was killed: process ids can be reused, a lock cannot outlive its holder.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import secrets
from pathlib import Path

import numpy as np

FOLDER = Path("/dev/shm")
SEGMENT_NAME = re.compile(r"baton-[0-9a-f]{32}")
_PREFIX = "baton-"


class Segment:
    """A shared-memory segment of this process; `array` is its memory, [num_bytes] uint8.

    Raises `OSError` when /dev/shm is missing or has no room for it.
    """

    def __init__(self, num_bytes: int) -> None:
        self.name, self._descriptor = _create_locked()
        self._path = FOLDER / self.name
        try:
            os.posix_fallocate(self._descriptor, 0, num_bytes)
            self._map = mmap.mmap(self._descriptor, num_bytes)
        except BaseException:
            self.close()
            raise
        self.array = np.frombuffer(self._map, dtype=np.uint8)

    @property
    def descriptor(self) -> int:
        """Its open file, for a child process to inherit."""
        return self._descriptor

    def close(self) -> None:
        """Remove the name and the lock. Memory stays valid for whoever has it mapped."""
        self._path.unlink(missing_ok=True)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _create_locked() -> tuple[str, int]:
    """(name, descriptor) of a new, empty, locked segment.

    Between its creation and its lock a segment looks like an orphan to another node that starts at the same moment:
    one that was swept in between is forgotten and another made.
    """
    while True:
        name = f"{_PREFIX}{secrets.token_hex(16)}"
        descriptor = os.open(FOLDER / name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return name, descriptor
        os.close(descriptor)


def sweep_orphans() -> int:
    """Remove segments of this user whose owner is dead; returns how many."""
    num_swept = 0
    for path in FOLDER.glob(f"{_PREFIX}*"):
        if not SEGMENT_NAME.fullmatch(path.name):
            continue
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            if os.fstat(descriptor).st_uid != os.geteuid():
                continue
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            num_swept += 1
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
        finally:
            os.close(descriptor)
    return num_swept
