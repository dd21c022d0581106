"""Writes the body of one answer to one client, piece by piece.

Owns the response and the deadline of its writes: a client that takes nothing for `limits.write_s` is dropped. One timer
for the whole answer checks how long the current write has been running, so that a single write needs no timer. Memory
is bounded by aiohttp, whose write waits when the client has not read enough.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping
from typing import Self

from aiohttp import web

_log = logging.getLogger(__name__)


class BodyWriter:
    """Sends its headers with the first piece. Context manager: leaving it stops the timer."""

    def __init__(self, http: web.Request, headers: Mapping[str, str], timeout_s: float) -> None:
        self.response = web.StreamResponse(headers=headers)
        self.has_begun = False
        self._http = http
        # clients that stopped reading together are not dropped together, which would hold the loop
        self._timeout_s = timeout_s * random.uniform(1.0, 1.1)
        self._loop = asyncio.get_running_loop()
        self._writing_since_s: float | None = None
        self._timer = self._loop.call_later(self._timeout_s, self._check)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    async def write(self, piece: bytes) -> None:
        """Send `piece`. Raises `ConnectionError`, or is cancelled, when the client is gone or reads nothing."""
        self._writing_since_s = self._loop.time()
        if not self.has_begun:
            await self._begin()
        await self.response.write(piece)
        self._writing_since_s = None

    async def finish(self, piece: bytes) -> None:
        """The last piece and the regular end of the response. Raises as `write`."""
        self._writing_since_s = self._loop.time()
        if not self.has_begun:
            await self._begin()
        await self.response.write_eof(piece)
        self._writing_since_s = None

    async def break_off(self, piece: bytes) -> None:
        """Send `piece`, then end the connection without ending the response. Raises as `write`."""
        await self.write(piece)
        if self._http.transport is not None:
            self._http.transport.close()

    async def _begin(self) -> None:
        self.has_begun = True
        await self.response.prepare(self._http)

    def _check(self) -> None:
        now_s = self._loop.time()
        due_s = (now_s if self._writing_since_s is None else self._writing_since_s) + self._timeout_s
        if now_s < due_s:
            self._timer = self._loop.call_at(due_s, self._check)
        elif self._http.transport is not None:
            _log.debug("a client read nothing for %g s", self._timeout_s)
            self._http.transport.abort()
