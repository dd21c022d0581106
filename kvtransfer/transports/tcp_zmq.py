"""Between hosts: blocks as ZMQ messages over TCP.

Owns the data sockets. A push is one message: a header frame (which handoff, which blocks and generations), then frames
with their bytes. Those of a pool in host memory are the pool itself, one per run of neighbouring blocks: ZMQ reads them
when the connection has room, and reports when it has read them. Those of a pool in device memory are slots that the
blocks were copied to; the blocks are free at once, a slot when ZMQ has read it. The receiver looks at the whole message
before it writes a byte of it, and writes only blocks that a grant announced, with their current generation, each once:
a late, doubled, foreign or malformed message changes nothing and is counted.

Bounds: a sender has at most `_MAX_UNREAD_BYTES` in flight (or one push), and no more than its outlet lends; a receiver
queues at most `_MAX_QUEUED_MESSAGES` per connection, `_PIECE_BYTES` (or one block) each, and no frame larger than that
is taken. What libzmq cannot bound: a message of very many frames. Only who holds the cluster key, or sits on this host,
can send one.

Where ranks have pools of their own, each rank of D listens, and each rank of P that has some of its bytes sends it
just these: the header says whose they are, and both compute which bytes that means (`baton.kvtransfer.parts`).

A connection that breaks loses what was in flight on it, so the sender says `TransferFailed` and is of no use any
more. Encrypted when a cluster key is set.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np
import zmq

from baton.kvtransfer.messages import Endpoint, HandoffName, ProcessIdentity
from baton.kvtransfer.pools.base import BlockSource, KvPool, Lent
from baton.kvtransfer.transports.base import Move
from baton.kvtransfer.transports.inlets import Inlet, Inlets, WholeOnly
from baton.kvtransfer.transports.zmq_sockets import Connection, ListeningReceiver
from baton.wire import links
from baton.wire.codec import BlockIds, Bounds, Codec, U64s
from baton.wire.errors import BatonError, TransferFailed
from baton.wire.kv_shard import KvShard
from baton.wire.request_key import RequestKey

NAME = "zmq"
_PIECE_BYTES = 2**20
_MAX_QUEUED_MESSAGES = 32
_MAX_UNREAD_BYTES = 32 * 2**20
_MAX_POLL_BYTES = 8 * 2**20
_FRAME_COST_BYTES = 2**14
"""What a frame counts for at least in `_MAX_POLL_BYTES`: small ones cost time too."""


@dataclass(frozen=True, slots=True)
class BlockBatch:
    """Header of a data message: the frames after it are the bytes of these blocks of the grant, in this order.

    `source`: they are what this rank has of them for the rank that it sends to; None: all of them.
    """

    handoff: HandoffName
    first_index: Annotated[int, Bounds(0, 2**40)]
    block_ids: BlockIds
    generations: U64s
    source: KvShard | None = None


_HEADERS = Codec(BlockBatch)


def _max_frame_bytes(block_bytes: int) -> int:
    return max(_PIECE_BYTES, block_bytes)


@dataclass(slots=True)
class _Incoming:
    """A message of which some frames were taken. `batch` is None once it is known to be no good."""

    batch: BlockBatch | None
    inlet: Inlet
    frames: list[zmq.Frame] = field(default_factory=list)
    num_missing_bytes: int = 0


class ZmqReceiver(ListeningReceiver):
    """Listens for blocks and writes them into `pool`, as `inlets` say. `num_refused` counts messages that changed
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
        limits = replace(
            settings,
            max_message_bytes=_max_frame_bytes(pool.block_bytes) + 64,
            max_queued_messages=_MAX_QUEUED_MESSAGES,
        )
        super().__init__(NAME, context, zmq.PULL, host, limits, port)
        self.num_bytes = 0
        self._inlets = inlets or WholeOnly(pool)
        self._nowhere = Inlet(pool)
        self._incoming: _Incoming | None = None

    def poll(self) -> None:
        """Read messages, at most `_MAX_POLL_BYTES`, and write what was granted into the pool."""
        num_bytes_left = _MAX_POLL_BYTES
        while num_bytes_left > 0 and not self._socket.closed:
            try:
                frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            num_bytes_left -= max(len(frame), _FRAME_COST_BYTES)
            self._take(frame)

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()

    def _take(self, frame: zmq.Frame) -> None:
        """One more frame of the message that is coming in, or the first of the next."""
        incoming = self._incoming
        if incoming is None:
            incoming = self._incoming = self._opened(frame)
        elif incoming.batch is not None:
            incoming.frames.append(frame)
            incoming.num_missing_bytes -= len(frame)
            if len(frame) % incoming.inlet.sink.block_bytes or incoming.num_missing_bytes < 0:
                incoming.batch = None
                incoming.frames.clear()
        if not frame.more:
            self._incoming = None
            self._finish(incoming)

    def _opened(self, frame: zmq.Frame) -> _Incoming:
        """A message by its header frame."""
        try:
            batch: BlockBatch = _HEADERS.decode(frame.bytes)
        except BatonError:
            return _Incoming(None, self._nowhere)
        inlet = self._inlets.of(batch.source)
        if inlet is None or not self._may_write(batch, inlet):
            return _Incoming(None, self._nowhere)
        return _Incoming(batch, inlet, num_missing_bytes=len(batch.block_ids) * inlet.sink.block_bytes)

    def _finish(self, incoming: _Incoming) -> None:
        """Write a message's blocks; until here nothing of it has touched the pool."""
        batch, inlet = incoming.batch, incoming.inlet
        # asked again: between two polls its handoff may have been forgotten
        if batch is None or incoming.num_missing_bytes or not self._may_write(batch, inlet):
            self.num_refused += 1
            return
        first = 0
        for frame in incoming.frames:
            payload = np.frombuffer(frame.buffer, dtype=np.uint8).reshape(-1, inlet.sink.block_bytes)
            inlet.sink.write(batch.block_ids[first : first + len(payload)], payload)
            first += len(payload)
        # waited for at once: what is forgotten a moment later must not be written any more
        inlet.sink.settle()
        self.num_bytes += first * inlet.sink.block_bytes
        key, first_index = batch.handoff.key, batch.first_index
        self._announced.arrived(key, first_index, len(batch.block_ids), inlet.source, inlet.sources)

    def _may_write(self, batch: BlockBatch, inlet: Inlet) -> bool:
        key, first_index = batch.handoff.key, batch.first_index
        return self._announced.may_write(key, first_index, batch.block_ids, batch.generations, inlet.source)


