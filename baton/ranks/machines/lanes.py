"""Lanes: pairs of sockets between a driver and its ranks that are cut in the middle, and joined over a link.

Owns the local ends of one side, and what has come for them and is not taken yet. Does not know what is said over them.
Bounds: `_MAX_BACKLOG_BYTES` of a lane that nobody reads; more fails the side, which ends the node.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import zmq

from baton.ranks.machines.link import MAX_DATA_BYTES
from baton.wire.errors import BatonError

Key = tuple[int, int]
"""Number of the rank, and lane."""
_MAX_BACKLOG_BYTES = 64 * 2**20


class LanesBroken(BatonError):
    """A lane has more to take than whoever reads it takes."""

    code = "internal_error"


@dataclass(slots=True)
class _Lane:
    """`descriptors`: go along with its first byte. `is_over`: the other side has closed it."""

    end: socket.socket
    descriptors: tuple[int, ...] = ()
    backlog: bytearray = field(default_factory=bytearray)
    is_over: bool = False


class Lanes:
    """The lanes of one side. `send` and `send_closed`: over the link."""

    def __init__(self, send: Callable[[Key, bytes], None], send_closed: Callable[[Key], None]) -> None:
        self._send, self._send_closed = send, send_closed
        self._lanes: dict[Key, _Lane] = {}
        self._by_descriptor: dict[int, Key] = {}

    def add(self, key: Key, end: socket.socket, descriptors: Sequence[int] = ()) -> None:
        """Join this end, which is closed with the lane. `descriptors` travel with the first byte that comes for it."""
        end.setblocking(False)
        self._lanes[key] = _Lane(end, tuple(descriptors))
        self._by_descriptor[end.fileno()] = key

    def register(self, poller: zmq.Poller) -> None:
        """Register all local ends with `poller`."""
        for lane in self._lanes.values():
            poller.register(lane.end.fileno(), zmq.POLLIN | (zmq.POLLOUT if lane.backlog else 0))

    def serve(self, events: Sequence[tuple[object, int]]) -> list[Key]:
        """Carry bytes of the ends that were polled. Returns the lanes whose local end was closed, by whoever."""
        closed: list[Key] = []
        for source, event in events:
            key = self._by_descriptor.get(source) if isinstance(source, int) else None
            if key is None:
                continue
            if event & zmq.POLLOUT and key in self._lanes:
                self._flush(key)
            if event & (zmq.POLLIN | zmq.POLLERR) and key in self._lanes and not self._read(key):
                self.close(key)
                self._send_closed(key)
                closed.append(key)
        return closed

    def take(self, key: Key, data: bytes) -> None:
        """Bytes that came over the link. Raises `LanesBroken`."""
        lane = self._lanes.get(key)
        if lane is None or lane.is_over:
            return
        lane.backlog += data
        if len(lane.backlog) > _MAX_BACKLOG_BYTES:
            raise LanesBroken(f"rank {key[0]} leaves {len(lane.backlog)} bytes unread")
        self._flush(key)

    def finish(self, key: Key) -> None:
        """Close a lane when the rest of it is taken: nothing more comes for it over the link."""
        lane = self._lanes.get(key)
        if lane is not None:
            lane.is_over = True
            self._flush(key)

    def close(self, key: Key) -> None:
        """Close the local end of one lane."""
        lane = self._lanes.pop(key, None)
        if lane is not None:
            del self._by_descriptor[lane.end.fileno()]
            lane.end.close()

    def close_all(self) -> None:
        """Close every local end."""
        for key in tuple(self._lanes):
            self.close(key)

    def _read(self, key: Key) -> bool:
        """Send on what has come; whether more may come."""
        try:
            data = self._lanes[key].end.recv(MAX_DATA_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if data:
            self._send(key, data)
        return bool(data)

    def _flush(self, key: Key) -> None:
        lane = self._lanes[key]
        with contextlib.suppress(BlockingIOError):
            while lane.backlog:
                try:
                    del lane.backlog[: self._write(lane)]
                except BlockingIOError:
                    raise
                except OSError:  # its reader is gone: noticed where it is read
                    lane.backlog.clear()
        if lane.is_over and not lane.backlog:
            self.close(key)

    @staticmethod
    def _write(lane: _Lane) -> int:
        if not lane.descriptors:
            return lane.end.send(lane.backlog)
        num_sent = socket.send_fds(lane.end, [lane.backlog[:1]], lane.descriptors)
        lane.descriptors = ()
        return num_sent
