"""D's side of the "nccl" transport: the pairs of its senders, and the only thread that writes its pool.

Owns the socket for headers and the pairs. What a pair's thread received is copied into the pool in `poll`, as far as a
grant announces it at that moment.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import zmq

from baton.device.choose import open_stream
from baton.kvtransfer.mailbox import Mailbox
from baton.kvtransfer.transports.base import Blocks
from baton.kvtransfer.transports.nccl.blocks import max_piece_blocks, pool_tensor, scatter
from baton.kvtransfer.transports.nccl.group import backend_of
from baton.kvtransfer.transports.nccl.incoming import IncomingPair
from baton.kvtransfer.transports.nccl.line import Ended, FromPair, Landed, News
from baton.kvtransfer.transports.nccl.wire import (
    MAX_FRAME_BYTES,
    NAME,
    TO_RECEIVER,
    TO_SENDER,
    BlockBatch,
    PairEnd,
    PairHello,
)
from baton.kvtransfer.transports.zmq_sockets import ListeningReceiver
from baton.wire import links
from baton.wire.errors import BatonError, InvalidSetting

_MAX_PAIRS = 64
_MAX_WAITING = 1_024
_MAX_PER_POLL = 256
_MAX_LANDED_PER_POLL = 4
_log = logging.getLogger(__name__)


class NcclReceiver(ListeningReceiver):
    """Receives blocks into `blocks`. `num_refused` counts messages that changed nothing.

    Raises `InvalidSetting` when torch lacks the backend, `host` is a wildcard, or it cannot be listened on.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        host: str,
        blocks: Blocks | torch.Tensor,
        settings: links.LinkSettings,
        port: int = 0,
    ) -> None:
        _require_dialable(host)
        limits = replace(settings, max_message_bytes=MAX_FRAME_BYTES)
        self._pool = pool_tensor(blocks)
        self._backend = backend_of(self._pool.device)
        self._max_blocks = max_piece_blocks(self._pool)
        self._stream = open_stream(self._pool.device)
        super().__init__(NAME, context, zmq.ROUTER, host, limits, port)
        self._host = host
        self._pairs: dict[bytes, IncomingPair] = {}
        self._leaving: list[IncomingPair] = []
        self._news: News = Mailbox()
        self._untold: deque[FromPair] = deque()

    @property
    def num_pairs(self) -> int:
        """The number of groups that stand or are being formed."""
        return len(self._pairs)

    def wait_on(self) -> Sequence[Any]:
        """The socket for headers, and what the pairs' threads ring."""
        return () if self._socket.closed else (self._socket, self._news.wakeup)

    def poll(self) -> None:
        """Read headers from peers and news of the pairs' threads, and copy what was announced into the pool."""
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
            message = TO_RECEIVER.decode(frames[1]) if len(frames) == 2 else None
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
        self._stream.run(lambda: scatter(self._pool, batch.block_ids, landed.slot))
        self._stream.synchronize()  # 16 MiB at most, and _MAX_LANDED_PER_POLL times in a row: well below a millisecond
        self._announced.arrived(key, batch.first_index, num_blocks)

    def _send(self, connection: bytes, message: Any) -> None:
        # a peer that is gone, or takes nothing, notices by its own deadline
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send_multipart([connection, TO_SENDER.encode(message)], zmq.NOBLOCK)

    def _end(self, connection: bytes, reason: str) -> None:
        self._send(connection, PairEnd(reason))
        self._drop(connection)

    def _drop(self, connection: bytes) -> None:
        pair = self._pairs.pop(connection)
        pair.stop()
        self._leaving.append(pair)


def _require_dialable(host: str) -> None:
    try:
        is_wildcard = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        is_wildcard = False
    if is_wildcard:
        raise InvalidSetting(
            f"--kv-transport nccl: {host} is no address that a peer can dial, and its group would listen everywhere"
        )
