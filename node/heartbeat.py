"""The heartbeat: a thread that tells the router once a second that this process lives, and at once when its connection
was made: a router that has just started learns of its nodes that way.

Owns a thread and a socket to the router. It reports the engine's last published status and how long ago the engine loop
last completed a round, so a router can tell a busy node from a stuck one and a stuck one from a dead one.
"""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import replace

import zmq

from program.watchdog import Beat
from wire import links
from wire.messages import NODE_TO_ROUTER, Heartbeat, NodeStatus

INTERVAL_S = 1.0
_MISSED_BEFORE_NEXT_KEY = 2
_NUM_QUICK, _QUICK_S = 3, 0.1
"""Beats after the first one on a new connection: the answer takes another connection, which may be made later."""


class HeartbeatThread:
    """Sends a `Heartbeat` every `interval_s` until stopped. `publish` is called by the engine loop."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        settings: links.LinkSettings,
        epoch: int,
        status: NodeStatus,
        interval_s: float = INTERVAL_S,
        beat: Beat | None = None,
    ) -> None:
        self._context = context
        self._address = address
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
        """End the thread; returns when its socket is closed."""
        if self._thread.is_alive():
            self._stop.send(b"x")
            self._thread.join()
        self._stop.close()
        self._wakeup.close()

    def _run(self) -> None:
        link = links.open_socket(self._context, zmq.DEALER, self._settings)
        link.setsockopt(zmq.IMMEDIATE, 1)  # no old heartbeat is queued for a router that comes back later
        made = link.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        address, num_dialled, num_missed = links.connect(link, self._address, self._settings), 0, 0
        poller = zmq.Poller()
        poller.register(made, zmq.POLLIN)
        poller.register(self._wakeup, zmq.POLLIN)
        wait_s, num_quick = self._interval_s, 0
        while self._wakeup.fileno() not in (came := dict(poller.poll(int(wait_s * 1000)))):
            if made in came:
                made.recv_multipart()
                num_quick = _NUM_QUICK
            wait_s = min(_QUICK_S, self._interval_s) if num_quick else self._interval_s
            num_quick = max(0, num_quick - 1)
            if self._beat is not None:
                self._beat.touch()
            published_s, status = self._published
            beat = Heartbeat(self._epoch, replace(status, loop_age_s=max(0.0, time.monotonic() - published_s)))
            try:
                link.send(NODE_TO_ROUTER.encode(beat), zmq.NOBLOCK)
                num_missed = 0
            except zmq.Again:  # no router is connected now; perhaps it has another key
                num_missed += 1
                if num_missed % _MISSED_BEFORE_NEXT_KEY == 0 and links.num_expected_keys(self._settings) > 1:
                    num_dialled += 1
                    link.disconnect(address)
                    address = links.connect(link, self._address, self._settings, num_dialled)
        if self._beat is not None:
            self._beat.rest()
        link.disable_monitor()
        made.close(linger=0)
        link.close()
