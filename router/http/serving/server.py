"""The HTTP server of a router: listens, makes a `Connection` of every client, and closes all of them at the end.

Owns the listening socket and what is decided before any handler: a body that is declared too large is refused before
it is read, and an error that HTTP itself raises is answered in the envelope.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Self

from aiohttp import web

from baton.router.http.access.guard import LIFE_ROUTES
from baton.router.http.serving.connection import Connection, ConnectionCounts
from baton.router.http.serving.errors import error_answer
from baton.router.http.serving.limits import HTTP_LIMITS, HttpLimits
from baton.router.http.serving.listener import MAX_WAITING, Listener
from baton.router.http.serving.turns import Turns

_OTHER_FILES = 128
Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class HttpServer:
    """Serves `app` with the limits it has under `HTTP_LIMITS`. Async context manager: leaving it ends all
    connections, after `close_s` at the latest."""

    def __init__(self, app: web.Application, close_s: float) -> None:
        limits = app.get(HTTP_LIMITS, HttpLimits())
        self._limits = replace(limits, max_connections=min(limits.max_connections, _files_for(limits.max_connections)))
        # without handler_cancellation a client that leaves would keep its request running on the nodes
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=close_s)
        self.connections = ConnectionCounts(self._limits.max_connections, self._limits.max_connections_per_address)
        self._listeners: list[Listener] = []

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        server.request_handler = Gate(server.request_handler)
        return self

    async def __aexit__(self, *_: object) -> None:
        for listener in self._listeners:
            listener.close()
        await self._runner.cleanup()

    async def listen(
        self,
        host: str | None = None,
        port: int = 0,
        socks: Sequence[socket.socket] = (),
        ssl_context: ssl.SSLContext | None = None,
    ) -> tuple[str, int]:
        """Listen at `host` and `port`, or with `socks`; host and port that clients reach. Raises `OSError`."""
        loop, server = asyncio.get_running_loop(), self._runner.server
        assert server is not None

        def make_connection() -> Connection:
            return Connection(server, self._limits, self.connections, loop)

        for sock in socks or (None,):
            place = {"host": host, "port": port} if sock is None else {"sock": sock}
            bound = await loop.create_server(make_connection, **place, start_serving=False)
            self._listeners.append(Listener(bound, make_connection, ssl_context))
        return self._listeners[0].address


class Gate:
    """Passes every request before aiohttp looks for its route, and every answer afterwards. A question whether the
    router lives does not wait behind a crowd of other requests."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._turns = Turns()
        self._turns_of_probes = Turns()

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        assert isinstance(connection, Connection)
        connection.begin(request)
        try:
            is_probe = request.path.rstrip("/") in LIFE_ROUTES
            await (self._turns_of_probes if is_probe else self._turns).take()
            response = await self._handle(request)
            if not response.prepared and (connection.is_broken or not request.content.is_eof()):
                response.force_close()
            return response
        finally:
            connection.end()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if (request.content_length or 0) > request.client_max_size:
            return error_answer(413)  # before `100 Continue`, which aiohttp sends when it has found the route
        try:
            return await self._handler(request)
        except web.HTTPException as error:
            return error_answer(error.status)


def _files_for(wanted: int) -> int:
    """Connections that the system lets this process have, once its limit of open files is raised to what it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + MAX_WAITING + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if soft == resource.RLIM_INFINITY else max(1, soft - _OTHER_FILES)
