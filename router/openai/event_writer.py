"""Writes a stream of server-sent events to one client; `BodyWriter` owns the deadline of its writes."""

from __future__ import annotations

from aiohttp import web

from router.http.body_writer import BodyWriter
from router.http.limits import limits_of

_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


class EventWriter(BodyWriter):
    """A `BodyWriter` for events."""

    def __init__(self, http: web.Request) -> None:
        super().__init__(http, _HEADERS, limits_of(http).write_s)
