"""`torch.distributed` point to point: NCCL between pools in GPU memory, gloo between pools in host memory.

Owns a two-rank group for each (prefill node, decode node) pair and the threads that wait for it. Two connections make
a pair: a ZMQ one (encrypted and authenticated with a cluster key) for the group's formation and the headers, and the
group for the blocks. Every message of the group has a number and a header that came before it, so both sides take
messages in the same order.

The pool's memory is never handed to torch.distributed: a sender's thread gathers blocks into a slot, a receiver's
thread receives into a slot, and only the transfer thread copies from there into the pool, in `poll`, what a grant
announces at that moment. So what a library does late, or after an abort, cannot touch a block.

A pair ends as a whole: whatever goes wrong with it (a peer that died, a payload that does not come in `STALL_S`, a
header that cannot be) ends its group, and the peer has to connect anew. What has no pair changes nothing.

Bounds: a few slots per pair and side (see `pair_threads`), `_MAX_PAIRS` pairs, with those whose thread has not ended
yet, `_MAX_WAITING` messages ahead of a receiver. Each wait of a thread has a deadline, and each thread ends with the
main thread of its process.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import torch
import zmq

from kvtransfer.layout import coalesce
from kvtransfer.mailbox import Mailbox
from kvtransfer.messages import Endpoint, HandoffName, ProcessIdentity
from kvtransfer.transports.announced import GrantedWriter
from kvtransfer.transports.base import Blocks, Move
from kvtransfer.transports.nccl.pair_blocks import (
    max_piece_blocks,
    on_stream,
    open_stream,
    piece_bytes,
    pool_tensor,
    scatter,
    settle,
)
from kvtransfer.transports.nccl.pair_group import backend_of
from kvtransfer.transports.nccl.pair_threads import (
    BlockBatch,
    Ended,
    FromPair,
    IncomingPair,
    Landed,
    News,
    OutgoingPair,
    PairAlive,
    PairEnd,
    PairHello,
    Piece,
    Sent,
    Standing,
    StoreEntry,
)
from wire import links
from wire.codec import Codec
from wire.errors import BatonError, InvalidSetting, TransferFailed
from wire.request_key import RequestKey

NAME = "nccl"
_MAX_PAIRS = 64
_MAX_UNSENT = 8
_MAX_WAITING = 1_024
_MAX_PER_POLL = 256
_MAX_LANDED_PER_POLL = 4
_MAX_FRAME_BYTES = 2**17
_log = logging.getLogger(__name__)

_TO_RECEIVER = Codec(PairHello, StoreEntry, BlockBatch, PairAlive, PairEnd)
_TO_SENDER = Codec(StoreEntry, PairEnd)


class NcclReceiver(GrantedWriter):
    """Receives blocks into `blocks`. `num_refused` counts messages that changed nothing.

    Raises `InvalidSetting` when torch lacks the backend, `host` is a wildcard, or it cannot be listened on.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        host: str,
        blocks: Blocks | torch.Tensor,
        settings: links.LinkSettings,
    ) -> None:
        super().__init__()
        _require_dialable(host)
        self._pool = pool_tensor(blocks)
        self._backend = backend_of(self._pool.device)
        self._max_blocks = max_piece_blocks(self._pool)
        self._stream = open_stream(self._pool.device)
        limits = replace(settings, max_message_bytes=_MAX_FRAME_BYTES)
        self._socket, self._address = links.listen(context, zmq.ROUTER, host, 0, limits)
        self._host = host
        self._pairs: dict[bytes, IncomingPair] = {}
        self._leaving: list[IncomingPair] = []
        self._news: News = Mailbox()
        self._untold: deque[FromPair] = deque()

    @property
    def endpoint(self) -> Endpoint:
        """The address of the socket for headers."""
        return Endpoint(NAME, self._address)

    @property
    def num_pairs(self) -> int:
        """Groups that stand or are being formed."""
        return len(self._pairs)

    def wait_on(self) -> Sequence[Any]:
        """The socket for headers, and what the pairs' threads ring."""
        return () if self._socket.closed else (self._socket, self._news.wakeup)

    def poll(self) -> None:
        """See `Receiver.poll`."""
        for _ in range(_MAX_PER_POLL):
            if self._socket.closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._hear(frames)
        self._untold.extend(self._news.take())
        num_landed = 0
        while self._untold and num_landed < _MAX_LANDED_PER_POLL:
            told = self._untold.popleft()
            num_landed += 1 if isinstance(told.item, Landed) else 0
            self._heed(told.connection, told.item)
        if self._untold:
            self._news.wake()

    def close(self) -> None:
        """Stop listening; the threads of pairs end by themselves, at once or when their wait is over."""
        for connection in list(self._pairs):
            self._end(connection, "the receiver was closed")
        self._socket.close()
        self._news.close()

    def _hear(self, frames: Sequence[bytes]) -> None:
        """One message of a sender."""
        connection = frames[0]
        try:
            message = _TO_RECEIVER.decode(frames[1]) if len(frames) == 2 else None
        except BatonError:
            message = None
        pair = self._pairs.get(connection)
        if message is None:
            self.num_refused += 1
        elif isinstance(message, PairHello):
            self._open(connection, message)
        elif pair is None:
            self.num_refused += 1
            self._send(connection, PairEnd("there is no pair for this connection"))
        elif isinstance(message, PairEnd):
            self._drop(connection)
        elif len(pair.line) >= _MAX_WAITING:
            self._end(connection, "the sender is too far ahead")
        elif isinstance(message, BlockBatch):
            self._announce(connection, pair, message)
        else:
            pair.line.put(message)

    def _open(self, connection: bytes, hello: PairHello) -> None:
        if connection in self._pairs:
            self.num_refused += 1
            return
        mine = PairHello(self._backend, self._pool.shape[1])
        self._leaving = [pair for pair in self._leaving if not pair.is_over]
        if hello != mine:
            self._send(connection, PairEnd(f"the sender's pool is {hello}, the receiver's {mine}"))
        elif len(self._pairs) + len(self._leaving) >= _MAX_PAIRS:
            self._send(connection, PairEnd(f"the receiver has {_MAX_PAIRS} pairs already"))
        else:
            self._pairs[connection] = IncomingPair(connection, self._pool, self._host, self._news)

    def _announce(self, connection: bytes, pair: IncomingPair, batch: BlockBatch) -> None:
        """Let the pair's thread receive what `batch` names, whoever expects it: else later messages would shift."""
        if batch.number < pair.next_number:
            self.num_refused += 1
            return
        is_possible = 0 < len(batch.block_ids) <= self._max_blocks and len(batch.generations) == len(batch.block_ids)
        if batch.number > pair.next_number or not is_possible:
            self.num_refused += 1
            self._end(connection, "the sender's headers do not fit together")
            return
        pair.next_number += 1
        pair.line.put(batch)

    def _heed(self, connection: bytes, item: Any) -> None:
        """One thing that a pair's thread told."""
        if isinstance(item, Landed):
            self._write(item)
            if (pair := self._pairs.get(connection)) is not None:
                pair.free_slots.put(item.slot)
        elif connection not in self._pairs:
            return
        elif isinstance(item, Ended):
            _log.warning("a pair of the nccl transport ended: %s", item.reason)
            self._end(connection, item.reason)
        else:
            self._send(connection, item)

    def _write(self, landed: Landed) -> None:
        """Copy into the pool what is expected now."""
        batch = landed.batch
        key, num_blocks = batch.handoff.key, len(batch.block_ids)
        if not self._announced.may_write(key, batch.first_index, batch.block_ids, batch.generations):
            self.num_refused += 1
            return
        with on_stream(self._stream):
            scatter(self._pool, batch.block_ids, landed.slot)
        settle(self._stream)  # 16 MiB at most, and _MAX_LANDED_PER_POLL times in a row: well below a millisecond
        self._announced.arrived(key, batch.first_index, num_blocks)

    def _send(self, connection: bytes, message: Any) -> None:
        # a peer that is gone, or takes nothing, notices by its own deadline
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send_multipart([connection, _TO_SENDER.encode(message)], zmq.NOBLOCK)

    def _end(self, connection: bytes, reason: str) -> None:
        self._send(connection, PairEnd(reason))
        self._drop(connection)

    def _drop(self, connection: bytes) -> None:
        pair = self._pairs.pop(connection)
        pair.stop()
        self._leaving.append(pair)


