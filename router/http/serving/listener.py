"""Takes connections from listening sockets at once, and lets them begin a few at a time, probes first.

Owns the lines in which accepted sockets wait. An event loop that takes connections itself makes a protocol of each
before it takes the next one (uvloop: one in a turn), so of thousands that come together the last wait for seconds in
the system's line. What that line has no room for is dropped, and comes back after 1, 3 or 7 s. Here a socket that waits
costs next to nothing, and one whose first bytes ask whether the router lives begins before all others.

Over TLS nobody can see what a connection will ask, so all begin in the order of their arrival. Lives on one event loop.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections import deque
from collections.abc import Callable

from baton.router.http.access.guard import LIFE_ROUTES

MAX_WAITING = 4096
"""Sockets that may wait here; the others wait in the system's line."""
_BACKLOG = 8192  # the system takes as much of it as it allows (net.core.somaxconn)
_ACCEPTED_PER_TURN, _BEGUN_PER_TURN = 256, 16
_WITHOUT_FILES_S = 1.0
_PROBES = tuple(f"GET {path}".encode() for path in LIFE_ROUTES)
_MOST_SEEN = max(map(len, _PROBES))


class Listener:
    """Serves the sockets of `server`, which does not serve them itself. Its connections are made by `make`."""

    def __init__(
        self, server: asyncio.Server, make: Callable[[], asyncio.Protocol], ssl_context: ssl.SSLContext | None
    ) -> None:
        self._server = server
        self._make = make
        self._ssl = ssl_context
        self._loop = asyncio.get_running_loop()
        self._silent: deque[socket.socket] = deque()
        self._probes: deque[socket.socket] = deque()
        self._others: deque[socket.socket] = deque()
        self._next: asyncio.Handle | None = None
        self._beginning: set[asyncio.Task[None]] = set()
        self._sockets = [socket.socket(fileno=os.dup(each.fileno())) for each in server.sockets]
        for listening in self._sockets:
            listening.setblocking(False)
            listening.listen(_BACKLOG)
            self._loop.add_reader(listening, self._accept, listening)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the first socket."""
        found = self._sockets[0].getsockname()
        return str(found[0]), int(found[1])

    def close(self) -> None:
        """Take no more, and close what waits."""
        if self._next is not None:
            self._next.cancel()
        for listening in self._sockets:
            self._loop.remove_reader(listening)
        for task in self._beginning:
            task.cancel()
        for each in (*self._sockets, *self._silent, *self._probes, *self._others):
            each.close()
        self._sockets = []
        self._server.close()

    @property
    def _num_waiting(self) -> int:
        return len(self._silent) + len(self._probes) + len(self._others)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(min(_ACCEPTED_PER_TURN, MAX_WAITING - self._num_waiting)):
            try:
                accepted, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError:  # no descriptor or memory for it now
                self._loop.remove_reader(listening)
                self._loop.call_later(_WITHOUT_FILES_S, self._listen_again, listening)
                break
            accepted.setblocking(False)
            self._put(accepted, self._silent)
        if self._num_waiting and self._next is None:
            self._next = self._loop.call_soon(self._begin)

    def _listen_again(self, listening: socket.socket) -> None:
        if listening in self._sockets:
            self._loop.add_reader(listening, self._accept, listening)

    def _put(self, accepted: socket.socket, if_silent: deque[socket.socket]) -> None:
        """Into the line where it belongs by its first bytes."""
        try:
            seen = accepted.recv(_MOST_SEEN, socket.MSG_PEEK)
        except BlockingIOError:
            if_silent.append(accepted)
            return
        except OSError:
            seen = b""
        (self._probes if seen.startswith(_PROBES) else self._others).append(accepted)

    def _begin(self) -> None:
        self._next = None
        for _ in range(len(self._silent)):  # they had one more turn to say something
            self._put(self._silent.popleft(), self._others)
        for _ in range(min(_BEGUN_PER_TURN, self._num_waiting)):
            line = self._probes or self._others
            task = self._loop.create_task(self._connect(line.popleft()))
            self._beginning.add(task)
            task.add_done_callback(self._beginning.discard)
        if self._num_waiting:
            self._next = self._loop.call_soon(self._begin)

    async def _connect(self, accepted: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make, accepted, ssl=self._ssl)
        except OSError:  # gone already, or no TLS
            accepted.close()
