"""Simulated connections between the two sides: frames in flight on a virtual clock, in one thread.

Owns the listening socket of a prefill node and the dialled ones of a decode node as the sides see them, and what
becomes of every message (`Fate`). Real sockets are under the harnesses of whole legs and whole programs.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import TypeAlias

import zmq

from baton.kvtransfer.messages import RECEIVER_TO_SENDER, SENDER_TO_RECEIVER, PeerHello
from baton.wire.codec import Codec
from baton.wire.errors import BatonError

TRANSIT_S = 0.01
WITHIN_ROUND_S = 0.25

Fate: TypeAlias = Callable[[object], Sequence[float]]
"""After how many seconds each copy of a message arrives; () loses it."""

Inbox: TypeAlias = list[tuple[float, int, bytes, tuple[bytes, ...]]]
"""(when it arrives, number, identity of its connection, frames)."""


Rewrite: TypeAlias = Callable[[object], Sequence[object]]
"""The messages to send instead of one: a lying side changes it, a faulty network duplicates it."""


def arrives(message: object) -> Sequence[float]:
    """The fate of messages on a network that works."""
    return (TRANSIT_S,)


def at_once(message: object) -> Sequence[float]:
    """The fate of messages in tests that do not depend on their timing."""
    return (0.0,)


def _read(codec: Codec, frame: bytes) -> object:
    try:
        return codec.decode(frame)
    except BatonError:
        return frame  # its receiver will refuse it


class Wire:
    """All connections, with the frames in flight and their arrival times. `seen`: all messages that were not lost."""

    def __init__(self, fate: Fate) -> None:
        self.now_s = 0.0
        self.fate = fate
        self.rewrite: Rewrite = lambda message: (message,)
        self.seen: list[object] = []
        self.listener: FakeRouter | None = None
        self._dealers: list[FakeDealer] = []
        self._num_sent = 0
        self._num_connections = 0

    def clock(self) -> float:
        """The clock that a side reads within a round: it is later than the time with which the side was called."""
        return self.now_s + WITHIN_ROUND_S

    def listen(self) -> FakeRouter:
        """A life of the prefill node begins to listen: connections that are open reach it from now on."""
        self.listener = FakeRouter(self)
        for dealer in [dealer for dealer in self._dealers if not dealer.closed]:
            self.connect(dealer)
        return self.listener

    def connect(self, dealer: FakeDealer) -> None:
        """A connection, new or again: ZMQ gives it a new identity at the listener."""
        self._num_connections += 1
        if dealer not in self._dealers:
            self._dealers.append(dealer)
        else:
            dealer.monitor.say(zmq.EVENT_DISCONNECTED)
        dealer.monitor.say(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        dealer.identity = f"connection {self._num_connections}".encode()
        if self.listener is not None:
            self.listener.dealers[dealer.identity] = dealer

    def break_connections(self) -> None:
        """Every connection is lost with all messages in flight, and is made again."""
        dealers = [dealer for dealer in self._dealers if not dealer.closed]
        if self.listener is not None:
            self.listener.inbox.clear()
            self.listener.dealers.clear()
        for dealer in dealers:
            dealer.inbox.clear()
            self.connect(dealer)

    def carry(self, inbox: Inbox, identity: bytes, frame: bytes, codec: Codec) -> None:
        """Have a frame, or its replacement, arrive at its time."""
        message = _read(codec, frame)
        for said in self.rewrite(message):
            self._carry_one(inbox, identity, frame if said is message else codec.encode(said), said)

    def _carry_one(self, inbox: Inbox, identity: bytes, frame: bytes, message: object) -> None:
        """Send one frame. A message never arrives after a hello that was sent later: the sides rely on that much of the
        order of a connection.
        """
        delays_s = self.fate(message)
        self.seen += [message] * bool(delays_s)
        if isinstance(message, PeerHello) and delays_s:
            latest_s = self.now_s + min(delays_s)
            inbox[:] = [(min(at_s, latest_s) if of == identity else at_s, n, of, f) for at_s, n, of, f in inbox]
        for delay_s in delays_s:
            self._num_sent += 1
            inbox.append((self.now_s + delay_s, self._num_sent, identity, (frame,)))

    def take(self, inbox: Inbox) -> tuple[bytes, tuple[bytes, ...]]:
        """The next message that has arrived. Raises `zmq.Again`."""
        arrived = min((entry for entry in inbox if entry[0] <= self.now_s), default=None)
        if arrived is None:
            raise zmq.Again
        inbox.remove(arrived)
        return arrived[2], arrived[3]


class FakeRouter:
    """The listening socket of one life of the prefill node."""

    def __init__(self, wire: Wire) -> None:
        self.dealers: dict[bytes, FakeDealer] = {}
        self.inbox: Inbox = []
        self._wire = wire

    def close(self) -> None:
        """Stop to listen."""
        self.dealers.clear()
        if self._wire.listener is self:
            self._wire.listener = None

    def recv_multipart(self, flags: int) -> list[bytes]:
        identity, frames = self._wire.take(self.inbox)
        return [identity, *frames]

    def send_multipart(self, frames: Sequence[bytes], flags: int) -> None:
        dealer = self.dealers.get(frames[0])
        if dealer is None or dealer.closed or dealer.identity != frames[0]:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        self._wire.carry(dealer.inbox, b"", frames[1], SENDER_TO_RECEIVER)


class NothingThere(zmq.Again):
    """Made in no time, unlike that of ZMQ, which asks for the text of its number."""

    def __init__(self) -> None:
        self.errno = zmq.EAGAIN


class FakeMonitor:
    """Tells what happens to a connection."""

    def __init__(self) -> None:
        self.closed = False
        self._events: list[int] = []

    def say(self, event: int) -> None:
        self._events.append(event)

    def recv_multipart(self, flags: int) -> list[bytes]:
        if not self._events:
            raise NothingThere
        return [struct.pack("=hi", self._events.pop(0), 0), b""]

    def close(self, linger: int) -> None:
        self.closed = True


class FakeDealer:
    """The decode node's end of a connection."""

    def __init__(self, wire: Wire) -> None:
        self.monitor = FakeMonitor()
        self.identity = b""
        self.inbox: Inbox = []
        self.closed = False
        self._wire = wire

    def setsockopt(self, option: int, value: object) -> None:
        """Socket options have no effect in the simulation."""

    def connect(self, address: str) -> None:
        if " " in address:
            raise zmq.ZMQError(zmq.EINVAL)
        self._wire.connect(self)

    def recv(self, flags: int) -> bytes:
        return self._wire.take(self.inbox)[1][0]

    def send(self, frame: bytes, flags: int) -> None:
        listener = self._wire.listener
        if listener is not None and self.identity in listener.dealers:
            self._wire.carry(listener.inbox, self.identity, frame, RECEIVER_TO_SENDER)

    def send_frames(self, frames: Sequence[bytes]) -> None:
        """Send bytes that are no message; they arrive at once."""
        if self._wire.listener is not None:
            self._wire.listener.inbox.append((self._wire.now_s, 0, self.identity, tuple(frames)))

    def get_monitor_socket(self, events: int) -> FakeMonitor:
        return self.monitor

    def disable_monitor(self) -> None:
        """Nothing is monitored any more."""

    def close(self) -> None:
        self.closed = True


class FakeContext:
    """Opens the decode node's sockets."""

    def __init__(self, wire: Wire) -> None:
        self.dealers: list[FakeDealer] = []
        self.wire = wire

    def socket(self, kind: int) -> FakeDealer:
        self.dealers = [dealer for dealer in self.dealers if not dealer.closed]
        self.dealers.append(FakeDealer(self.wire))
        return self.dealers[-1]