class NcclSender:
    """Sends blocks of `blocks` to the receiver at a peer's endpoint.

    The group is formed at the first push. Raises `TransferFailed` for an address that cannot be dialled,
    `InvalidSetting` when torch lacks the backend.
    """

    is_silent = False
    pushes_parts = False
    needs_fence = False
    writer: ProcessIdentity | None = None

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: Endpoint,
        blocks: Blocks | torch.Tensor,
        settings: links.LinkSettings,
    ) -> None:
        self._pool = pool_tensor(blocks)
        self._backend = backend_of(self._pool.device)
        self._max_blocks = max_piece_blocks(self._pool)
        self.piece_bytes = piece_bytes(self._pool.device)
        self._pair: OutgoingPair | None = None
        self._is_standing = False
        self._num_numbered = 0
        self._num_unsent = 0
        self._failure = ""
        self._socket = links.open_socket(context, zmq.DEALER, replace(settings, max_message_bytes=_MAX_FRAME_BYTES))
        try:
            address = links.parse_address(endpoint.address, "peer endpoint")
            links.connect(self._socket, address, settings)
        except (InvalidSetting, zmq.ZMQError) as error:
            self._socket.close()
            raise TransferFailed(f"the peer's endpoint cannot be dialled: {error}") from None
        self._receiver_host = urlsplit(address).hostname or ""
        self._news: News = Mailbox()

    def push(self, key: RequestKey, moves: Sequence[Move]) -> bool:
        """See `Sender.push`. False also until the group stands."""
        if not moves:
            return True
        self.poll()
        if self._pair is None:
            self._send(PairHello(self._backend, self._pool.shape[1]))
            self._pair = OutgoingPair(self._pool, self._receiver_host, self._news)
        if not self._is_standing or self._num_unsent >= _MAX_UNSENT:
            return False
        for piece in self._pieces(moves):
            self._send(
                BlockBatch(
                    number=self._num_numbered,
                    handoff=HandoffName(*key),
                    first_index=piece[0].index,
                    block_ids=tuple(move.target for move in piece),
                    generations=tuple(move.generation for move in piece),
                )
            )
            self._pair.give(Piece(key, tuple(move.source for move in piece)))
            self._num_numbered += 1
            self._num_unsent += 1
        return True

    def _pieces(self, moves: Sequence[Move]) -> list[Sequence[Move]]:
        """`moves` cut into messages: neighbours in the grant, not too many."""
        pieces: list[Sequence[Move]] = []
        first = 0
        indices = [move.index for move in moves]
        for run in coalesce(indices, indices, self._max_blocks):
            pieces.append(moves[first : first + run.count])
            first += run.count
        return pieces

    def push_part(self, key: RequestKey, moves: Sequence[Move], begin_byte: int, end_byte: int) -> None:
        """Not here: see `pushes_parts`."""
        raise NotImplementedError

    def poll(self) -> None:
        """See `Sender.poll`."""
        while not self._failure and not self._socket.closed:
            try:
                self._hear(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                break
        for told in self._news.take():
            self._heed(told.item)
        if self._failure:
            raise TransferFailed(self._failure)

    def wait_on(self) -> Sequence[Any]:
        """The socket for headers, and what the pair's thread rings."""
        return () if self._socket.closed else (self._socket, self._news.wakeup)

    def is_reading(self, key: RequestKey) -> bool:
        """See `Sender.is_reading`: the pool is only read while blocks are gathered, and written by nobody else."""
        return self._pair is not None and self._pair.is_reading(key)

    def close(self) -> None:
        """Give up the pair; its thread ends by itself, at once or when its wait is over."""
        if self._socket.closed:
            return
        if self._pair is not None:
            self._pair.stop()
            with contextlib.suppress(TransferFailed):
                self._send(PairEnd("the sender was closed"))
        self._failure = self._failure or "the sender was closed"
        self._socket.close()
        self._news.close()

    def _hear(self, frame: bytes) -> None:
        try:
            message = _TO_SENDER.decode(frame)
        except BatonError as error:
            self._failure = f"the receiver sent something else than a message of this protocol: {error}"
            return
        if isinstance(message, PairEnd):
            self._failure = message.reason
        elif self._pair is not None and not self._is_standing:
            self._pair.line.put(message)

    def _heed(self, item: Any) -> None:
        """One thing that the pair's thread told."""
        if isinstance(item, Standing):
            self._is_standing = True
        elif isinstance(item, Sent):
            self._num_unsent -= 1
        elif isinstance(item, Ended):
            self._failure = self._failure or item.reason
        elif not self._failure:
            with contextlib.suppress(TransferFailed):
                self._send(item)

    def _send(self, message: Any) -> None:
        try:
            self._socket.send(_TO_RECEIVER.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._failure = f"the receiver takes no more headers: {error}"
            raise TransferFailed(self._failure) from None


def _require_dialable(host: str) -> None:
    try:
        is_wildcard = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        is_wildcard = False
    if is_wildcard:
        raise InvalidSetting(
            f"--kv-transport nccl: {host} is no address that a peer can dial, and its group would listen everywhere"
        )
