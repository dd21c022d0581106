"""Same host, pools in device memory: P copies blocks into slots of shared memory, D copies them from there.

Owns, at P, a ring of slots for each receiver (see `ring`) and which of them are under way; at D, the rings of its
senders. Headers and acknowledgements go over a ZMQ connection, and a slot belongs to one side at a time: to P until its
header is sent, then to D until D has acknowledged the number of that header.

D writes its pool by itself, and only blocks that a grant announced, with their current generation, each once. What is
late, doubled, foreign or malformed changes nothing and is counted; a sender whose headers do not follow each other, or
name a slot that its ring does not have, loses its ring and has to connect anew.

Copies are waited for where they are made: P's blocks are not read any more when `push` returns, D's blocks hold their
bytes before they are reported, and nothing is written any more once a grant is forgotten.

Bounds: `_RING_BYTES` (or two blocks) for each pair, `_MAX_RINGS` rings at a receiver. A ring ends with its connection;
that of a sender that died is noticed by its lock, within `_LOOK_S`. A receiver that takes nothing leaves P no free
slot: `push` says "not now", and its caller counts the time.

No part of a block is pushed before the block is complete: every part would cost a copy, a message and a wait of its
own, and all chunks of a prompt but the last are pushed as whole blocks while the next is computed.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvtransfer.layout import coalesce
from kvtransfer.messages import Endpoint, HandoffName, ProcessIdentity
from kvtransfer.pool import Pool
from kvtransfer.transports.announced import GrantedWriter
from kvtransfer.transports.base import Move
from kvtransfer.transports.ring import OwnRing, PeerRing, RingShape
from wire import links
from wire.codec import BlockIds, Bounds, Codec, Length, U64s
from wire.errors import BatonError, InvalidSetting, TransferFailed
from wire.request_key import RequestKey

NAME = "shm_slots"
_SLOT_BYTES = 4 * 2**20
_MAX_SLOT_BLOCKS = 1_024
_RING_BYTES = 64 * 2**20
_MAX_SLOTS = 1_024
_MAX_RINGS = 64
_MAX_FRAME_BYTES = 2**17
_MAX_POLL_BYTES = 16 * 2**20
_MESSAGE_COST_BYTES = 2**16
"""What a message counts for at least in `_MAX_POLL_BYTES`."""
_LOOK_S = 1.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RingHello:
    """P -> D, first message of a connection: this is my ring."""

    name: Annotated[str, Length(64)]
    num_slots: Annotated[int, Bounds(1, _MAX_SLOTS)]
    slot_blocks: Annotated[int, Bounds(1, _MAX_SLOT_BLOCKS)]
    block_bytes: Annotated[int, Bounds(1, 2**40)]


@dataclass(frozen=True, slots=True)
class SlotBatch:
    """P -> D, `number` counting from 0: `slot` holds these blocks of the grant, in this order."""

    number: Annotated[int, Bounds(0, 2**62)]
    slot: Annotated[int, Bounds(0, _MAX_SLOTS - 1)]
    handoff: HandoffName
    first_index: Annotated[int, Bounds(0, 2**40)]
    block_ids: BlockIds
    generations: U64s


@dataclass(frozen=True, slots=True)
class SlotTaken:
    """D -> P: the slot of this batch is not read any more, whether its blocks were wanted or not."""

    number: Annotated[int, Bounds(0, 2**62)]


@dataclass(frozen=True, slots=True)
class RingEnd:
    """Either way: the ring is given up. Answers whatever comes without a ring, too."""

    reason: Annotated[str, Length(1024)]


_TO_RECEIVER = Codec(RingHello, SlotBatch, RingEnd)
_TO_SENDER = Codec(SlotTaken, RingEnd)


def _slot_blocks(block_bytes: int) -> int:
    return min(_MAX_SLOT_BLOCKS, max(1, _SLOT_BYTES // block_bytes))


@dataclass(slots=True)
class _Incoming:
    """A sender's ring at D, and the number that its next batch must have."""

    ring: PeerRing
    next_number: int = 0


