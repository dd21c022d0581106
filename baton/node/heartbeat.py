"""The heartbeat: a thread that tells each router once a second that this process lives, and at once when its connection
was made: a router that has just started learns of its nodes that way.

Owns a thread and a socket to each router. It reports the engine's last published status and how long ago the engine
loop last completed a round, so a router can tell a busy node from a stuck one and a stuck one from a dead one.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import zmq

from baton.runtime.watchdog import Beat
from baton.wire import links
from baton.wire.link_watch import DIAL_PAUSE_S, open_watched
from baton.wire.messages.membership import Heartbeat, NodeStatus
from baton.wire.messages.vocabulary import NODE_TO_ROUTER

INTERVAL_S = 1.0
_MISSED_BEFORE_NEXT_KEY = 2
_NUM_QUICK, _QUICK_S = 3, 0.1
"""Beats after the first one on a new connection: the answer takes another connection, which may be made later."""


class HeartbeatThread:
    """Sends a `Heartbeat` to each of `addresses` every `interval_s` until stopped. `publish` is called by the engine
    loop."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        addresses: Sequence[str],
        settings: links.LinkSettings,
        epoch: int,
        status: NodeStatus,
        interval_s: float = INTERVAL_S,
        beat: Beat | None = None,
    ) -> None:
        self._context = context
        self._addresses = tuple(addresses)
        self._settings = settings
        self._epoch = epoch
        self._interval_s = interval_s
        self._beat = beat
        self._published = (time.monotonic(), status)
        self._wakeup, self._stop = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def publish(self, now_s: float, status: NodeStatus) -> None:
        """Note that the engine loop completed a round at `now_s`."""
        self._published = (now_s, status)

    def stop(self) -> None:
        """End the thread; returns when its sockets are closed."""
        if self._thread.is_alive():
            self._stop.send(b"x")
            self._thread.join()
        self._stop.close()
        self._wakeup.close()

    def _run(self) -> None:
        with ExitStack() as stack:
            pulses = [_Pulse(self._context, address, self._settings) for address in self._addresses]
            poller = zmq.Poller()
            poller.register(self._wakeup, zmq.POLLIN)
            for pulse in pulses:
                stack.callback(pulse.close)
                poller.register(pulse.monitor, zmq.POLLIN)
            wait_s, num_quick = self._interval_s, 0
            while self._wakeup.fileno() not in dict(poller.poll(int(wait_s * 1000))):
                if sum(pulse.was_made() for pulse in pulses):  # each of them has to look
                    num_quick = _NUM_QUICK
                wait_s = min(_QUICK_S, self._interval_s) if num_quick else self._interval_s
                num_quick = max(0, num_quick - 1)
                if self._beat is not None:
                    self._beat.touch()
                frame = self._frame()
                for pulse in pulses:
                    pulse.send(frame)
        if self._beat is not None:
            self._beat.rest()

    def _frame(self) -> bytes:
        published_s, status = self._published
        age_s = max(0.0, time.monotonic() - published_s)
        return NODE_TO_ROUTER.encode(Heartbeat(self._epoch, replace(status, loop_age_s=age_s)))


class _Pulse:
    """The connection to one router. `monitor` can be read when something has happened to it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, settings: links.LinkSettings) -> None:
        self._link, self._watch = open_watched(context, zmq.DEALER, settings)
        self._link.setsockopt(zmq.IMMEDIATE, 1)  # no old heartbeat is queued for a router that comes back later
        self.monitor = self._watch.monitor
        self._settings = settings
        self._num_dialled = self._num_missed = 0
        self._dialled_s = time.monotonic()
        self._address = links.connect(self._link, address, settings)

    def was_made(self) -> bool:
        """Whether it was made, or made again, since this was last asked."""
        num_made = self._watch.num_made
        self._watch.look()
        return self._watch.num_made > num_made

    def send(self, frame: bytes) -> None:
        """Send a heartbeat if there is a connection now. Without one for a while it is dialled again where the router
        may have another key, and soon where ZMQ tries no more."""
        try:
            self._link.send(frame, zmq.NOBLOCK)
            self._num_missed = 0
        except zmq.Again:
            self._num_missed += 1
            takes_next_key = (
                self._num_missed % _MISSED_BEFORE_NEXT_KEY == 0 and links.num_expected_keys(self._settings) > 1
            )
            may_dial = time.monotonic() - self._dialled_s >= DIAL_PAUSE_S
            if may_dial and (takes_next_key or self._watch.is_dead):
                self._dialled_s = time.monotonic()
                self._num_dialled += 1
                self._link.disconnect(self._address)
                self._watch.dialled()
                self._address = links.connect(self._link, self._address, self._settings, self._num_dialled)

    def close(self) -> None:
        """Close the connection."""
        self._watch.close()
        self._link.close()
