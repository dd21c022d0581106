"""Between hosts: blocks as ZMQ messages over TCP.

Owns the data sockets. A message is a header frame (which handoff, which blocks and generations) and a frame with their
bytes. The receiver writes only blocks that a grant announced, with their current generation, each once: a late, doubled
or foreign message changes nothing.

Bounds: a message holds at most `_MAX_MESSAGE_BYTES` of blocks (or one block), and at most `_MAX_QUEUED` messages wait
on either side. Encrypted when a cluster key is set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import zmq

from engine.api import links
from engine.api.codec import BlockIds, Bounds, Codec, U64s
from engine.api.errors import BatonError, InvalidSetting, TransferFailed
from kvtransfer.messages import Endpoint, HandoffKey, HandoffName
from kvtransfer.transports.announced import AnnouncedBlocks
from kvtransfer.transports.base import Blocks, Move

NAME = "zmq"
_MAX_MESSAGE_BYTES = 2**20
_MAX_QUEUED = 32
_MAX_PER_POLL = 64
_SEND_TIMEOUT_MS = 5_000


@dataclass(frozen=True, slots=True)
class BlockBatch:
    """Header of a data message: the frames after it are the bytes of these blocks of the grant, in this order."""

    handoff: HandoffName
    first_index: Annotated[int, Bounds(0, 2**40)]
    block_ids: BlockIds
    generations: U64s


_HEADERS = Codec(BlockBatch)


class ZmqReceiver:
    """Listens for blocks and writes them into `blocks`. `num_refused` counts messages that no grant announced."""

    peers_write = False

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], host: str, blocks: Blocks, settings: links.LinkSettings
    ) -> None:
        limits = replace(
            settings,
            max_message_bytes=max(_MAX_MESSAGE_BYTES, blocks.shape[1]) + 64,
            max_queued_messages=_MAX_QUEUED,
        )
        self.socket: zmq.Socket[bytes] | None = links.open_socket(context, zmq.PULL, limits)
        try:
            self._address = links.bind(self.socket, host, 0, limits)
        except InvalidSetting:
            self.socket.close()
            raise
        self._blocks = blocks
        self._announced = AnnouncedBlocks()
        self.num_refused = 0

    @property
    def endpoint(self) -> Endpoint:
        """The data socket's address."""
        return Endpoint(NAME, self._address)

    def expect(self, key: HandoffKey, block_ids: Sequence[int], generations: Sequence[int]) -> None:
        """See `Receiver.expect`."""
        self._announced.expect(key, block_ids, generations)

    def forget(self, key: HandoffKey) -> None:
        """See `Receiver.forget`."""
        self._announced.forget(key)

    def num_missing(self, key: HandoffKey) -> int:
        """See `Receiver.num_missing`."""
        return self._announced.num_missing(key)

    def poll(self) -> None:
        """See `Receiver.poll`."""
        for _ in range(_MAX_PER_POLL):
            if self.socket is None:
                return
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            if not self._accept(frames):
                self.num_refused += 1

    def _accept(self, frames: Sequence[zmq.Frame]) -> bool:
        """Write one message's blocks; False when it is not what a grant announced."""
        try:
            batch = _HEADERS.decode(frames[0].bytes)
        except BatonError:
            return False
        key = batch.handoff.key
        payload = [np.frombuffer(frame.buffer, dtype=np.uint8) for frame in frames[1:]]
        is_announced = self._announced.may_write(key, batch.first_index, batch.block_ids, batch.generations)
        if not is_announced or not self._fits(payload, len(batch.block_ids)):
            return False
        block_ids = iter(batch.block_ids)
        for run in payload:
            for block in run.reshape(-1, self._blocks.shape[1]):
                self._blocks[next(block_ids)] = block
        self._announced.arrived(key, batch.first_index, len(batch.block_ids))
        return True

    def _fits(self, payload: Sequence[Blocks], num_blocks: int) -> bool:
        block_bytes = self._blocks.shape[1]
        sizes = [run.size for run in payload]
        return all(size % block_bytes == 0 for size in sizes) and sum(sizes) == num_blocks * block_bytes

    def close(self) -> None:
        """Stop listening."""
        if self.socket is not None:
            self.socket.close()
            self.socket = None


class ZmqSender:
    """Sends blocks of `blocks` to the receiver at a peer's endpoint. Raises `TransferFailed` for a bad address."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: Endpoint,
        blocks: Blocks,
        settings: links.LinkSettings,
    ) -> None:
        self._socket = links.open_socket(context, zmq.PUSH, replace(settings, max_queued_messages=_MAX_QUEUED))
        self._socket.setsockopt(zmq.SNDTIMEO, _SEND_TIMEOUT_MS)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        try:
            links.connect(self._socket, links.parse_address(endpoint.address, "peer endpoint"), settings)
        except (InvalidSetting, zmq.ZMQError) as error:
            self._socket.close()
            raise TransferFailed(f"the peer's endpoint cannot be dialled: {error}") from None
        self._blocks = blocks
        self._max_run = max(1, _MAX_MESSAGE_BYTES // blocks.shape[1])

    def push(self, key: HandoffKey, moves: Sequence[Move]) -> None:
        """See `Sender.push`."""
        for first in range(0, len(moves), self._max_run):
            self._send(key, moves[first : first + self._max_run])

    def _send(self, key: HandoffKey, moves: Sequence[Move]) -> None:
        header = BlockBatch(
            handoff=HandoffName(*key),
            first_index=moves[0].index,
            block_ids=tuple(move.target for move in moves),
            generations=tuple(move.generation for move in moves),
        )
        # one copy here: ZMQ sends later, when these blocks may already belong to somebody else
        payload = self._blocks[[move.source for move in moves]]
        try:
            self._socket.send(_HEADERS.encode(header), zmq.SNDMORE)
            self._socket.send(payload.data, copy=False)
        except zmq.Again:
            raise TransferFailed(f"the receiver took nothing for {_SEND_TIMEOUT_MS / 1000:g} s") from None

    def close(self) -> None:
        """Drop the connection and whatever is still queued on it."""
        self._socket.close()
