"""One end of a ZMQ connection between two processes: `python -m bench.limits.round_trip_process`, driven by
`bench.child`.

Owns a socket with the options that every link of Baton has, over TCP as the control links are. One of two such
processes sends a message and waits for it to come back, the other sends back what it gets. Both block in between, as a
node and a router do.
"""

from __future__ import annotations

import time
from typing import Any

import zmq

from bench.child import Worker, serve_parent
from wire.errors import RequestFailed
from wire.links import LinkSettings, bind, connect, open_socket

_HOST = "127.0.0.1"
_WAIT_MS = 20_000


class RoundTripEnd:
    """Sends first or sends back, as it is told."""

    def __init__(self, message_bytes: int) -> None:
        self._message = bytes(message_bytes)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._link = open_socket(self._context, zmq.PAIR, LinkSettings())

    def do(self, command: str, arguments: dict[str, Any]) -> Any:
        """See `Worker`."""
        match command, arguments:
            case "bind", {}:
                return bind(self._link, _HOST, 0, LinkSettings())
            case "connect", {"address": str(address)}:
                return connect(self._link, address, LinkSettings())
            case "send_back", {"count": int(count)}:
                return self._send_back(count)
            case "round_trips", {"count": int(count)}:
                return self._round_trips(count)
            case _:
                raise ValueError(f"unknown command {command}")

    def close(self) -> None:
        """See `Worker`."""
        self._context.destroy(linger=0)

    def _round_trips(self, count: int) -> list[float]:
        """Seconds of each, one right after the other."""
        taken_s = []
        for _ in range(count):
            begin_s = time.monotonic()
            self._link.send(self._message)
            self._receive()
            taken_s.append(time.monotonic() - begin_s)
        return taken_s

    def _send_back(self, count: int) -> None:
        for _ in range(count):
            self._link.send(self._receive())

    def _receive(self) -> bytes:
        if not self._link.poll(_WAIT_MS):
            raise RequestFailed("the other end of a round trip is silent")
        return self._link.recv()


def _begin(spec: dict[str, Any]) -> Worker:
    return RoundTripEnd(**spec)


if __name__ == "__main__":
    serve_parent(_begin)
