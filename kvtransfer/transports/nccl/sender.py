"""P's side of the "nccl" transport towards one receiver.

Owns the socket for headers and the numbers of messages; its pair's thread reads the pool and sends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import torch
import zmq

from baton.kvtransfer.mailbox import Mailbox
from baton.kvtransfer.messages import Endpoint, HandoffName, ProcessIdentity
from baton.kvtransfer.runs import grant_pieces
from baton.kvtransfer.transports.base import Blocks, Move
from baton.kvtransfer.transports.nccl.blocks import max_piece_blocks, piece_bytes, pool_tensor
from baton.kvtransfer.transports.nccl.group import backend_of
from baton.kvtransfer.transports.nccl.line import Ended, News, Sent, Standing
from baton.kvtransfer.transports.nccl.outgoing import OutgoingPair, Piece
from baton.kvtransfer.transports.nccl.wire import (
    MAX_FRAME_BYTES,
    TO_RECEIVER,
    TO_SENDER,
    BlockBatch,
    PairEnd,
    PairHello,
)
from baton.kvtransfer.transports.zmq_sockets import dial
from baton.wire import links
from baton.wire.errors import BatonError, TransferFailed
from baton.wire.request_key import RequestKey

_MAX_UNSENT = 8


class NcclSender:
    """Sends blocks of `blocks` to the receiver at a peer's endpoint.

    The group is formed at the first push. Raises `TransferFailed` for an address that cannot be dialled,
    `InvalidSetting` when torch lacks the backend.
    """

    is_silent = False
    pushes_parts = False
    needs_fence = False
    writers: Sequence[ProcessIdentity] = ()

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
        self._socket = links.open_socket(context, zmq.DEALER, replace(settings, max_message_bytes=MAX_FRAME_BYTES))
        try:
            self._receiver_host = urlsplit(dial(self._socket, endpoint, settings)).hostname or ""
        except TransferFailed:
            self._socket.close()
            raise
        self._news: News = Mailbox()

    def push(self, key: RequestKey, moves: Sequence[Move]) -> bool:
        """Announce the blocks and give them to the pair's thread. False until the group stands, and while too many
        wait."""
        if not moves:
            return True
        self.poll()
        if self._pair is None:
            self._send(PairHello(self._backend, self._pool.shape[1]))
            self._pair = OutgoingPair(self._pool, self._receiver_host, self._news)
        if not self._is_standing or self._num_unsent >= _MAX_UNSENT:
            return False
        for piece in grant_pieces(moves, self._max_blocks):
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

    def push_part(self, key: RequestKey, moves: Sequence[Move], begin_byte: int, end_byte: int) -> None:
        """Raise `NotImplementedError`: see `pushes_parts`."""
        raise NotImplementedError

    def poll(self) -> None:
        """Hear what the receiver and the pair's thread say. Raises `TransferFailed`."""
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
        """Whether the pair's thread may still gather blocks of this handoff: it reads the pool only then."""
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
            message = TO_SENDER.decode(frame)
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
            self._socket.send(TO_RECEIVER.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self._failure = f"the receiver takes no more headers: {error}"
            raise TransferFailed(self._failure) from None
