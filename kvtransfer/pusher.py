"""Pushes blocks: splits jobs into pieces, hands the pieces to transports, and computes checksums at the same time.

Owns the jobs of every sender, their order, and the rule that fails a sender which makes no progress. Knows no leases
and no states: the blocks it is given stay unchanged until their handoff is neither queued nor read any more.

A piece is hashed right after it was handed to the transport. Where the CPU copies it, its bytes are then still in the
cache; elsewhere it is hashed while it is in flight. On a device all pieces of a turn are hashed together, and a job
that was pushed waits for its checksums outside the queue. Senders are served in turn, so a slow receiver does not delay
others.

Bounds: a job names blocks that are held anyway, so the queues hold at most a few references per block of the pool.
Invariant: every job that was submitted is reported exactly once, as done, failed or cancelled, and no piece of it
begins after the report. `is_reading` says whether a piece that began may still be in flight. Checksums that are
computed after the report are discarded.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.kvtransfer.integrity import XXH3
from baton.kvtransfer.layers import LayerProgress
from baton.kvtransfer.pools.base import Checksums, HashedPool, Parts, Pending
from baton.kvtransfer.transports.base import Move, Sender
from baton.wire.errors import BatonError, TransferFailed
from baton.wire.request_key import RequestKey

STANDSTILL_S = 5.0
CONNECT_S = 12.0
"""Seconds for which a new sender may accept no piece, because some connect at their first push."""
_SLICE_S = 0.005
_TURN_BYTES = 4 * 2**20
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PushJob:
    """Blocks of one handoff for one receiver. With `layers`, their KV is still being computed, layer by layer."""

    key: RequestKey
    sender: Sender
    moves: Sequence[Move]
    layers: LayerProgress | None = None


@dataclass(frozen=True, slots=True)
class PushReport:
    """The end of a job. It has a checksum for each move, or an `error` and fewer checksums."""

    key: RequestKey
    moves: Sequence[Move]
    checksums: Sequence[int]
    error: str


@dataclass(slots=True)
class _Job:
    job: PushJob
    num_pushed: int = 0
    num_hashed: int = 0
    pending: deque[Pending] = field(default_factory=deque)
    checksums: list[int] = field(default_factory=list)
    parts: Parts | None = None
    num_layers_pushed: int = 0

    @property
    def is_pushed(self) -> bool:
        """Whether all its blocks were pushed."""
        return self.num_pushed == len(self.job.moves)

    def collect(self) -> bool:
        """Collect the checksums that are computed. Returns whether all of them are."""
        while self.pending and (values := self.pending[0].take()) is not None:
            self.pending.popleft()
            self.checksums.extend(values)
        return len(self.checksums) == len(self.job.moves)


@dataclass(slots=True)
class _Queue:
    """The jobs of one sender, and when it last made progress."""

    sender: Sender
    moved_s: float
    jobs: deque[_Job] = field(default_factory=deque)
    has_taken: bool = False
    is_blocked: bool = False


class Pusher:
    """Driven by the transfer thread: `work` pushes for a few milliseconds, and `reports` returns the jobs that ended.

    `checksum`: the kind that is computed over every block of `pool` (see `integrity`).
    """

    def __init__(self, pool: HashedPool, checksum: str = XXH3) -> None:
        self._block_bytes = pool.block_bytes
        self._checksums: Checksums = pool.checksums(checksum)
        self._queues: dict[int, _Queue] = {}
        self._hashing: list[_Job] = []
        self._readers: dict[RequestKey, list[Sender]] = {}
        self._closed: list[Sender] = []
        self._reports: list[PushReport] = []
        self._failures: list[tuple[Sender, str]] = []

    def submit(self, job: PushJob, now_s: float) -> None:
        """Queue a job."""
        queue = self._queues.setdefault(id(job.sender), _Queue(job.sender, now_s))
        if not queue.jobs:
            queue.moved_s = now_s
        if job.layers is not None:
            job.layers.follow()
        entry = _Job(job)
        if job.layers is not None:
            entry.parts = self._checksums.begin_parts([move.source for move in job.moves])
        queue.jobs.append(entry)
        readers = self._readers.setdefault(job.key, [])
        if job.sender not in readers:
            readers.append(job.sender)

    def cancel(self, key: RequestKey) -> None:
        """Begin no further piece of this handoff. Its jobs are reported as "cancelled"."""
        for queue in self._queues.values():
            for entry in [entry for entry in queue.jobs if entry.job.key == key]:
                queue.jobs.remove(entry)
                self._report(entry, "cancelled")
        for entry in [entry for entry in self._hashing if entry.job.key == key]:
            self._hashing.remove(entry)
            self._report(entry, "cancelled")

    def is_reading(self, key: RequestKey) -> bool:
        """Whether pieces of this handoff may still be in flight."""
        return any(sender.is_reading(key) for sender in self._readers.get(key, ()))

    def needs_fence(self, key: RequestKey) -> bool:
        """Whether pieces of this handoff may still land although none is read any more (see `Sender.needs_fence`)."""
        return any(sender.needs_fence for sender in self._readers.get(key, ()))

    def forget(self, key: RequestKey) -> None:
        """Drop what is stored about a handoff that is over, with no piece in flight."""
        self._readers.pop(key, None)
        in_use = {id(sender) for senders in self._readers.values() for sender in senders}
        self._closed = [sender for sender in self._closed if id(sender) in in_use]

    def retire(self, sender: Sender, reason: str) -> None:
        """Close a sender. Its jobs are reported with `reason`."""
        queue = self._queues.pop(id(sender), None)
        for entry in queue.jobs if queue is not None else ():
            self._report(entry, reason)
        for entry in [entry for entry in self._hashing if entry.job.sender is sender]:
            self._hashing.remove(entry)
            self._report(entry, reason)
        self._closed.append(sender)
        try:
            sender.close()
        except Exception:  # the thread survives any error of one receiver's transport
            _log.exception("a transport could not be closed")

    def work(self, now_s: float) -> float:
        """Push for a few milliseconds, or until a job ends. Returns in how many seconds it wants to be called again."""
        end_s = time.monotonic() + _SLICE_S
        for sender in self._closed:
            with contextlib.suppress(BatonError):
                sender.poll()  # a closed sender may still have to learn that nothing is read any more
        for queue in list(self._queues.values()):
            queue.is_blocked = False
            self._poll(queue, now_s)
        while not self._reports and time.monotonic() < end_s:
            ready = [queue for queue in self._queues.values() if self._is_ready(queue)]
            if not ready:
                break
            for queue in ready:
                self._advance(queue, now_s)
        for entry in [entry for entry in self._hashing if entry.collect()]:
            self._hashing.remove(entry)
            self._report(entry, "")
        return self._next_s()

    def reports(self) -> list[PushReport]:
        """Jobs that ended since the last call."""
        found, self._reports = self._reports, []
        return found

    def failures(self) -> list[tuple[Sender, str]]:
        """Senders that failed since the last call, with the reason. They are closed and their jobs are reported."""
        found, self._failures = self._failures, []
        return found

    def wait_on(self) -> list[Any]:
        """Sockets and files that are readable when a sender has something to do."""
        senders = [*(queue.sender for queue in self._queues.values()), *self._closed]
        return [source for sender in senders for source in sender.wait_on()]

    def _next_s(self) -> float:
        # a device computes checksums in less time than the shortest sleep, and Commit waits for them
        if self._hashing or any(self._is_ready(queue) for queue in self._queues.values()):
            return 0.0
        is_busy = any(queue.is_blocked for queue in self._queues.values()) or any(map(self.is_reading, self._readers))
        return 0.001 if is_busy else float("inf")

    def _is_ready(self, queue: _Queue) -> bool:
        if queue.is_blocked or not queue.jobs:
            return False
        entry = queue.jobs[0]
        layers = entry.job.layers
        return layers is None or layers.is_abandoned or entry.num_layers_pushed < layers.num_done

    def _poll(self, queue: _Queue, now_s: float) -> None:
        """Poll a sender; fail it when it cannot go on or has made no progress for too long."""
        try:
            queue.sender.poll()
            is_waiting = bool(queue.jobs) and queue.jobs[0].job.layers is None
            max_wait_s = STANDSTILL_S if queue.has_taken else CONNECT_S
            if not is_waiting:
                queue.moved_s = now_s
            elif now_s - queue.moved_s > max_wait_s:
                raise TransferFailed(f"the receiver took nothing for {max_wait_s:g} s")
        except Exception as error:  # as above
            self._fail(queue, error)

    def _advance(self, queue: _Queue, now_s: float) -> None:
        entry = queue.jobs[0]
        layers = entry.job.layers
        if layers is not None and layers.is_abandoned:
            queue.jobs.popleft()
            self._report(entry, "the step could not be computed")
            return
        try:
            has_moved = self._push_piece(entry) if layers is None else self._push_layers(entry, layers)
        except Exception as error:  # as above
            self._fail(queue, error)
            return
        queue.is_blocked = not has_moved
        if has_moved:
            queue.moved_s, queue.has_taken = now_s, True
        if entry.is_pushed:
            queue.jobs.popleft()
            if entry.collect():
                self._report(entry, "")
            else:
                self._hashing.append(entry)

    def _push_piece(self, entry: _Job) -> bool:
        """Push some pieces of a job. Returns False when its sender accepts none now."""
        job, sender, first = entry.job, entry.job.sender, entry.num_pushed
        count = max(1, sender.piece_bytes // self._block_bytes)
        last = min(len(job.moves), first + max(count, _TURN_BYTES // self._block_bytes))
        while entry.num_pushed < last:
            moves = _consecutive(job.moves, entry.num_pushed, count)
            if not sender.push(job.key, moves):
                break
            entry.num_pushed += len(moves)
            self._hash(entry, self._checksums.max_blocks)
        self._hash(entry, 1)
        return entry.num_pushed > first

    def _hash(self, entry: _Job, min_blocks: int) -> None:
        """Begin the checksums of pushed blocks, as soon as there are at least `min_blocks` of them."""
        while entry.num_pushed - entry.num_hashed >= min_blocks:
            last = min(entry.num_pushed, entry.num_hashed + self._checksums.max_blocks)
            sources = [move.source for move in entry.job.moves[entry.num_hashed : last]]
            entry.pending.append(self._checksums.begin(sources))
            entry.num_hashed = last

    def _push_layers(self, entry: _Job, layers: LayerProgress) -> bool:
        """Push the layers that became complete, of every block of a job."""
        if entry.parts is None:
            raise RuntimeError("a job with layers has checksums by parts")
        num_done = layers.num_done
        begin, end = layers.end_of(entry.num_layers_pushed), layers.end_of(num_done)
        entry.job.sender.push_part(entry.job.key, entry.job.moves, begin, end)
        entry.parts.add(begin, end)
        entry.num_layers_pushed = num_done
        if num_done == layers.num_layers:
            entry.pending.append(entry.parts.finish())
            entry.num_pushed = len(entry.job.moves)
        return True

    def _fail(self, queue: _Queue, error: Exception) -> None:
        if not isinstance(error, BatonError):
            _log.error("push failed", exc_info=error)
        reason = str(error) if isinstance(error, BatonError) else f"{type(error).__name__}: {error}"
        self._failures.append((queue.sender, reason))
        self.retire(queue.sender, reason)

    def _report(self, entry: _Job, error: str) -> None:
        self._reports.append(PushReport(entry.job.key, entry.job.moves, entry.checksums, error))


def _consecutive(moves: Sequence[Move], first: int, max_count: int) -> Sequence[Move]:
    """At most `max_count` of `moves` from `first` on, as long as they are consecutive in the grant."""
    count = 1
    while count < max_count and first + count < len(moves) and moves[first + count].index == moves[first].index + count:
        count += 1
    return moves[first : first + count]
