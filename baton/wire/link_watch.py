"""Notices that the connection of a socket that dials was made, or that it broke. Knows no messages.

ZMQ dials again by itself and says nothing, but the other side then takes the socket for a stranger, and what was in
flight is lost. And ZMQ never dials again after a handshake in which the other side said what it may not say, as where
a bit of it was turned on its way; only after one that took too long, or that the other side has ended.
"""

from __future__ import annotations

from collections.abc import Iterator

import zmq
from zmq.utils.monitor import parse_monitor_message

from baton.wire import links

DIAL_PAUSE_S = 0.2
"""Between two connections whose handshakes fail: they may fail for ever."""
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_DISCONNECTED


def open_watched(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, settings: links.LinkSettings
) -> tuple[zmq.Socket[bytes], LinkWatch]:
    """A socket of `kind` that has not dialled yet, and what watches it. Raises `zmq.ZMQError`."""
    link = links.open_socket(context, kind, settings)
    try:
        return link, LinkWatch(link)
    except zmq.ZMQError:
        link.close()
        raise


class LinkWatch:
    """Watches `link`, which has not dialled yet. `monitor` is readable when something has happened. `num_made`: how
    often it was made. `is_dead`: ZMQ does not dial again by itself; whoever dials says so with `dialled`."""

    def __init__(self, link: zmq.Socket[bytes]) -> None:
        self.num_made = 0
        self.has_broken = False
        self.is_dead = False
        self.monitor = link.get_monitor_socket(_EVENTS)
        self._link = link
        self._goes_on = False

    @property
    def is_made(self) -> bool:
        """Whether the connection was made, maybe long ago."""
        return self.num_made > 0

    def look(self) -> bool:
        """Notice that the connection was made, that it broke, or that it will never be made: it stays broken then.
        Returns `is_dead`."""
        for event in self._events():
            is_over = event == zmq.EVENT_DISCONNECTED
            self.is_dead = is_over and not self._goes_on
            self.has_broken |= is_over and (self.is_made or self.is_dead)
            self.num_made += event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self._goes_on = not is_over
        return self.is_dead

    def dialled(self) -> None:
        """Note that the socket has dialled anew: it is not dead."""
        self.is_dead = self._goes_on = False

    def close(self) -> None:
        """Watch no more. To be called before the socket is closed."""
        if not self.monitor.closed:
            self._link.disable_monitor()
            self.monitor.close(linger=0)

    def _events(self) -> Iterator[int]:
        while not self.monitor.closed:
            try:
                frames = self.monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield parse_monitor_message(frames)["event"]
