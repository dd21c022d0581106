"""Hosts some of the ranks of a node, on another machine than its driver.

Owns the connection to the driver and the processes of the ranks, for one life of the driver at a time (`_Term`). A rank
is the process that it is on the driver's machine, with the same sockets; what is said over them goes to the driver and
comes from there (`lanes`). Decides nothing: which ranks run, what they compute, and when they end, is the driver's.

The driver may come later, restart or vanish: the machine dials, offers itself, and does so again when a term is over. A
term ends when the driver says so, when its connection breaks, or when it has said nothing for `SILENCE_S`; then all
ranks here are killed. They die with this process, too. Asked to stop, it goes on until the driver leaves: that is
where requests are finished.
"""

from __future__ import annotations

import logging
import socket
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from baton.ranks.machines.lanes import Key, Lanes, LanesBroken
from baton.ranks.machines.link import (
    BEAT_S,
    NUM_LANES,
    ORDERS,
    SILENCE_S,
    TO_DRIVER,
    TO_MACHINE,
    Beat,
    Closed,
    Data,
    Ended,
    Kill,
    Leave,
    Offer,
    Take,
    TurnAway,
)
from baton.runtime.child import Child, describe_end, is_stopped
from baton.wire import links
from baton.wire.errors import BatonError

_RANK_MODULE = "baton.ranks"
_BEAT_MS = int(BEAT_S * 1000)
_REASON_S = 1.0
_LINGER_MS = 500
NEXT_KEY_S = 3.0
"""For so long a driver with two keys is waited for before it is dialled by the other one."""
_log = logging.getLogger(__name__)
Context = zmq.Context[zmq.Socket[bytes]]


@dataclass(slots=True)
class Stop:
    """A request to end this program, by `by_s` at the latest."""

    is_asked: bool = False
    by_s: float = 0.0


class RankHost:
    """Runs ranks of a node on this machine, for a driver elsewhere. `address`: of the driver; `cluster_key`: the file
    of the deployment's key, or ""."""

    def __init__(
        self, offer: Offer, cluster_key: str, address: str, context: Context, link_settings: links.LinkSettings
    ) -> None:
        self._offer, self._cluster_key, self._address = offer, cluster_key, address
        self._context, self._links = context, link_settings
        self._num_dialled = 0
        self._turned_away = ""

    def run(self, stop: Stop) -> None:
        """Run ranks of one life of the driver after the other, until told to stop."""
        while not stop.is_asked:
            with ExitStack() as opened:
                link = self._dial(opened)
                take = self._offer_self(link, stop)
                if take is not None:
                    term = _Term(link, take, (self._offer.host, self._cluster_key))
                    opened.callback(term.close)
                    _log.warning("ranks %s: %s", ", ".join(map(str, take.numbers)), term.run(stop))

    def _dial(self, opened: ExitStack) -> _Link:
        link = _Link(self._context, self._links)
        opened.callback(link.close)
        link.connect(self._address, self._num_dialled)
        self._num_dialled += 1
        return link

    def _offer_self(self, link: _Link, stop: Stop) -> Take | None:
        """What the driver says; None when this program is to stop, or the driver may have another key."""
        began_s, has_keys = time.monotonic(), links.num_expected_keys(self._links) > 1
        while not stop.is_asked:
            link.send(self._offer)  # nobody hears it before there is a connection
            if link.socket.poll(_BEAT_MS):
                message = link.receive()
                # one of a driver that has gone meanwhile is as good as none
                if isinstance(message, Take) and link.is_connected:
                    self._turned_away = ""
                    return message
                if isinstance(message, TurnAway):
                    began_s = time.monotonic()
                    self._note(message.reason)
                    time.sleep(BEAT_S)
            elif has_keys and time.monotonic() - began_s > NEXT_KEY_S:
                return None
        return None

    def _note(self, reason: str) -> None:
        if reason != self._turned_away:
            self._turned_away = reason
            _log.warning("%s does not take this machine: %s", self._address, reason)