@dataclass(frozen=True, slots=True)
class _Unread:
    """A push that ZMQ may still read."""

    key: RequestKey
    num_bytes: int
    lent: Lent
    trackers: Sequence[zmq.MessageTracker]

    @property
    def is_over(self) -> bool:
        return all(tracker.done for tracker in self.trackers)


class ZmqSender:
    """Sends blocks of `pool` to the receiver at a peer's endpoint. `source`: they are what this rank has for that
    receiver; None: whole ones. Raises `TransferFailed` for a bad address."""

    is_silent = False
    pushes_parts = False
    needs_fence = False
    piece_bytes = _PIECE_BYTES
    writers: Sequence[ProcessIdentity] = ()

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: Endpoint,
        pool: BlockSource,
        settings: links.LinkSettings,
        source: KvShard | None = None,
    ) -> None:
        self._source = source
        self._block_bytes = pool.block_bytes
        self._outlet = pool.outlet(_max_frame_bytes(pool.block_bytes) // pool.block_bytes)
        self._unread: deque[_Unread] = deque()
        self._num_pushes: Counter[RequestKey] = Counter()
        self._num_unread_bytes = 0
        self._failure = ""
        limits = replace(settings, max_queued_messages=_MAX_QUEUED_MESSAGES)
        self._connection = Connection(context, zmq.PUSH, endpoint, limits)

    def push(self, key: RequestKey, moves: Sequence[Move]) -> bool:
        """Send the blocks as one message; `moves` are neighbours in the grant. False without a connection or room in
        it. Raises `TransferFailed`."""
        if self._connection.is_closed:
            raise TransferFailed("the sender is closed")
        self.poll()
        num_bytes = len(moves) * self._block_bytes
        if not moves:
            return True
        if self._unread and self._num_unread_bytes + num_bytes > _MAX_UNREAD_BYTES:
            return False
        if not self._outlet.has_room(len(moves)):
            return False
        header = BlockBatch(
            handoff=HandoffName(*key),
            first_index=moves[0].index,
            block_ids=tuple(move.target for move in moves),
            generations=tuple(move.generation for move in moves),
            source=self._source,
        )
        try:
            self._connection.socket.send(_HEADERS.encode(header), zmq.NOBLOCK | zmq.SNDMORE)
        except zmq.Again:
            return False
        # a message that was begun has to be ended: if its blocks cannot be read, this sender is of no use any more
        lent = self._outlet.lend([move.source for move in moves])
        self._num_pushes[key] += lent.is_pool
        self._num_unread_bytes += num_bytes
        trackers: list[zmq.MessageTracker] = []
        self._unread.append(_Unread(key, num_bytes, lent, trackers))
        for place, frame in enumerate(lent.frames):
            flags = zmq.NOBLOCK if place == len(lent.frames) - 1 else zmq.NOBLOCK | zmq.SNDMORE
            try:
                trackers.append(self._connection.socket.send(frame.data, flags, copy=False, track=True))
            except zmq.Again:  # a message that was begun is never too much: its connection is gone
                self._failure = "the connection to the receiver broke"
                raise TransferFailed(self._failure) from None
        return True

    def push_part(self, key: RequestKey, moves: Sequence[Move], begin_byte: int, end_byte: int) -> None:
        """Raise `NotImplementedError`: see `pushes_parts`."""
        raise NotImplementedError

    def poll(self) -> None:
        """Drop messages that ZMQ has sent. Raises `TransferFailed` when the connection broke."""
        self._drop_what_is_over()
        self._connection.watch()
        if self._connection.has_broken:
            self._failure = "the connection to the receiver broke"
        if self._failure:
            raise TransferFailed(self._failure)

    def wait_on(self) -> Sequence[Any]:
        """The sockets that tell that the connection was made or broke. That ZMQ has read something is noticed in
        `poll`."""
        return () if self._connection.is_closed else (self._connection.monitor,)

    def is_reading(self, key: RequestKey) -> bool:
        """Whether ZMQ may still read blocks of this handoff. Those that were copied out of the pool are not read any
        more."""
        self._drop_what_is_over()
        return self._num_pushes[key] > 0

    def close(self) -> None:
        """Drop the connection and whatever is still queued on it."""
        self._connection.close()

    def _drop_what_is_over(self) -> None:
        while self._unread and self._unread[0].is_over:
            over = self._unread.popleft()
            self._num_unread_bytes -= over.num_bytes
            over.lent.give_back()
            self._num_pushes[over.key] -= over.lent.is_pool
            if not self._num_pushes[over.key]:
                del self._num_pushes[over.key]
