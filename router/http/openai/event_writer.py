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

    async def write(self, piece: bytes) -> None:
        """Send the events in `piece`. Raises as `BodyWriter.write`."""
        piece = self._numbered(piece)
        if piece or not self.has_begun:
            await super().write(piece)

    async def finish(self, piece: bytes) -> None:
        """The last events. Raises as `BodyWriter.write`."""
        await super().finish(self._numbered(piece))

    async def break_off(self, piece: bytes) -> None:
        """See `BodyWriter`."""
        self._ids = None
        await super().break_off(piece)

    def _numbered(self, piece: bytes) -> bytes:
        if self._ids is None:
            return piece
        events: list[bytes] = []
        for event in piece.split(_END)[:-1]:
            self._num_events += 1
            if self._num_events > self._ids.num_received:
                events.append(b"id: %b.%d\n%b\n\n" % (self._ids.stream_id.encode(), self._num_events, event))
        return b"".join(events)