class _Link:
    """A connection to a driver, which is used for one term."""

    def __init__(self, context: Context, settings: links.LinkSettings) -> None:
        self._settings = settings
        self._last_event = 0
        self.socket = links.open_socket(context, zmq.DEALER, settings)
        self.socket.setsockopt(zmq.IMMEDIATE, 1)  # an offer is for who is there
        self.monitor: Any = self.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)

    def connect(self, address: str, attempt: int) -> None:
        """Dial. Raises `InvalidSetting`."""
        links.connect(self.socket, address, self._settings, attempt)

    def send(self, message: object) -> bool:
        """Send without waiting; whether the connection took it."""
        try:
            self.socket.send(TO_DRIVER.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def receive(self) -> Any:
        """The next message, None where it was none."""
        try:
            return TO_MACHINE.decode(self.socket.recv())
        except BatonError as error:
            _log.warning("message from the driver rejected: %s", error)
            return None

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection."""
        self._events()
        return self._last_event == zmq.EVENT_HANDSHAKE_SUCCEEDED

    @property
    def has_broken(self) -> bool:
        """Whether the connection has broken since this, or `is_connected`, was asked last."""
        return zmq.EVENT_DISCONNECTED in self._events()

    def _events(self) -> list[int]:
        events = []
        while self.monitor.poll(0):
            events.append(int(recv_monitor_message(self.monitor)["event"]))
        self._last_event = events[-1] if events else self._last_event
        return events

    def close(self) -> None:
        """Forget the driver."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=_LINGER_MS)


class _Term:
    """The ranks of one life of a driver. `own`: host and key of this machine, which ranks are started with. Raises
    `OSError` when a process cannot be started."""

    def __init__(self, link: _Link, take: Take, own: tuple[str, str]) -> None:
        self._link, self._epoch = link, take.epoch
        self._lanes = Lanes(self._send_data, self._send_closed)
        self._children: dict[int, Child] = {}
        self._ended: set[int] = set()
        self._over = ""
        self._heard_s = time.monotonic()
        self._beat_s = 0.0
        for number in take.numbers:
            self._start(number, own)

    def run(self, stop: Stop) -> str:
        """Until it is over; why it is."""
        while not self._over:
            now_s = time.monotonic()
            if stop.is_asked and now_s > stop.by_s:
                return "this machine stops"
            if now_s - self._heard_s > SILENCE_S:
                return f"the driver has not been heard for {SILENCE_S:g} s"
            if now_s - self._beat_s >= BEAT_S:
                self._beat_s = now_s
                self._say(Beat(self._epoch, tuple(number for number in self._running if is_stopped(self._pid(number)))))
            self._turn()
        return self._over

    def close(self) -> None:
        """End every rank, and wait for it."""
        for child in self._children.values():
            child.kill()
        for child in self._children.values():
            child.end()
        self._lanes.close_all()

    @property
    def _running(self) -> list[int]:
        return [number for number in self._children if number not in self._ended]

    def _pid(self, number: int) -> int:
        return self._children[number].pid

    def _start(self, number: int, own: tuple[str, str]) -> None:
        pairs = [socket.socketpair() for _ in range(NUM_LANES)]
        orders = pairs[ORDERS][1]
        self._children[number] = Child(_RANK_MODULE, str(orders.fileno()), *own, pass_fds=(orders.fileno(),))
        orders.close()
        # the rank takes these with the first order: see `Channel.take_descriptor`
        theirs = [end for lane, (_, end) in enumerate(pairs) if lane != ORDERS]
        for lane, (ours, _) in enumerate(pairs):
            self._lanes.add((number, lane), ours, [each.detach() for each in theirs] if lane == ORDERS else ())

    def _turn(self) -> None:
        poller = zmq.Poller()
        for source in (self._link.socket, self._link.monitor):
            poller.register(source, zmq.POLLIN)
        self._lanes.register(poller)
        events = poller.poll(_BEAT_MS)
        while not self._over and self._link.socket.poll(0):
            self._take_message(self._link.receive())
        if self._link.has_broken:
            self._over = self._over or "the connection to the driver broke"
            return
        for number, lane in self._lanes.serve(events):
            if lane == ORDERS:
                self._note_end(number)

    def _take_message(self, message: Any) -> None:
        if message is None or isinstance(message, Take | TurnAway) or message.epoch != self._epoch:
            return
        self._heard_s = time.monotonic()
        match message:
            case Data():
                try:
                    self._lanes.take((message.number, message.lane), message.data)
                except LanesBroken as error:
                    self._over = str(error)
            case Closed():
                self._lanes.finish((message.number, message.lane))
            case Kill():
                if message.number in self._children:
                    self._children[message.number].kill()
            case Leave():
                self._over = "the driver has ended"
            case _:
                pass

    def _note_end(self, number: int) -> None:
        """The rank has closed its channel, which it does when it ends."""
        status = self._children[number].wait(_REASON_S)
        if status is None:
            self._children[number].kill()
            status = self._children[number].wait(_REASON_S)
        self._ended.add(number)
        self._say(Ended(self._epoch, number, describe_end(status)))

    def _send_data(self, key: Key, data: bytes) -> None:
        self._say(Data(self._epoch, *key, data))

    def _send_closed(self, key: Key) -> None:
        self._say(Closed(self._epoch, *key))

    def _say(self, message: object) -> None:
        if not self._link.send(message):
            self._over = self._over or "the driver takes no more of what is sent to it"
