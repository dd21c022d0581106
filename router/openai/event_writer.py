"""Writes a stream of server-sent events to one client.

Owns the response and the deadline of its writes: a client that reads nothing for `WRITE_TIMEOUT_S` is dropped. One
timer for the whole stream checks how long the current write has been running, so that a single write needs no timer.
Memory is bounded by aiohttp, whose write waits when the client has not read enough.
"""

from __future__ import annotations

import asyncio
import logging

from aiohttp import web

WRITE_TIMEOUT_S = 30.0
_log = logging.getLogger(__name__)


class EventWriter:
    """Sends its headers with the first events. Context manager: leaving it stops the timer."""

    def __init__(self, http: web.Request) -> None:
        headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        self.response = web.StreamResponse(headers=headers)
        self.has_begun = False
        self._http = http
        self._loop = asyncio.get_running_loop()
        self._writing_since_s: float | None = None
        self._timer = self._loop.call_later(WRITE_TIMEOUT_S, self._check)

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    async def write(self, events: bytes) -> None:
        """Send `events`. Raises `ConnectionError`, or is cancelled, when the client is gone or reads nothing."""
        self._writing_since_s = self._loop.time()
        if not self.has_begun:
            await self._begin()
        await self.response.write(events)
        self._writing_since_s = None

    async def finish(self, events: bytes) -> None:
        """The last events and the regular end of the response. Raises as `write`."""
        self._writing_since_s = self._loop.time()
        if not self.has_begun:
            await self._begin()
        await self.response.write_eof(events)
        self._writing_since_s = None

    async def break_off(self, events: bytes) -> None:
        """Send `events`, then end the connection without ending the response. Raises as `write`."""
        await self.write(events)
        if self._http.transport is not None:
            self._http.transport.close()

    async def _begin(self) -> None:
        self.has_begun = True
        await self.response.prepare(self._http)

    def _check(self) -> None:
        now_s = self._loop.time()
        due_s = (now_s if self._writing_since_s is None else self._writing_since_s) + WRITE_TIMEOUT_S
        if now_s < due_s:
            self._timer = self._loop.call_at(due_s, self._check)
        elif self._http.transport is not None:
            _log.debug("a client read nothing for %g s", WRITE_TIMEOUT_S)
            self._http.transport.abort()
