"""Writes a stream of server-sent events to one client; `BodyWriter` owns the deadline of its writes.

The one place that numbers events: those of a stream that can be resumed have an `id`, and those that its client has
already are left out. An event that tells an error is none of them: whoever resumes after it gets the answer instead.
"""

from __future__ import annotations

from aiohttp import web

from baton.router.http.resume.requests import EventIds
from baton.router.http.serving.body_writer import BodyWriter
from baton.router.http.serving.limits import limits_of

_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
_END = b"\n\n"


class EventWriter(BodyWriter):
    """A `BodyWriter` for events. `ids`: None when they have none."""

    def __init__(self, http: web.Request, ids: EventIds | None = None) -> None:
        super().__init__(http, _HEADERS, limits_of(http).write_s)
        self._ids = ids
        self._num_events = 0

    @property
    def num_told(self) -> int:
        """How many events the client has been told, by this writer or before its stream was resumed."""
        return self._num_events if self._ids is None else max(self._num_events, self._ids.num_received)

    async def write(self, piece: bytes) -> None:
        """Send the events in `piece`. Raises as `BodyWriter.write`."""
        num_events, numbered = self._numbered(piece)
        if numbered or not self.has_begun:
            await super().write(numbered)
        self._num_events = num_events

    async def finish(self, piece: bytes) -> None:
        """The last events. Raises as `BodyWriter.write`."""
        num_events, numbered = self._numbered(piece)
        await super().finish(numbered)
        self._num_events = num_events

    async def break_off(self, piece: bytes) -> None:
        """Send an event that tells an error, without a number, and end the connection. Raises as `BodyWriter.write`."""
        self._ids = None
        await super().break_off(piece)

    def _numbered(self, piece: bytes) -> tuple[int, bytes]:
        """The number of the last event in `piece`, and what is sent of it."""
        if self._ids is None:
            return self._num_events + piece.count(_END), piece
        number, events = self._num_events, []
        for event in piece.split(_END)[:-1]:
            number += 1
            if number > self._ids.num_received:
                events.append(b"id: %b.%d\n%b\n\n" % (self._ids.stream_id.encode(), number, event))
        return number, b"".join(events)
