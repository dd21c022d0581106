"""Shared-memory segments: memory in /dev/shm that processes of one host map by name or by descriptor.

Owns the segments of this process: random names, mode 0600, space reserved before use (a full tmpfs is an error, not a
SIGBUS), locked by their owner for as long as it lives. The lock is how a later start recognises and
sweeps the segment of a process that was killed: process ids can be reused, a lock cannot outlive its holder.

`Mapping` is a segment of another process. Its name comes from a peer: it must look like one of ours, and whatever it
leads to must be a plain file of this user with exactly the right size, else it is refused. A process of this user could
still cut the file off while it is mapped, and touching what is gone would end this process (SIGBUS), as a signal
of that process could. Files in /dev/shm cannot be sealed against that. `require_whole` finds one that has been cut off
or has holes before.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import secrets
import stat
import weakref
from pathlib import Path

import numpy as np

from baton.wire.errors import TransferFailed

FOLDER = Path("/dev/shm")
SEGMENT_NAME = re.compile(r"baton-[0-9a-f]{32}")
_PREFIX = "baton-"
_STAT_BLOCK_BYTES = 512


class Segment:
    """A shared-memory segment of this process; `array` is its memory, [num_bytes] uint8. `reserved_bytes`: at its
    beginning; space for the rest is reserved by who uses it, in order. None: for all of it.

    Raises `OSError` when /dev/shm is missing or has no room for it.
    """

    def __init__(self, num_bytes: int, reserved_bytes: int | None = None) -> None:
        self.name, self._descriptor = _create_locked()
        self._path = FOLDER / self.name
        try:
            _require_room(num_bytes)
            os.truncate(self._descriptor, num_bytes)
            if reserved := num_bytes if reserved_bytes is None else reserved_bytes:
                os.posix_fallocate(self._descriptor, 0, reserved)
            self._map = mmap.mmap(self._descriptor, num_bytes)
        except BaseException:
            self.close()
            raise
        self.array = np.frombuffer(self._map, dtype=np.uint8)

    @property
    def descriptor(self) -> int:
        """The open file of the segment, for a child process to inherit."""
        return self._descriptor

    def close(self) -> None:
        """Remove the name and the lock. Memory stays valid for whoever has it mapped."""
        self._path.unlink(missing_ok=True)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Mapping:
    """The segment `name` of a peer, mapped; `array` is its memory, [num_bytes] uint8. Raises `TransferFailed` when what
    the name leads to cannot be a segment of that size."""

    def __init__(self, name: str, num_bytes: int) -> None:
        if not SEGMENT_NAME.fullmatch(name):
            raise TransferFailed("the peer named something that is not a segment")
        self.name = name
        self._num_bytes = num_bytes
        self._descriptor = -1
        try:
            self._descriptor = os.open(FOLDER / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            self._end = weakref.finalize(self, os.close, self._descriptor)
            found = os.fstat(self._descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                raise TransferFailed("the peer's segment is not a segment of this user")
            self.require_whole(0)
            self.array = np.frombuffer(mmap.mmap(self._descriptor, num_bytes), dtype=np.uint8)
        except (OSError, ValueError, OverflowError) as error:
            self.close()
            what = error.strerror if isinstance(error, OSError) else error
            raise TransferFailed(f"the peer's segment cannot be mapped: {what}") from None
        except TransferFailed:
            self.close()
            raise

    def require_whole(self, num_bytes: int) -> None:
        """Raise `TransferFailed` when the segment does not have its size, or so much of its beginning has holes, for
        which there may be no memory."""
        found = os.fstat(self._descriptor)
        if found.st_size != self._num_bytes:
            raise TransferFailed(f"the peer's segment has {found.st_size} bytes, not {self._num_bytes}")
        if found.st_blocks * _STAT_BLOCK_BYTES < num_bytes:
            raise TransferFailed("the peer's segment has holes")

    def has_lost_its_owner(self) -> bool:
        """Whether the segment's owner has closed it, or is dead. Its name is removed in that case."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        (FOLDER / self.name).unlink(missing_ok=True)
        return True

    def close(self) -> None:
        """Unmap the segment. The mapping ends with its last reference: the caller may still hold a part."""
        self.array = np.empty(0, dtype=np.uint8)
        if self._descriptor >= 0:
            self._end()
            self._descriptor = -1


def _require_room(num_bytes: int) -> None:
    """Raise `OSError` when /dev/shm cannot hold so many bytes more."""
    found = os.statvfs(FOLDER)
    if found.f_blocks and found.f_bavail * found.f_frsize < num_bytes:  # 0 blocks: it has no limit of its own
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


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
