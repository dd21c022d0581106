"""What one core of this machine can do: copy, hash, both, send to the other core through plain TCP, and hand it a
ZMQ message.

`python -m bench.kv.limits_process`, one on each of two cores. Owns two buffers of `num_bytes`, to be chosen much larger
than the caches, with every page touched. Each command returns seconds where it says nothing else.
"""

from __future__ import annotations

import socket
import time
from typing import Any

import numpy as np
import xxhash
import zmq

from bench.child import serve_parent
from wire.errors import RequestFailed
from wire.links import LinkSettings, bind, connect, open_socket

_HOST = "127.0.0.1"
_PIECE_BYTES = 2**20
_WAIT_S = 60.0


class CoreLimits:
    """See `bench.child.Worker`."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._source = np.ones(spec["num_bytes"], dtype=np.uint8)
        self._target = np.ones(spec["num_bytes"], dtype=np.uint8)
        self._listener = socket.create_server((_HOST, 0))
        self._listener.settimeout(_WAIT_S)
        self._connection: socket.socket | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pair = open_socket(self._context, zmq.PAIR, LinkSettings())

    def copy(self) -> float:
        """One buffer to the other."""
        begin_s = time.monotonic()
        np.copyto(self._target, self._source)
        return time.monotonic() - begin_s

    def hash(self) -> float:
        """One buffer, MiB by MiB."""
        begin_s = time.monotonic()
        for first in range(0, len(self._source), _PIECE_BYTES):
            xxhash.xxh3_64_intdigest(self._source[first : first + _PIECE_BYTES].data)
        return time.monotonic() - begin_s

    def copy_and_hash(self) -> float:
        """Each MiB copied, then hashed while it is in the cache: all that one core of a sender has to do."""
        begin_s = time.monotonic()
        for first in range(0, len(self._source), _PIECE_BYTES):
            piece = self._source[first : first + _PIECE_BYTES]
            np.copyto(self._target[first : first + _PIECE_BYTES], piece)
            xxhash.xxh3_64_intdigest(piece.data)
        return time.monotonic() - begin_s

    def hash_for(self, duration_s: float) -> None:
        """Keep this core and the memory busy."""
        end_s, first = time.monotonic() + duration_s, 0
        while time.monotonic() < end_s:
            xxhash.xxh3_64_intdigest(self._source[first : first + _PIECE_BYTES].data)
            first = (first + _PIECE_BYTES) % len(self._source)

    def bind(self) -> dict[str, Any]:
        """Where the other one finds this one; the arguments of `connect`."""
        return {"port": self._listener.getsockname()[1], "link": bind(self._pair, _HOST, 0, LinkSettings())}

    def connect(self, port: int, link: str) -> None:
        """To the other one, by TCP and by ZMQ with the options that every link of Baton has."""
        self._connection = socket.create_connection((_HOST, port), _WAIT_S)
        connect(self._pair, link, LinkSettings())

    def send(self) -> float:
        """Send the buffer; until the other end says that it has all of it."""
        begin_s = time.monotonic()
        self._tcp().sendall(self._source.data)
        self._tcp().recv(1)
        return time.monotonic() - begin_s

    def receive(self) -> None:
        """Receive the buffer and say so."""
        view, place = self._target.data, 0
        while place < len(view):
            num_bytes = self._tcp().recv_into(view[place:], min(_PIECE_BYTES, len(view) - place))
            if not num_bytes:
                raise RequestFailed("the other end has gone")
            place += num_bytes
        self._tcp().sendall(b"\0")

    def round_trips(self, count: int, message_bytes: int, pause_s: float = 0.0) -> list[float]:
        """A ZMQ message to the other end and back, so often, each after a pause."""
        taken_s = []
        for _ in range(count):
            if pause_s:
                time.sleep(pause_s)
            begin_s = time.monotonic()
            self._pair.send(bytes(message_bytes))
            self._receive_message()
            taken_s.append(time.monotonic() - begin_s)
        return taken_s

    def send_back(self, count: int) -> None:
        """The other end of as many round trips."""
        for _ in range(count):
            self._pair.send(self._receive_message())

    def close(self) -> None:
        """See `Worker`."""
        self._listener.close()
        self._context.destroy(linger=0)
        if self._connection is not None:
            self._connection.close()

    def _tcp(self) -> socket.socket:
        """The connection to the other end: the one that was made to it, or the one that it made."""
        if self._connection is None:
            self._connection, _ = self._listener.accept()
            self._connection.settimeout(_WAIT_S)
        return self._connection

    def _receive_message(self) -> bytes:
        if not self._pair.poll(int(_WAIT_S * 1000)):
            raise RequestFailed("the other end has gone")
        return self._pair.recv()


if __name__ == "__main__":
    serve_parent(CoreLimits)