class SlotsReceiver(GrantedWriter):
    """Takes blocks from the rings of senders into `pool`. `num_refused` counts messages that changed nothing."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], host: str, pool: Pool, settings: links.LinkSettings
    ) -> None:
        super().__init__()
        limits = replace(settings, max_message_bytes=_MAX_FRAME_BYTES)
        self._socket, self._address = links.listen(context, zmq.ROUTER, host, 0, limits)
        self._pool = pool
        self._incoming: dict[bytes, _Incoming] = {}
        self._next_look_s = 0.0

    @property
    def endpoint(self) -> Endpoint:
        """The address of the socket for headers."""
        return Endpoint(NAME, self._address)

    @property
    def num_rings(self) -> int:
        """Rings that are mapped."""
        return len(self._incoming)

    def wait_on(self) -> Sequence[Any]:
        """The socket for headers."""
        return () if self._socket.closed else (self._socket,)

    def poll(self) -> None:
        """See `Receiver.poll`."""
        num_bytes_left = _MAX_POLL_BYTES
        while num_bytes_left > 0 and not self._socket.closed:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            num_bytes_left -= max(self._hear(frames), _MESSAGE_COST_BYTES)
        if (now_s := time.monotonic()) >= self._next_look_s:
            self._next_look_s = now_s + _LOOK_S
            self._drop_ended()

    def close(self) -> None:
        """Stop listening, and unmap every ring."""
        for connection in list(self._incoming):
            self._end(connection, "the receiver was closed")
        self._socket.close()

    def _hear(self, frames: Sequence[bytes]) -> int:
        """One message of a sender; how many bytes were copied for it."""
        connection = frames[0]
        try:
            message = _TO_RECEIVER.decode(frames[1]) if len(frames) == 2 else None
        except BatonError:
            message = None
        incoming = self._incoming.get(connection)
        if isinstance(message, RingHello):
            self._open(connection, message)
        elif isinstance(message, RingEnd) and incoming is not None:
            self._drop(connection)
        elif isinstance(message, SlotBatch) and incoming is not None:
            return self._take(connection, incoming, message)
        else:
            self.num_refused += 1
            if isinstance(message, SlotBatch):
                self._send(connection, RingEnd("there is no ring for this connection"))
        return 0

    def _open(self, connection: bytes, hello: RingHello) -> None:
        is_known = connection in self._incoming
        if is_known or any(other.ring.name == hello.name for other in self._incoming.values()):
            self.num_refused += 1
            if not is_known:
                self._send(connection, RingEnd("this ring belongs to another connection"))
            return
        try:
            if hello.block_bytes != self._pool.block_bytes:
                raise TransferFailed(f"blocks have {hello.block_bytes} bytes there and {self._pool.block_bytes} here")
            if len(self._incoming) >= _MAX_RINGS:
                raise TransferFailed(f"the receiver has {_MAX_RINGS} rings already")
            shape = RingShape(hello.num_slots, hello.slot_blocks, hello.block_bytes)
            self._incoming[connection] = _Incoming(PeerRing(hello.name, shape, self._pool))
        except TransferFailed as error:
            self.num_refused += 1
            self._send(connection, RingEnd(str(error)))

    def _take(self, connection: bytes, incoming: _Incoming, batch: SlotBatch) -> int:
        if batch.number < incoming.next_number:
            self.num_refused += 1  # doubled: its slot has been acknowledged, and may hold other blocks now
            return 0
        shape, num_blocks = incoming.ring.shape, len(batch.block_ids)
        is_possible = batch.slot < shape.num_slots and 0 < num_blocks <= shape.slot_blocks
        if batch.number > incoming.next_number or not is_possible or len(batch.generations) != num_blocks:
            self.num_refused += 1
            self._end(connection, "the sender's headers do not fit together")
            return 0
        incoming.next_number += 1
        key, num_bytes = batch.handoff.key, 0
        if self._announced.may_write(key, batch.first_index, batch.block_ids, batch.generations):
            payload = incoming.ring.slots[batch.slot, :num_blocks]
            num_bytes = payload.nbytes
            self._pool.write(batch.block_ids, payload, is_direct=incoming.ring.is_direct)
            # before anybody hears of it: P may use the slot again then, and the engine the blocks
            self._pool.settle()
            self._announced.arrived(key, batch.first_index, num_blocks)
        else:
            self.num_refused += 1
        if not self._send(connection, SlotTaken(batch.number)):
            self._drop(connection)
        return num_bytes

    def _drop_ended(self) -> None:
        for connection, incoming in list(self._incoming.items()):
            if incoming.ring.has_ended():
                _log.info("a sender has ended, its ring is unmapped")
                self._end(connection, "the ring was closed")

    def _send(self, connection: bytes, message: SlotTaken | RingEnd) -> bool:
        """False: the sender is gone, or takes nothing."""
        try:
            self._socket.send_multipart([connection, _TO_SENDER.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def _end(self, connection: bytes, reason: str) -> None:
        self._send(connection, RingEnd(reason))
        self._drop(connection)

    def _drop(self, connection: bytes) -> None:
        self._incoming.pop(connection).ring.close()


class SlotsSender:
    """Sends blocks of `pool` to the receiver at a peer's endpoint, through a ring of at most `ring_bytes`.

    Raises `TransferFailed` for a bad address, or when there is no shared memory. `num_refused` counts answers that
    changed nothing.
    """

    is_silent = False
    pushes_parts = False
    needs_fence = False
    writer: ProcessIdentity | None = None

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: Endpoint,
        pool: Pool,
        settings: links.LinkSettings,
        ring_bytes: int = _RING_BYTES,
    ) -> None:
        slot_blocks = _slot_blocks(pool.block_bytes)
        num_slots = min(_MAX_SLOTS, max(2, ring_bytes // (slot_blocks * pool.block_bytes)))
        self._shape = RingShape(num_slots, slot_blocks, pool.block_bytes)
        self.piece_bytes = slot_blocks * pool.block_bytes
        self.num_refused = 0
        self._pool = pool
        self._free = deque(range(num_slots))
        self._under_way: dict[int, int] = {}
        self._num_sent = 0
        self._is_connected = False
        self._is_greeted = False
        self._failure = ""
        self._ring = OwnRing(self._shape, pool)
        self._socket = links.open_socket(context, zmq.DEALER, replace(settings, max_message_bytes=_MAX_FRAME_BYTES))
        # nothing is queued for a receiver that does not answer
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        try:
            links.connect(self._socket, links.parse_address(endpoint.address, "peer endpoint"), settings)
        except (InvalidSetting, zmq.ZMQError) as error:
            self.close()
            raise TransferFailed(f"the peer's endpoint cannot be dialled: {error}") from None

    @property
    def num_free_slots(self) -> int:
        """Slots that are not under way."""
        return len(self._free)

    def push(self, key: RequestKey, moves: Sequence[Move]) -> bool:
        """See `Sender.push`. False also as long as there is no connection. Raises `ValueError` for more than a ring."""
        self.poll()
        if not moves:
            return True
        pieces = self._pieces(moves)
        if len(pieces) > self._shape.num_slots:
            raise ValueError(f"{len(moves)} blocks do not fit a ring of {self._shape.num_slots} slots")
        if not self._is_greeted or len(pieces) > len(self._free):
            return False
        for piece in pieces:
            slot = self._free.popleft()
            # copied before the header leaves: from then on the slot is the receiver's
            self._pool.read([move.source for move in piece], self._ring.slots[slot, : len(piece)])
            self._under_way[self._num_sent] = slot
            self._send(
                SlotBatch(
                    number=self._num_sent,
                    slot=slot,
                    handoff=HandoffName(*key),
                    first_index=piece[0].index,
                    block_ids=tuple(move.target for move in piece),
                    generations=tuple(move.generation for move in piece),
                )
            )
            self._num_sent += 1
        return True

    def push_part(self, key: RequestKey, moves: Sequence[Move], begin_byte: int, end_byte: int) -> None:
        """Not here: see `pushes_parts`."""
        raise NotImplementedError

    def poll(self) -> None:
        """See `Sender.poll`."""
        for event in self._connection_events():
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._is_connected = True
            elif self._is_connected:
                self._failure = self._failure or "the connection to the receiver broke"
        if self._is_connected and not self._is_greeted and not self._failure:
            self._greet()
        while not self._failure and not self._socket.closed:
            try:
                self._hear(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                break
        if self._failure:
            raise TransferFailed(self._failure)

    def wait_on(self) -> Sequence[Any]:
        """The socket for headers, and whatever tells that the connection was made or broke."""
        return () if self._socket.closed else (self._socket, self._monitor)

    def is_reading(self, key: RequestKey) -> bool:
        """Never after `push`: what is under way are copies, which the receiver writes only where they are granted."""
        return False

    def close(self) -> None:
        """Give up the connection and the ring."""
        if self._socket.closed:
            return
        self._failure = self._failure or "the sender is closed"
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send(_TO_RECEIVER.encode(RingEnd("the sender was closed")), zmq.NOBLOCK)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._ring.close()

    def _pieces(self, moves: Sequence[Move]) -> list[Sequence[Move]]:
        """`moves` cut into batches: neighbours in the grant, not more than a slot holds."""
        pieces: list[Sequence[Move]] = []
        first = 0
        indexes = [move.index for move in moves]
        for run in coalesce(indexes, indexes, self._shape.slot_blocks):
            pieces.append(moves[first : first + run.count])
            first += run.count
        return pieces

    def _greet(self) -> None:
        shape = self._shape
        hello = RingHello(self._ring.name, shape.num_slots, shape.slot_blocks, shape.block_bytes)
        # the socket may hear of its connection a moment after the monitor
        with contextlib.suppress(zmq.Again):
            self._socket.send(_TO_RECEIVER.encode(hello), zmq.NOBLOCK)
            self._is_greeted = True

    def _hear(self, frame: bytes) -> None:
        try:
            message = _TO_SENDER.decode(frame)
        except BatonError as error:
            self._failure = f"the receiver sent something else than a message of this protocol: {error}"
            return
        if isinstance(message, RingEnd):
            self._failure = message.reason
        elif (slot := self._under_way.pop(message.number, None)) is not None:
            self._free.append(slot)
        else:
            self.num_refused += 1  # a slot is free once, however often it is said

    def _send(self, message: SlotBatch) -> None:
        try:
            self._socket.send(_TO_RECEIVER.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._failure = f"the receiver takes no more headers: {error}"
            raise TransferFailed(self._failure) from None

    def _connection_events(self) -> Iterator[int]:
        while not self._monitor.closed:
            try:
                frames = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield parse_monitor_message(frames)["event"]
