"""A transport of another package, for nodes of one Linux host and user: files in memory go over a Unix socket.

    pip install ./examples/custom_transport
    baton serve --prefill 1 --kv-transport memfd

A push is one datagram: a header, and the descriptor of a file in memory with the bytes of its blocks. So it comes whole
or not at all, and the sender's blocks are free when `push` returns. The receiver writes its pool itself, and only
blocks that a grant announced: `GrantedWriter` keeps that list. docs/extending.md says more. A node that is killed
leaves a folder in /tmp.
"""

from __future__ import annotations

import os
import select
import shutil
import socket
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from baton.kvtransfer.messages import Endpoint, HandoffName, ProcessIdentity
from baton.kvtransfer.pools.base import KvPool
from baton.kvtransfer.transports.announced import GrantedWriter
from baton.kvtransfer.transports.base import Move
from baton.kvtransfer.transports.plugged import Site
from baton.kvtransfer.transports.tcp_zmq import BlockBatch
from baton.wire.codec import Codec
from baton.wire.errors import BatonError, TransferFailed
from baton.wire.request_key import RequestKey

NAME = "memfd"
_HEADERS = Codec(BlockBatch)
_MAX_HEADER_BYTES = 2**16
_MAX_QUEUED_BYTES = 2**15  # of headers that the receiver has not read; each holds a file of `piece_bytes`
_MAX_MESSAGES_PER_POLL = 16
_FOLDER = os.path.join(tempfile.gettempdir(), "baton-memfd-")


def _open_socket() -> socket.socket:
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    opened.setblocking(False)
    return opened


class MemfdReceiver(GrantedWriter):
    """D's end: a socket in a folder that only this user can enter. `num_refused` counts what changed nothing."""

    def __init__(self, pool: KvPool) -> None:
        super().__init__()
        self._pool = pool
        self._folder = tempfile.mkdtemp(prefix=os.path.basename(_FOLDER))
        self.endpoint = Endpoint(NAME, f"{self._folder}/blocks")
        self._socket = _open_socket()
        self._socket.bind(self.endpoint.address)

    def wait_on(self) -> Sequence[Any]:
        return () if self._socket.fileno() < 0 else (self._socket,)

    def poll(self) -> None:
        """Take a bounded number of messages. Everything in them may be a lie: nothing of that may raise."""
        for _ in range(_MAX_MESSAGES_PER_POLL):
            try:
                header, files, _, _ = socket.recv_fds(self._socket, _MAX_HEADER_BYTES, 1)
            except OSError:  # nothing more for now, or closed
                return
            try:
                self.num_refused += not (len(files) == 1 and self._take(header, files[0]))
            finally:
                for file in files:
                    os.close(file)

    def _take(self, header: bytes, file: int) -> bool:
        """Write the blocks of one message into the pool; False: it is not what was granted."""
        try:
            batch: BlockBatch = _HEADERS.decode(header)
        except BatonError:
            return False
        key, first, block_ids = batch.handoff.key, batch.first_index, batch.block_ids
        if batch.source is not None or not self._announced.may_write(key, first, block_ids, batch.generations):
            return False
        num_bytes = len(block_ids) * self._pool.block_bytes
        try:
            content = os.pread(file, num_bytes, 0)
        except OSError:  # a pipe, a socket
            return False
        if len(content) != num_bytes:
            return False
        self._pool.write(block_ids, np.frombuffer(content, np.uint8).reshape(len(block_ids), -1))
        self._pool.settle()  # the bytes are in place before anybody hears of them
        self._announced.arrived(key, first, len(block_ids))
        return True

    def close(self) -> None:
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class MemfdSender:
    """P's end towards one receiver."""

    is_silent, pushes_parts, needs_fence = False, False, False
    piece_bytes = 2**20
    writers: Sequence[ProcessIdentity] = ()

    def __init__(self, endpoint: Endpoint, pool: KvPool) -> None:
        if not endpoint.address.startswith(_FOLDER) or ".." in endpoint.address:
            raise TransferFailed("the peer's address is no socket of this transport")
        self._pool = pool
        self._socket = _open_socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_QUEUED_BYTES)
        try:
            self._socket.connect(endpoint.address)
        except OSError as error:
            self._socket.close()
            raise TransferFailed(f"the receiver cannot be reached: {error.strerror}") from None

    def push(self, key: RequestKey, moves: Sequence[Move]) -> bool:
        """One message. False: the receiver has not read enough yet, so the node tries again."""
        self.poll()
        if not moves or not select.select([], [self._socket], [], 0)[1]:
            return not moves
        targets, generations = tuple(m.target for m in moves), tuple(m.generation for m in moves)
        header = _HEADERS.encode(BlockBatch(HandoffName(*key), moves[0].index, targets, generations))
        content = np.empty((len(moves), self._pool.block_bytes), np.uint8)
        self._pool.read([move.source for move in moves], content)
        file = os.memfd_create(NAME)
        try:
            os.write(file, content.data)
            socket.send_fds(self._socket, [header], [file])
        except BlockingIOError:  # another sender was faster
            return False
        except OSError as error:
            raise TransferFailed(f"the receiver cannot be reached: {error.strerror}") from None
        finally:
            os.close(file)  # the message holds it now
        return True

    def push_part(self, key: RequestKey, moves: Sequence[Move], begin_byte: int, end_byte: int) -> None:
        raise NotImplementedError  # never called: `pushes_parts` is False

    def poll(self) -> None:
        """Nothing is in flight on this side. Raises `TransferFailed` once it is closed."""
        if self._socket.fileno() < 0:
            raise TransferFailed("the sender is closed")

    def wait_on(self) -> Sequence[Any]:
        return ()  # nothing becomes readable here

    def is_reading(self, key: RequestKey) -> bool:
        return False  # a push copies

    def close(self) -> None:
        self._socket.close()  # what was sent is the receiver's


def open_receiver(site: Site) -> MemfdReceiver:
    return MemfdReceiver(site.pool)


def open_sender(site: Site, endpoint: Endpoint, num_blocks: int) -> MemfdSender:
    return MemfdSender(endpoint, site.pool)
