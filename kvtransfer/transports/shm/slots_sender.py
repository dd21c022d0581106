"""P's side of `shm_slots` towards one receiver: fills slots and says so.

Owns the ring, and which of its slots are in flight.

Bounds: `RING_BYTES` (or two blocks). A receiver that takes nothing leaves no free slot: `push` says "not now", and its
caller counts the time.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import zmq

from baton.kvtransfer.messages import Endpoint, HandoffName, ProcessIdentity
from baton.kvtransfer.pools.base import BlockSource
from baton.kvtransfer.runs import grant_pieces
from baton.kvtransfer.transports.base import Move
from baton.kvtransfer.transports.shm.ring import OwnRing, RingShape
from baton.kvtransfer.transports.shm.slots_wire import (
    MAX_FRAME_BYTES,
    MAX_SLOT_BLOCKS,
    MAX_SLOTS,
    TO_RECEIVER,
    TO_SENDER,
    RingEnd,
    RingHello,
    SlotBatch,
)
from baton.kvtransfer.transports.zmq_sockets import Connection
from baton.wire import links
from baton.wire.errors import BatonError, TransferFailed
from baton.wire.kv_shard import KvShard
from baton.wire.request_key import RequestKey

_SLOT_BYTES = 4 * 2**20
RING_BYTES = 64 * 2**20


def slot_blocks_of(block_bytes: int) -> int:
    """How many blocks of that size a slot holds."""
    return min(MAX_SLOT_BLOCKS, max(1, _SLOT_BYTES // block_bytes))


class SlotsSender:
    """Sends blocks of `pool` to the receiver at a peer's endpoint, through a ring of at most `ring_bytes`.

    `source`: its blocks are what this rank has of them for that receiver; None: whole ones. Raises `TransferFailed` for
    a bad address, or when there is no shared memory. `num_refused` counts answers that
    changed nothing.
    """

    is_silent = False
    pushes_parts = False
    needs_fence = False
    writers: Sequence[ProcessIdentity] = ()

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: Endpoint,
        pool: BlockSource,
        settings: links.LinkSettings,
        ring_bytes: int = RING_BYTES,
        source: KvShard | None = None,
    ) -> None:
        slot_blocks = slot_blocks_of(pool.block_bytes)
        num_slots = min(MAX_SLOTS, max(2, ring_bytes // (slot_blocks * pool.block_bytes)))
        self._shape = RingShape(num_slots, slot_blocks, pool.block_bytes)
        self.piece_bytes = slot_blocks * pool.block_bytes
        self.num_refused = 0
        self._pool, self._source = pool, source
        self._free = deque(range(num_slots))
        self._in_flight: dict[int, int] = {}
        self._num_sent = 0
        self._is_greeted = False
        self._failure = ""
        self._ring = OwnRing(self._shape, pool)
        limits = replace(settings, max_message_bytes=MAX_FRAME_BYTES)
        try:
            self._connection = Connection(context, zmq.DEALER, endpoint, limits)
        except TransferFailed:
            self._ring.close()
            raise

    @property
    def num_free_slots(self) -> int:
        """Slots whose blocks are not in flight."""
        return len(self._free)

    def push(self, key: RequestKey, moves: Sequence[Move]) -> bool:
        """Copy the blocks into free slots and say so. False without a connection or a free slot. Raises `ValueError`
        for more than a ring, and `TransferFailed`."""
        self.poll()
        if not moves:
            return True
        pieces = grant_pieces(moves, self._shape.slot_blocks)
        if len(pieces) > self._shape.num_slots:
            raise ValueError(f"{len(moves)} blocks do not fit a ring of {self._shape.num_slots} slots")
        if not self._is_greeted or len(pieces) > len(self._free):
            return False
        for piece in pieces:
            slot = self._free.popleft()
            # copied before the header leaves: from then on the slot is the receiver's
            self._pool.read([move.source for move in piece], self._ring.slots[slot, : len(piece)])
            self._in_flight[self._num_sent] = slot
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
        """Raise `NotImplementedError`: see `pushes_parts`."""
        raise NotImplementedError

    def poll(self) -> None:
        """Hear which slots are free again, and greet a receiver that is new. Raises `TransferFailed`."""
        self._connection.watch()
        if self._connection.has_broken:
            self._failure = self._failure or "the connection to the receiver broke"
        if self._connection.is_made and not self._is_greeted and not self._failure:
            self._greet()
        while not self._failure and not self._connection.is_closed:
            try:
                self._hear(self._connection.socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                break
        if self._failure:
            raise TransferFailed(self._failure)

    def wait_on(self) -> Sequence[Any]:
        """The socket for headers, and whatever tells that the connection was made or broke."""
        return () if self._connection.is_closed else (self._connection.socket, self._connection.monitor)

    def is_reading(self, key: RequestKey) -> bool:
        """False: after `push` only copies are in flight, which the receiver writes only where they are granted."""
        return False

    def close(self) -> None:
        """Give up the connection and the ring."""
        if self._connection.is_closed:
            return
        self._failure = self._failure or "the sender is closed"
        with contextlib.suppress(zmq.ZMQError):
            self._connection.socket.send(TO_RECEIVER.encode(RingEnd("the sender was closed")), zmq.NOBLOCK)
        self._connection.close()
        self._ring.close()

    def _greet(self) -> None:
        shape = self._shape
        hello = RingHello(self._ring.name, shape.num_slots, shape.slot_blocks, shape.block_bytes, self._source)
        # the socket may hear of its connection a moment after the monitor
        with contextlib.suppress(zmq.Again):
            self._connection.socket.send(TO_RECEIVER.encode(hello), zmq.NOBLOCK)
            self._is_greeted = True

    def _hear(self, frame: bytes) -> None:
        try:
            message = TO_SENDER.decode(frame)
        except BatonError as error:
            self._failure = f"the receiver sent something else than a message of this protocol: {error}"
            return
        if isinstance(message, RingEnd):
            self._failure = message.reason
        elif (slot := self._in_flight.pop(message.number, None)) is not None:
            self._free.append(slot)
        else:
            self.num_refused += 1  # a slot is free once, however often it is said

    def _send(self, message: SlotBatch) -> None:
        try:
            self._connection.socket.send(TO_RECEIVER.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._failure = f"the receiver takes no more headers: {error}"
            raise TransferFailed(self._failure) from None
