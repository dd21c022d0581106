"""Same host: the receiver's pool is a shared-memory segment, a push is one copy per contiguous run.

Owns segments in /dev/shm: random names, mode 0600, space reserved before use (a full tmpfs is an error at start, not a
SIGBUS later), locked by their owner for as long as it lives. The lock is how a later start recognises and sweeps the
segment of a process that was killed: process ids can be reused, a lock cannot outlive its holder.

A name is accepted from a registered peer only and must look like one of ours: it never leads to another file.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import secrets
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import zmq

from engine.api.errors import TransferFailed
from kvtransfer.layout import coalesce
from kvtransfer.messages import Endpoint, HandoffKey
from kvtransfer.transports.base import Blocks, Move

NAME = "shm"
_FOLDER = Path("/dev/shm")
_PREFIX = "baton-"
_SEGMENT = re.compile(r"baton-[0-9a-f]{32}")
_MAX_RUN_BYTES = 4 * 2**20


class Segment:
    """A shared-memory segment of this process; `array` is its memory, [num_bytes] uint8.

    Raises `OSError` when /dev/shm is missing or has no room for it.
    """

    def __init__(self, num_bytes: int) -> None:
        self.name, self._descriptor = _create_locked()
        self._path = _FOLDER / self.name
        try:
            os.posix_fallocate(self._descriptor, 0, num_bytes)
            self._map = mmap.mmap(self._descriptor, num_bytes)
        except BaseException:
            self.close()
            raise
        self.array = np.frombuffer(self._map, dtype=np.uint8)

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
        descriptor = os.open(_FOLDER / name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return name, descriptor
        os.close(descriptor)


def sweep_orphans() -> int:
    """Remove segments of this user whose owner is dead; returns how many."""
    num_swept = 0
    for path in _FOLDER.glob(f"{_PREFIX}*"):
        if not _SEGMENT.fullmatch(path.name):
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


class ShmReceiver:
    """Offers a segment that peers write into."""

    peers_write = True
    socket: zmq.Socket[bytes] | None = None

    def __init__(self, segment: Segment) -> None:
        self._segment = segment

    @property
    def endpoint(self) -> Endpoint:
        """The segment's name."""
        return Endpoint(NAME, self._segment.name)

    def expect(self, key: HandoffKey, block_ids: Sequence[int], generations: Sequence[int]) -> None:
        """Nothing to prepare: Commit and its checksums decide."""

    def forget(self, key: HandoffKey) -> None:
        """Nothing to forget."""

    def poll(self) -> None:
        """Peers write by themselves."""

    def num_missing(self, key: HandoffKey) -> int:
        """Commit is sent after the copies are done."""
        return 0

    def close(self) -> None:
        """Remove the segment's name."""
        self._segment.close()


class ShmSender:
    """Copies blocks of `blocks` into the segment named by a peer's endpoint. Raises `TransferFailed` when it cannot be
    that peer's pool.
    """

    def __init__(self, endpoint: Endpoint, blocks: Blocks, num_target_blocks: int) -> None:
        if not _SEGMENT.fullmatch(endpoint.address):
            raise TransferFailed("the peer named something that is not a segment")
        self._blocks = blocks
        num_bytes = num_target_blocks * blocks.shape[1]
        try:
            descriptor = os.open(_FOLDER / endpoint.address, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise TransferFailed(f"the peer's segment cannot be opened: {error.strerror}") from None
        try:
            if os.fstat(descriptor).st_size != num_bytes:
                raise TransferFailed("the peer's segment does not have the size of its pool")
            region = mmap.mmap(descriptor, num_bytes)
        except (OSError, ValueError, OverflowError) as error:
            raise TransferFailed(f"the peer's segment cannot be mapped: {error}") from None
        finally:
            os.close(descriptor)
        self._target = np.frombuffer(region, dtype=np.uint8).reshape(num_target_blocks, blocks.shape[1])
        self._max_run = max(1, _MAX_RUN_BYTES // blocks.shape[1])

    def push(self, key: HandoffKey, moves: Sequence[Move]) -> None:
        """See `Sender.push`."""
        for run in coalesce([move.source for move in moves], [move.target for move in moves], self._max_run):
            np.copyto(
                self._target[run.target : run.target + run.count], self._blocks[run.source : run.source + run.count]
            )

    def close(self) -> None:
        """The mapping ends with the last reference to it."""
        self._target = np.empty((0, 0), dtype=np.uint8)
