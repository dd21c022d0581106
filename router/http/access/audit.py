"""The audit log: who asked for how much, one JSON object per line, without a word of what was asked.

Owns the file and its lines. A line is written when a request is over, whatever its end was. Members: `time` (UTC),
`request_id`, `key` (the name of the API key, null without one), `method` and `route` (as the application names it),
`model`, `prompt_tokens` and `completion_tokens` (null where nothing was generated), `is_complete` (whether every choice
has its finish reason), `status` (499: the client left before its end) and `duration_s`.

Invariant: a line holds nothing that a client wrote but a request id, so neither prompts nor keys.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from io import FileIO
from typing import Final, Protocol

from aiohttp import web

from baton.router.http.access.guard import IDENTITY, OPEN_ROUTES
from baton.wire.errors import InvalidSetting

_CLIENT_LEFT = 499
_SERVER_ERROR = 500
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_log = logging.getLogger(__name__)


class Audited(Protocol):
    """The facts for the audit log about the output of a request."""

    @property
    def num_prompt_tokens(self) -> int:
        """The number of tokens of its prompts."""
        ...

    @property
    def num_completion_tokens(self) -> int:
        """The number of tokens generated so far."""
        ...

    @property
    def has_ended(self) -> bool:
        """Whether every choice has its finish reason."""
        ...


@dataclass(frozen=True, slots=True)
class Generation:
    """The model that a request asked for, one that is served, and what comes of it."""

    model: str
    answer: Audited


GENERATION: Final = web.RequestKey("generation", Generation)
"""Set by endpoints that generate, once they have accepted a request."""


class AuditLog:
    """Writes a line for each request that is over. The file is appended to; `reload` opens it again, so that it can be
    rotated by renaming it."""

    def __init__(self, path: str) -> None:
        """Raises `InvalidSetting` when the file cannot be written."""
        self._path = path
        self._is_torn = False
        try:
            self._file = self._open()
        except OSError as error:
            raise InvalidSetting(f"--audit-log {path}: {error.strerror or error}") from None

    def reload(self) -> None:
        """Go on in the file that is at the path now. If it cannot be opened, the old one is kept."""
        try:
            opened = self._open()
        except OSError as error:
            _log.error("the audit log stays where it was: %s", error.strerror or error)
            return
        self._file.close()
        self._file, self._is_torn = opened, False

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def watch(self, app: web.Application) -> None:
        """Write a line for each request to `app` but those about life. It is the outermost middleware, so that it sees
        the answer as the client does."""
        app.middlewares.insert(0, self._record)

    @web.middleware
    async def _record(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        begun_s = time.monotonic()
        response: web.StreamResponse | None = None
        status = _CLIENT_LEFT
        try:
            response = await handler(request)
            status = response.status
            return response
        except Exception as error:  # a broken connection, or a bug; it goes on from here
            status = _CLIENT_LEFT if isinstance(error, ConnectionError) else _SERVER_ERROR
            raise
        finally:
            self._write(request, response, status, time.monotonic() - begun_s)

    def _write(self, request: web.Request, response: web.StreamResponse | None, status: int, duration_s: float) -> None:
        resource = request.match_info.route.resource
        route = None if resource is None else resource.canonical
        if route in OPEN_ROUTES:
            return
        identity = request.get(IDENTITY)
        generation = request.get(GENERATION)
        answer = None if generation is None else generation.answer
        line = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "request_id": None if response is None else response.headers.get("x-request-id"),
            "key": None if identity is None else identity.name,
            "method": request.method if route is not None else None,
            "route": route,
            "model": None if generation is None else generation.model,
            "prompt_tokens": None if answer is None else answer.num_prompt_tokens,
            "completion_tokens": None if answer is None else answer.num_completion_tokens,
            "is_complete": None if answer is None else answer.has_ended,
            "status": status,
            "duration_s": round(duration_s, 6),
        }
        data = b"\n" * self._is_torn + json.dumps(line).encode() + b"\n"
        try:
            self._is_torn = self._file.write(data) < len(data)
            if self._is_torn:
                raise OSError("the disk is full")
        except OSError as error:  # a full disk must not end service; the router's log says that lines are missing
            _log.error("a line of the audit log was lost: %s", error.strerror or error)

    def _open(self) -> FileIO:
        # without a buffer: what a full disk has refused would fail again when the file is closed
        return open(self._path, "ab", buffering=0, opener=_for_the_owner)


def _for_the_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
