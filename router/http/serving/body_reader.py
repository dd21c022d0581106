"""Reads the body of a request: as its headers say, no longer and no larger than the limits allow.

Owns the deadlines of a body and its content encodings. A compressed body is decompressed here and not by aiohttp, so
that its limit holds for every piece and a body that is cut short is noticed. Invariant: no more than the largest
allowed body and one piece is in memory, and what is, is counted in the body's `Place`.
"""

from __future__ import annotations

import asyncio
import zlib

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from baton.router.http.serving.bodies import Place
from baton.router.http.serving.limits import limits_of
from baton.wire.errors import InvalidRequest, UnsupportedMediaType

_PIECE_BYTES = 2**16
_GZIP_BITS, _ZLIB_BITS, _RAW_BITS = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS
_DEFLATE_METHOD = 8


async def read_body(http: web.Request, place: Place) -> bytes:
    """The whole body, decompressed.

    Raises:
        UnsupportedMediaType: its content encoding is not read here.
        InvalidRequest: it is not what its headers say, or cut short.
        web.HTTPRequestEntityTooLarge, web.HTTPRequestTimeout: it is larger or slower than the limits allow.
        Overloaded: other bodies leave no room for it.
    """
    limits = limits_of(http)
    intake = _intake(http.headers.get("Content-Encoding", "identity").strip().lower(), http.client_max_size, place)
    loop = asyncio.get_running_loop()
    end_s = loop.time() + limits.body_s
    try:
        async with asyncio.timeout_at(min(end_s, loop.time() + limits.body_stall_s)) as deadline:
            while piece := await http.content.readany():
                deadline.reschedule(end_s)  # what this program does with it is not the client's time
                await intake.add(piece)
                deadline.reschedule(min(end_s, loop.time() + limits.body_stall_s))
    except TimeoutError:
        raise web.HTTPRequestTimeout from None
    except (web.RequestPayloadError, HttpProcessingError):
        raise _damaged() from None
    if getattr(http.protocol, "is_broken", False):
        raise _damaged()
    return intake.finish()


class _Plain:
    """A body that is taken as it comes."""

    def __init__(self, max_bytes: int, place: Place) -> None:
        self._body = bytearray()
        self._max_bytes = max_bytes
        self._place = place

    async def add(self, piece: bytes) -> None:
        """The next bytes. Raises `web.HTTPRequestEntityTooLarge` and `Overloaded`."""
        self._append(piece)

    def finish(self) -> bytes:
        """The body, which is complete. Raises `InvalidRequest` when it is not."""
        return bytes(self._body)

    def _append(self, data: bytes) -> None:
        self._place.add(len(data))
        self._body += data
        if len(self._body) > self._max_bytes:
            raise web.HTTPRequestEntityTooLarge(self._max_bytes, len(self._body))


class _Compressed(_Plain):
    """A body in gzip or deflate. Some clients send deflate without the zlib header that belongs to it."""

    def __init__(self, max_bytes: int, place: Place, encoding: str) -> None:
        super().__init__(max_bytes, place)
        self._encoding = encoding
        self._inflater = zlib.decompressobj(_GZIP_BITS)
        self._has_begun = False

    async def add(self, piece: bytes) -> None:
        if not self._has_begun:
            self._has_begun = True
            if self._encoding == "deflate":
                has_header = piece[0] & 0x0F == _DEFLATE_METHOD
                self._inflater = zlib.decompressobj(_ZLIB_BITS if has_header else _RAW_BITS)
        num_made = _PIECE_BYTES
        while piece or num_made == _PIECE_BYTES:  # the inflater may hold output when it has taken all input
            try:
                made = self._inflater.decompress(piece, _PIECE_BYTES)
            except zlib.error:
                raise _damaged() from None
            if self._inflater.unused_data:
                raise _damaged()
            self._append(made)
            piece, num_made = self._inflater.unconsumed_tail, len(made)
            await asyncio.sleep(0)

    def finish(self) -> bytes:
        if self._has_begun and not self._inflater.eof:
            raise _damaged()
        return bytes(self._body)


def _intake(encoding: str, max_bytes: int, place: Place) -> _Plain:
    if encoding in ("gzip", "deflate"):
        return _Compressed(max_bytes, place, encoding)
    if encoding != "identity":
        raise UnsupportedMediaType("this content encoding is not supported: send the body as it is, or in gzip")
    return _Plain(max_bytes, place)


def _damaged() -> InvalidRequest:
    return InvalidRequest("the body is damaged: it cannot be read as its headers say")
