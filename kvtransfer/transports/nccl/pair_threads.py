"""The threads of the "nccl" transport, one for each pair and side, which may wait where the transfer thread may not.

Owns the messages of a pair, its slots, and what its two threads do: a sender's gathers blocks of the pool into a slot
and sends it, a receiver's receives into a slot. A pool is read here (see `OutgoingPair.is_reading`) and never written.
Knows no sockets: messages come through a `Line` and leave, with news, through a mailbox.

Bounds: `NUM_SLOTS` slots of `piece_bytes` (or one block) per pair. Each wait has a deadline, and a thread ends when
the main thread of its process has.

On a GPU a thread first makes the pool's device its own, and does all its work on one stream: slots are allocated,
filled, and awaited there, so the allocator hands none of them to another stream while it is in use. NCCL's own stream
waits for it before each operation, and `finish` before what follows. A slot passes between this stream and the transfer
thread's only after the one that had it has been waited for.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import torch

from kvtransfer.mailbox import Mailbox
from kvtransfer.messages import HandoffName
from kvtransfer.transports.nccl.pair_blocks import NUM_SLOTS, gather, on_stream, open_slots, open_stream, settle
from kvtransfer.transports.nccl.pair_group import RECEIVER_RANK, SENDER_RANK, PairStore, finish, form_group, give_up
from wire.codec import BlockIds, Bounds, Length, U64s
from wire.request_key import RequestKey

FORM_S = 10.0
STALL_S = 5.0
ALIVE_S = 1.0
SILENCE_S = 8.0


@dataclass(frozen=True, slots=True)
class PairHello:
    """Sender -> receiver, first message of a connection: form a group with me."""

    backend: Annotated[str, Length(16)]
    block_bytes: Annotated[int, Bounds(1, 2**40)]


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """Either way, while the group is formed."""

    key: Annotated[str, Length(256)]
    value: Annotated[bytes, Length(2**16)]


@dataclass(frozen=True, slots=True)
class BlockBatch:
    """Sender -> receiver: message `number` (from 0) of the group holds these blocks of the grant, in this order."""

    number: Annotated[int, Bounds(0, 2**62)]
    handoff: HandoffName
    first_index: Annotated[int, Bounds(0, 2**40)]
    block_ids: BlockIds
    generations: U64s


@dataclass(frozen=True, slots=True)
class PairAlive:
    """Sender -> receiver, when it has had nothing to send for a while."""


@dataclass(frozen=True, slots=True)
class PairEnd:
    """Either way: this side has given up the pair. Answers whatever comes without a pair, too."""

    reason: Annotated[str, Length(1024)]


class _Stopped(Exception):
    """The transfer thread has given up this pair."""


class Line:
    """From the transfer thread, which owns the sockets, to the thread of one pair, which may wait."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._early: deque[Any] = deque()
        self._is_stopped = False

    def put(self, item: Any) -> None:
        """By the transfer thread."""
        self._items.put(item)

    def stop(self) -> None:
        """By the transfer thread: whatever is still in the line is dropped."""
        self._is_stopped = True
        self._items.put(None)

    def __len__(self) -> int:
        return self._items.qsize()

    def take(self, timeout_s: float) -> Any | None:
        """The next item, None after `timeout_s`. Raises `_Stopped`."""
        item: Any | None = None
        if self._early:
            item = self._early.popleft()
        else:
            with contextlib.suppress(queue.Empty):
                item = self._items.get(timeout=timeout_s) if timeout_s > 0 else self._items.get_nowait()
        # nobody is left to stop this pair once the process's main thread has ended
        if self._is_stopped or not threading.main_thread().is_alive():
            raise _Stopped
        return item

    def take_entry(self, timeout_s: float) -> tuple[str, bytes]:
        """The next `StoreEntry`; what else comes waits until the group stands. Raises `_Stopped`, `TimeoutError`."""
        deadline_s = time.monotonic() + timeout_s
        early: list[Any] = []
        try:
            while (remaining_s := deadline_s - time.monotonic()) > 0:
                item = self.take(min(remaining_s, ALIVE_S))
                if isinstance(item, StoreEntry):
                    return item.key, item.value
                if item is not None:
                    early.append(item)
        finally:
            self._early.extend(early)
        raise TimeoutError("the peer did not form the group in time")


@dataclass(frozen=True, slots=True)
class FromPair:
    """From the thread of a pair to the transfer thread: a message to send, or news."""

    connection: bytes
    item: Any


News: TypeAlias = Mailbox[FromPair]


@dataclass(frozen=True, slots=True)
class Ended:
    """The pair's thread has ended."""

    reason: str


@dataclass(frozen=True, slots=True)
class Landed:
    """The blocks of `batch` lie in `slot`."""

    batch: BlockBatch
    slot: torch.Tensor


@dataclass(frozen=True, slots=True)
class Standing:
    """The group is formed."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A message has left: there is room for another."""


def _reason_of(error: Exception) -> str:
    # torch's texts begin with a place in its source, and what NCCL itself has to say comes last
    text = str(error).rpartition("Last error:")[2].strip() or str(error)
    return f"{type(error).__name__}: {text.split('] ', 1)[-1]:.200}"


