"""Answers a request with JSON: a small answer at once, a large one in pieces.

Owns the order of encoding and writing. Between two pieces all other tasks of the event loop get their turn, so an
answer of any size stops no stream; no more than a few pieces exist at a time, because the next one is made when the
client has taken enough of the last.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from aiohttp import web

from baton.router.http.serving.body_writer import BodyWriter
from baton.router.http.serving.json_pieces import json_pieces
from baton.router.http.serving.limits import limits_of

_HEADERS = {"Content-Type": "application/json; charset=utf-8"}
_log = logging.getLogger(__name__)


async def json_answer(http: web.Request, payload: dict[str, Any]) -> web.StreamResponse:
    """The answer to `http`. A large one has been written when this returns.

    A failure in the middle ends the connection without ending the response, so that a cut answer never looks whole.
    """
    pieces = json_pieces(payload)
    first, second = next(pieces), next(pieces, None)
    if second is None:
        return web.Response(body=first, content_type="application/json", charset="utf-8")
    with BodyWriter(http, _HEADERS, limits_of(http).write_s) as writer:
        try:
            await writer.write(first)
            await asyncio.sleep(0)
            await writer.write(second)
            for piece in pieces:
                await asyncio.sleep(0)
                await writer.write(piece)
            await writer.finish(b"")
        except ConnectionError as error:
            _log.debug("a client is gone: %s", error)
    return writer.response
