"""Serves the page at `/`, the files that it loads, and one stream of events.

Owns the number of watchers and the headers of the files. The files hold nothing of this deployment, so they need no key
(`router/http/access/guard.py` lists their routes); the stream does, as every other route. Nothing runs for the page
while nobody watches: the only timer is that of a watcher's own request, and a watcher that reads slowly gets fewer
documents, never a queue of them.

The content policy lets a browser run the files and nothing else. It loads nothing from elsewhere, and because of the
trusted types that there are none of, no script can turn text into markup.
"""

from __future__ import annotations

import asyncio
import re
from hashlib import blake2b
from pathlib import Path
from typing import Final

from aiohttp import web

from baton.router.http.openai.event_writer import EventWriter
from baton.router.http.page.relay_view import INTERVAL_S, RelayView
from baton.wire.errors import Overloaded

MAX_WATCHERS = 8
REPEAT_S = 2.0
"""An unchanged document is sent again after so long, which tells the page that the router lives."""
EVENTS_PATH: Final = "/page/events"
FOLDER: Final = Path(__file__).parent / "files"
INDEX: Final = "index.html"
_RETRY_S = 10
_MEDIA_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_HAS_VERSION = re.compile(r"-\d+\.\d+\.\d+\.")
_ASK_AGAIN, _FOR_A_YEAR = "no-cache", "public, max-age=31536000, immutable"


class Page:
    """The page of one router, over a view of its relay."""

    def __init__(self, view: RelayView) -> None:
        self.num_watchers = 0
        self._view = view
        self._files = {path.name: _PageFile(path) for path in FOLDER.iterdir() if path.suffix in _MEDIA_TYPES}

    def add_routes(self, app: web.Application) -> None:
        """Add the routes to `app`."""
        app.router.add_get("/", self.index)
        app.router.add_get("/page/files/{name}", self.file)
        app.router.add_get(EVENTS_PATH, self.watch, allow_head=False)

    async def index(self, http: web.Request) -> web.Response:
        """`GET /`."""
        return self._files[INDEX].answer(http)

    async def file(self, http: web.Request) -> web.Response:
        """`GET /page/files/{name}`."""
        found = self._files.get(http.match_info["name"])
        if found is None:
            raise web.HTTPNotFound
        return found.answer(http)

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


class _PageFile:
    """One file, read once. A browser keeps it, and asks whether it has changed unless its name has a version."""

    def __init__(self, path: Path) -> None:
        self._content = path.read_bytes()
        self._media_type = _MEDIA_TYPES[path.suffix]
        self._etag = blake2b(self._content, digest_size=16).hexdigest()
        self._caching = _FOR_A_YEAR if _HAS_VERSION.search(path.name) else _ASK_AGAIN

    def answer(self, http: web.Request) -> web.Response:
        """The file, or that it is still the same."""
        headers = {**_HEADERS, "Cache-Control": self._caching, "ETag": f'"{self._etag}"'}
        if any(each.value == self._etag for each in http.if_none_match or ()):
            return web.Response(status=304, headers=headers)
        return web.Response(body=self._content, content_type=self._media_type, charset="utf-8", headers=headers)
