"""D's side of `shm_slots`: takes blocks out of the slots that senders filled.

Owns the rings of its senders. D writes its pool by itself, and only blocks that a grant announced, with their current
generation, each once. What is late, doubled, foreign or malformed changes nothing and is counted; a sender whose
headers do not follow each other, or name a slot that its ring does not have, loses its ring and has to connect anew.

Bounds: `_MAX_RINGS` rings. A ring ends with its connection; that of a sender that died is noticed by its lock, within
`_LOOK_S`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import zmq

from baton.kvtransfer.pools.base import KvPool
from baton.kvtransfer.transports.inlets import Inlet, Inlets, WholeOnly
from baton.kvtransfer.transports.shm.ring import PeerRing, RingShape
from baton.kvtransfer.transports.shm.slots_wire import (
    MAX_FRAME_BYTES,
    NAME,
    TO_RECEIVER,
    TO_SENDER,
    RingEnd,
    RingHello,
    SlotBatch,
    SlotTaken,
)
from baton.kvtransfer.transports.zmq_sockets import ListeningReceiver
from baton.wire import links
from baton.wire.errors import BatonError, TransferFailed

_MAX_RINGS = 64
_MAX_POLL_BYTES = 16 * 2**20
_MESSAGE_COST_BYTES = 2**16
"""What a message counts for at least in `_MAX_POLL_BYTES`."""
_LOOK_S = 1.0
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Incoming:
    """A sender's ring at D, where its blocks go, and the number that its next batch must have."""

    ring: PeerRing
    inlet: Inlet
    next_number: int = 0


class SlotsReceiver(ListeningReceiver):
    """Takes blocks from the rings of senders into `pool`, as `inlets` say. `num_refused` counts messages that changed
    nothing, `num_bytes` what was written."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        host: str,
        pool: KvPool,
        settings: links.LinkSettings,
        port: int = 0,
        inlets: Inlets | None = None,
    ) -> None:
        limits = replace(settings, max_message_bytes=MAX_FRAME_BYTES)
        super().__init__(NAME, context, zmq.ROUTER, host, limits, port)
        self.num_bytes = 0
        self._pool = pool
        self._inlets = inlets or WholeOnly(pool)
        self._incoming: dict[bytes, _Incoming] = {}
        self._next_look_s = 0.0

    @property
    def num_rings(self) -> int:
        """Rings that are mapped."""
        return len(self._incoming)

    def poll(self) -> None:
        """Read headers, at most `_MAX_POLL_BYTES` of blocks, and copy what was granted from slots into the pool."""
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
            message = TO_RECEIVER.decode(frames[1]) if len(frames) == 2 else None
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
        inlet = self._inlets.of(hello.source)
        try:
            if inlet is None:
                raise TransferFailed("the sender has nothing of these blocks")
            if hello.block_bytes != inlet.sink.block_bytes:
                raise TransferFailed(f"blocks have {hello.block_bytes} bytes there and {inlet.sink.block_bytes} here")
            if len(self._incoming) >= _MAX_RINGS:
                raise TransferFailed(f"the receiver has {_MAX_RINGS} rings already")
            shape = RingShape(hello.num_slots, hello.slot_blocks, hello.block_bytes)
            self._incoming[connection] = _Incoming(PeerRing(hello.name, shape, self._pool), inlet)
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
        try:
            incoming.ring.require_whole()
        except TransferFailed as error:
            self.num_refused += 1
            self._end(connection, str(error))
            return 0
        incoming.next_number += 1
        key, num_bytes, inlet = batch.handoff.key, 0, incoming.inlet
        if self._announced.may_write(key, batch.first_index, batch.block_ids, batch.generations, inlet.source):
            payload = incoming.ring.slots[batch.slot, :num_blocks]
            num_bytes = payload.nbytes
            inlet.sink.write(batch.block_ids, payload, is_direct=incoming.ring.is_direct)
            # before anybody hears of it: P may use the slot again then, and the engine the blocks
            inlet.sink.settle()
            self.num_bytes += num_bytes
            self._announced.arrived(key, batch.first_index, num_blocks, inlet.source, inlet.sources)
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
            self._socket.send_multipart([connection, TO_SENDER.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def _end(self, connection: bytes, reason: str) -> None:
        self._send(connection, RingEnd(reason))
        self._drop(connection)

    def _drop(self, connection: bytes) -> None:
        self._incoming.pop(connection).ring.close()