def _begin_thread(run: Callable[[], None], name: str, device: torch.device) -> threading.Thread:
    """A thread for one pair. NCCL may not come back: then its thread must not keep the process, but go with it."""
    thread = threading.Thread(target=run, name=name, daemon=device.type == "cuda")
    thread.start()
    return thread


def _bind_thread(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)


class IncomingPair:
    """D's side of one pair and its thread, which receives one message after another into slots."""

    def __init__(self, connection: bytes, pool: torch.Tensor, host: str, news: News) -> None:
        self.line = Line()
        self.free_slots: queue.SimpleQueue[torch.Tensor | None] = queue.SimpleQueue()
        self.next_number = 0
        self._connection = connection
        self._pool = pool
        self._host = host
        self._news = news
        self._thread = _begin_thread(self._run, "kv-pair-in", pool.device)

    def stop(self) -> None:
        """Receive nothing more."""
        self.line.stop()
        self.free_slots.put(None)  # whoever waits for a slot gets none

    @property
    def is_over(self) -> bool:
        """Whether its thread has ended."""
        return not self._thread.is_alive()

    def _tell(self, item: Any) -> None:
        self._news.put(FromPair(self._connection, item))

    def _run(self) -> None:
        try:
            _bind_thread(self._pool.device)
            with on_stream(open_stream(self._pool.device)):
                store = PairStore(lambda key, value: self._tell(StoreEntry(key, value)), self.line.take_entry, FORM_S)
                group = form_group(store, RECEIVER_RANK, self._host, self._pool.device)
                try:
                    for slot in open_slots(self._pool):
                        self.free_slots.put(slot)
                    self._receive(group)
                finally:
                    give_up(group, self._pool.device)
        except _Stopped:
            pass
        except Exception as error:  # the edge of the thread: whatever happened ends the pair
            self._tell(Ended(_reason_of(error)))

    def _receive(self, group: Any) -> None:
        heard_s = time.monotonic()
        under_way: deque[tuple[Any, Landed]] = deque()
        while True:
            item = self.line.take(0.0 if under_way else ALIVE_S)
            if isinstance(item, BlockBatch):
                if len(under_way) == NUM_SLOTS:
                    self._land(*under_way.popleft())
                under_way.append(self._begin(group, item))
            elif item is None and under_way:
                self._land(*under_way.popleft())
            elif item is None:
                if time.monotonic() - heard_s > SILENCE_S:
                    raise TimeoutError(f"the sender was silent for {SILENCE_S:g} s")
                continue
            heard_s = time.monotonic()

    def _begin(self, group: Any, batch: BlockBatch) -> tuple[Any, Landed]:
        try:
            slot = self.free_slots.get(timeout=STALL_S)
        except queue.Empty:
            raise TimeoutError(f"the receiver took nothing for {STALL_S:g} s") from None
        if slot is None:
            raise _Stopped
        # gloo ends the process when more comes than was asked for, and takes less: so the whole slot is asked for
        wanted = slot if slot.is_cpu else slot[: len(batch.block_ids)]
        return group.recv([wanted], SENDER_RANK, 0), Landed(batch, slot)

    def _land(self, work: Any, landed: Landed) -> None:
        finish(work, STALL_S, landed.slot.device)
        self._tell(landed)


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
        _begin_thread(self._run, "kv-pair-out", pool.device)

    def give(self, piece: Piece) -> None:
        """Send this next."""
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

    def _run(self) -> None:
        try:
            _bind_thread(self._pool.device)
            with on_stream(stream := open_stream(self._pool.device)):
                store = PairStore(lambda key, value: self._tell(StoreEntry(key, value)), self.line.take_entry, FORM_S)
                group = form_group(store, SENDER_RANK, _address_towards(self._receiver_host), self._pool.device)
                self._tell(Standing())
                try:
                    self._send_pieces(group, stream)
                finally:
                    give_up(group, self._pool.device)
        except _Stopped:
            pass
        except Exception as error:  # the edge of the thread: whatever happened ends the pair
            with self._lock:
                self._is_stopped = True
            self._tell(Ended(_reason_of(error)))

    def _send_pieces(self, group: Any, stream: Any) -> None:
        slots = deque(open_slots(self._pool))
        under_way: deque[Any] = deque()
        while True:
            item = self.line.take(0.0 if under_way else ALIVE_S)
            if isinstance(item, Piece):
                if len(under_way) == NUM_SLOTS:
                    self._finish(under_way.popleft())
                self._gather(item, slots[0], stream)
                under_way.append(group.send([slots[0][: len(item.sources)]], RECEIVER_RANK, 0))
                slots.rotate(-1)
            elif item is None and under_way:
                self._finish(under_way.popleft())
            elif item is None:
                self._tell(PairAlive())

    def _finish(self, work: Any) -> None:
        finish(work, STALL_S, self._pool.device)
        self._tell(Sent())

    def _gather(self, piece: Piece, slot: torch.Tensor, stream: Any) -> None:
        with self._lock:
            if self._is_stopped:
                raise _Stopped
            self._gathering = piece.key
        try:
            gather(slot, self._pool, piece.sources)
            settle(stream)  # only then is the pool not read any more
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
