"""Serves the page at `/`: three static files and one stream of events.

Owns the number of watchers. The files hold nothing of this deployment, so they need no key (`router/access/guard.py`
lists them); the stream does, as every other route. Nothing runs for the page while nobody watches: the only timer is
that of a watcher's own request, and a watcher that reads slowly gets fewer documents, never a queue of them.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler

from router.openai.event_writer import EventWriter
from router.page.relay_view import INTERVAL_S, RelayView
from wire.errors import Overloaded

MAX_WATCHERS = 8
REPEAT_S = 2.0
"""An unchanged document is sent again after so long, which tells the page that the router lives."""
EVENTS_PATH: Final = "/page/events"
_RETRY_S = 10
_FILES = {
    "/": ("index.html", "text/html"),
    "/page/style.css": ("style.css", "text/css"),
    "/page/page.js": ("page.js", "text/javascript"),
    "/page/icon.svg": ("icon.svg", "image/svg+xml"),
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Page:
    """The page of one router, over a view of its relay."""

    def __init__(self, view: RelayView) -> None:
        self.num_watchers = 0
        self._view = view

    def add_routes(self, app: web.Application) -> None:
        """Add the routes to `app`."""
        folder = Path(__file__).parent
        for path, (name, media_type) in _FILES.items():
            app.router.add_get(path, _serve((folder / name).read_bytes(), media_type))
        app.router.add_get(EVENTS_PATH, self.watch, allow_head=False)

    async def watch(self, http: web.Request) -> web.StreamResponse:
        """The relay as it is now, as server-sent events: whole documents, at most four a second. Raises `Overloaded`
        when too many watch."""
        if self.num_watchers >= MAX_WATCHERS:
            raise Overloaded(f"{self.num_watchers} pages watch this router already", _RETRY_S)
        self.num_watchers += 1
        try:
            with EventWriter(http) as writer:
                await self._write(writer)
                return writer.response
        finally:
            self.num_watchers -= 1

    async def _write(self, writer: EventWriter) -> None:
        loop = asyncio.get_running_loop()
        last, written_s = b"", 0.0
        while not self._view.is_over:
            document = self._view.read()
            if document != last or loop.time() - written_s >= REPEAT_S:
                await writer.write(b"data: %b\n\n" % document)
                last, written_s = document, loop.time()
            await asyncio.sleep(INTERVAL_S)
        await writer.finish(b"data: %b\n\n" % self._view.read())


def _serve(content: bytes, media_type: str) -> Handler:
    async def serve_file(http: web.Request) -> web.StreamResponse:
        """Serve a file of the page at `/`."""
        return web.Response(body=content, content_type=media_type, charset="utf-8", headers=_HEADERS)

    return serve_file
