"""The pushing thread: moves blocks while the engine computes the next chunk.

Owns one thread, its queue of jobs and the checksums it computes on the way. Knows no leases and no states: it is given
blocks that stay untouched until the job is reported done.

Bounds: a job names blocks that are held anyway, so the queue holds at most one reference per block of the pool.
Invariant: every job that was submitted is reported exactly once, done, failed or cancelled, and nothing of it is read
or written after the report.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import queue
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from engine.api.errors import BatonError
from kvtransfer.integrity import block_checksum
from kvtransfer.messages import HandoffKey
from kvtransfer.transports.base import Blocks, Move, Sender

_BLOCKS_PER_CHECK = 8
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PushJob:
    """Blocks of one handoff to one receiver."""

    key: HandoffKey
    sender: Sender
    moves: Sequence[Move]


@dataclass(frozen=True, slots=True)
class PushReport:
    """The end of a job: a checksum for each move, or `error` with fewer."""

    key: HandoffKey
    moves: Sequence[Move]
    checksums: Sequence[int]
    error: str


class Pusher:
    """Runs jobs in order on its own thread. `wakeup` becomes readable when reports are waiting."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._jobs: queue.SimpleQueue[PushJob | Sender | None] = queue.SimpleQueue()
        self._reports: collections.deque[PushReport] = collections.deque()
        self._cancelled: set[HandoffKey] = set()
        self.wakeup, self._signal = socket.socketpair()
        self.wakeup.setblocking(False)
        self._signal.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="kv-pusher", daemon=True)
        self._thread.start()

    def submit(self, job: PushJob) -> None:
        """Queue a job. Its blocks must not change until it is reported."""
        self._jobs.put(job)

    def retire(self, sender: Sender) -> None:
        """Close `sender` after the jobs that were submitted for it: only this thread touches senders."""
        self._jobs.put(sender)

    def cancel(self, key: HandoffKey) -> None:
        """Stop this handoff's jobs between blocks. They are still reported, as "cancelled"."""
        self._cancelled.add(key)

    def forget(self, key: HandoffKey) -> None:
        """The handoff is over: drop its cancel mark."""
        self._cancelled.discard(key)

    def reports(self) -> list[PushReport]:
        """Jobs that ended since the last call."""
        try:
            while self.wakeup.recv(4096):
                pass
        except BlockingIOError:
            pass
        found = []
        while self._reports:
            found.append(self._reports.popleft())
        return found

    def close(self, timeout_s: float = 10.0) -> None:
        """End the thread after the job it is in."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        self.wakeup.close()
        self._signal.close()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, PushJob):
                self._reports.append(self._push(job))
                # a full pipe wakes the reader as well; a closed one has no reader
                with contextlib.suppress(OSError):
                    self._signal.send(b"\0")
            else:
                self._close(job)

    def _close(self, sender: Sender) -> None:
        try:
            sender.close()
        except Exception:  # as below
            _log.exception("a transport could not be closed")

    def _push(self, job: PushJob) -> PushReport:
        checksums: list[int] = []
        try:
            for first in range(0, len(job.moves), _BLOCKS_PER_CHECK):
                if job.key in self._cancelled:
                    return PushReport(job.key, job.moves, checksums, "cancelled")
                moves = job.moves[first : first + _BLOCKS_PER_CHECK]
                job.sender.push(job.key, moves)
                checksums.extend(block_checksum(self._blocks[move.source]) for move in moves)
        except BatonError as error:
            return PushReport(job.key, job.moves, checksums, str(error))
        except Exception as error:  # the thread outlives whatever one receiver's transport does
            _log.exception("push failed")
            return PushReport(job.key, job.moves, checksums, f"{type(error).__name__}: {error}")
        return PushReport(job.key, job.moves, checksums, "")
