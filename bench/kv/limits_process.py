"""What one core of this machine can do: copy, hash, both, send to the other core through plain TCP, and hand it a
ZMQ message.

`python -m bench.kv.limits_process`, one on each of two cores. Owns two buffers of `num_bytes`, to be chosen much larger
than the caches, with every page touched.
"""

from __future__ import annotations

import socket
import time
from typing import Any

import numpy as np
import xxhash
import zmq

from bench.child import Worker, serve_parent

_HOST = "127.0.0.1"
_PIECE_BYTES = 2**20
_WAIT_S = 60.0
_PAUSE_S = 0.003
_MESSAGE_BYTES = 300


class Limits:
    """Each measurement returns seconds."""

    def __init__(self, num_bytes: int) -> None:
        self._source = np.ones(num_bytes, dtype=np.uint8)
        self._target = np.ones(num_bytes, dtype=np.uint8)
        self._listener = socket.create_server((_HOST, 0))
        self._listener.settimeout(_WAIT_S)
        self._connection: socket.socket | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pair = self._context.socket(zmq.PAIR)

    def do(self, command: str, arguments: dict[str, Any]) -> Any:
        """See `Worker`."""
        match command, arguments:
            case "copy", {}:
                return self._copy()
            case "hash", {}:
                return self._hash()
            case "copy_and_hash", {}:
                return self._copy_and_hash()
            case "hash_for", {"duration_s": float(duration_s)}:
                return self._hash_for(duration_s)
            case "port", {}:
                return self._listener.getsockname()[1]
            case "connect", {"port": int(port)}:
                self._connection = socket.create_connection((_HOST, port), _WAIT_S)
                return None
            case "zmq_port", {}:
                return self._pair.bind_to_random_port(f"tcp://{_HOST}")
            case "zmq_connect", {"port": int(port)}:
                self._pair.connect(f"tcp://{_HOST}:{port}")
                return None
            case "pass_on", {"count": int(count)}:
                return self._pass_on(count)
            case "hop", {"count": int(count)}:
                return self._hop(count)
            case "send", {}:
                return self._send()
            case "receive", {}:
                return self._receive()
            case _:
                raise ValueError(f"unknown command {command}")

    def close(self) -> None:
        """See `Worker`."""
        self._listener.close()
        self._context.destroy(linger=0)
        if self._connection is not None:
            self._connection.close()

    def _copy(self) -> float:
        begin_s = time.monotonic()
        np.copyto(self._target, self._source)
        return time.monotonic() - begin_s

    def _hash(self) -> float:
        begin_s = time.monotonic()
        for first in range(0, len(self._source), _PIECE_BYTES):
            xxhash.xxh3_64_intdigest(self._source[first : first + _PIECE_BYTES].data)
        return time.monotonic() - begin_s

    def _copy_and_hash(self) -> float:
        """Each MiB copied, then hashed while it is in the cache: all that one core of a sender has to do."""
        begin_s = time.monotonic()
        for first in range(0, len(self._source), _PIECE_BYTES):
            piece = self._source[first : first + _PIECE_BYTES]
            np.copyto(self._target[first : first + _PIECE_BYTES], piece)
            xxhash.xxh3_64_intdigest(piece.data)
        return time.monotonic() - begin_s

    def _hash_for(self, duration_s: float) -> None:
        end_s = time.monotonic() + duration_s
        while time.monotonic() < end_s:
            for first in range(0, len(self._source), _PIECE_BYTES):
                xxhash.xxh3_64_intdigest(self._source[first : first + _PIECE_BYTES].data)
                if time.monotonic() >= end_s:
                    return

    def _send(self) -> float:
        """Send the buffer; until the other end says that it has all of it."""
        if self._connection is None:
            raise RuntimeError("connect first")
        begin_s = time.monotonic()
        self._connection.sendall(self._source.data)
        self._connection.recv(1)
        return time.monotonic() - begin_s

    def _receive(self) -> None:
        """Receive the buffer and say so."""
        if self._connection is None:
            self._connection, _ = self._listener.accept()
            self._connection.settimeout(_WAIT_S)
        view, place = self._target.data, 0
        while place < len(view):
            num_bytes = self._connection.recv_into(view[place:], min(_PIECE_BYTES, len(view) - place))
            if not num_bytes:
                raise ConnectionError("the other end has gone")
            place += num_bytes
        self._connection.sendall(b"\0")

    def _hop(self, count: int) -> list[float]:
        """`count` messages to the other end and back, each after a pause as between two handoffs: half of the way."""
        taken_s = []
        for _ in range(count):
            time.sleep(_PAUSE_S)
            begin_s = time.monotonic()
            self._pair.send(bytes(_MESSAGE_BYTES))
            self._receive_message()
            taken_s.append((time.monotonic() - begin_s) / 2)
        return taken_s

    def _pass_on(self, count: int) -> None:
        """Send so many messages back."""
        for _ in range(count):
            self._pair.send(self._receive_message())

    def _receive_message(self) -> bytes:
        if not self._pair.poll(int(_WAIT_S * 1000)):
            raise ConnectionError("the other end has gone")
        return self._pair.recv()


def _begin(spec: dict[str, Any]) -> Worker:
    return Limits(**spec)


if __name__ == "__main__":
    serve_parent(_begin)
