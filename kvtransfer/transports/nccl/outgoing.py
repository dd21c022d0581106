"""P's side of one pair: a thread that gathers blocks of the pool into slots and sends those.

Owns the slots, and which blocks it may still read (`OutgoingPair.is_reading`). The pool is read here and never written.

Bounds: `NUM_SLOTS` slots of `piece_bytes` (or one block).

On a GPU a thread first makes the pool's device its own, and does all its work on one stream: slots are allocated,
filled, and awaited there, so the allocator hands none of them to another stream while it is in use. NCCL's own stream
waits for it before each operation, and `finish` before what follows. A slot passes between this stream and the transfer
thread's only after the one that had it has been waited for.
"""

from __future__ import annotations

import socket
import threading
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import torch

from baton.device.choose import open_stream
from baton.device.stream import Stream, bind_thread
from baton.kvtransfer.transports.nccl import line
from baton.kvtransfer.transports.nccl.blocks import NUM_SLOTS, gather, open_slots
from baton.kvtransfer.transports.nccl.group import RECEIVER_RANK, SENDER_RANK, PairStore, finish, form_group, give_up
from baton.kvtransfer.transports.nccl.line import (
    Ended,
    FromPair,
    Line,
    News,
    Sent,
    Standing,
    Stopped,
    begin_thread,
    reason_of,
)
from baton.kvtransfer.transports.nccl.wire import PairAlive, StoreEntry
from baton.wire.request_key import RequestKey


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks for one message of the group."""

    key: RequestKey
    sources: tuple[int, ...]


class OutgoingPair:
    """P's side of one pair and its thread, which gathers blocks into slots and sends those.

    Which blocks it may still read is said by `is_reading`: pieces it was given and has not gathered.
    """

    def __init__(self, pool: torch.Tensor, receiver_host: str, news: News) -> None:
        self.line = Line()
        self._pool = pool
        self._receiver_host = receiver_host
        self._news = news
        self._lock = threading.Lock()
        self._ungathered: Counter[RequestKey] = Counter()
        self._gathering: RequestKey | None = None
        self._is_stopped = False
        begin_thread(self._run, "kv-pair-out", pool.device)

    def give(self, piece: Piece) -> None:
        """Send this item next."""
        with self._lock:
            self._ungathered[piece.key] += 1
        self.line.put(piece)

    def is_reading(self, key: RequestKey) -> bool:
        """Whether blocks of this handoff are being gathered, or will be."""
        with self._lock:
            return self._gathering == key or (not self._is_stopped and self._ungathered[key] > 0)

    def stop(self) -> None:
        """Begin no further gathering, from now on."""
        with self._lock:
            self._is_stopped = True
        self.line.stop()

    def _tell(self, item: Any) -> None:
        self._news.put(FromPair(b"", item))

    def _tell_entry(self, key: str, value: bytes) -> None:
        self._tell(StoreEntry(key, value))

    def _run(self) -> None:
        try:
            bind_thread(self._pool.device)
            stream = open_stream(self._pool.device)
            with stream.current():
                store = PairStore(self._tell_entry, self.line.take_entry, line.FORM_S)
                group = form_group(store, SENDER_RANK, _address_towards(self._receiver_host), self._pool.device)
                self._tell(Standing())
                try:
                    self._send_pieces(group, stream)
                finally:
                    give_up(group, self._pool.device)
        except Stopped:
            pass
        except Exception as error:  # the edge of the thread: whatever happened ends the pair
            with self._lock:
                self._is_stopped = True
            self._tell(Ended(reason_of(error)))

    def _send_pieces(self, group: Any, stream: Stream) -> None:
        slots = deque(open_slots(self._pool))
        in_flight: deque[Any] = deque()
        while True:
            item = self.line.take(0.0 if in_flight else line.ALIVE_S)
            if isinstance(item, Piece):
                if len(in_flight) == NUM_SLOTS:
                    self._finish(in_flight.popleft())
                self._gather(item, slots[0], stream)
                in_flight.append(group.send([slots[0][: len(item.sources)]], RECEIVER_RANK, 0))
                slots.rotate(-1)
            elif item is None and in_flight:
                self._finish(in_flight.popleft())
            elif item is None:
                self._tell(PairAlive())

    def _finish(self, work: Any) -> None:
        finish(work, line.STALL_S, self._pool.device)
        self._tell(Sent())

    def _gather(self, piece: Piece, slot: torch.Tensor, stream: Stream) -> None:
        with self._lock:
            if self._is_stopped:
                raise Stopped
            self._gathering = piece.key
        try:
            gather(slot, self._pool, piece.sources)
            stream.synchronize()  # only then is the pool not read any more
        finally:
            with self._lock:
                self._gathering = None
                self._ungathered[piece.key] -= 1
                if not self._ungathered[piece.key]:
                    del self._ungathered[piece.key]


def _address_towards(host: str) -> str:
    """This machine's own address on the way to `host`. Sends nothing."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
