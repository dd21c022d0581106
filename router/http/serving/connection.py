"""One connection of a client: aiohttp's protocol with deadlines, a place in the count, and errors in the envelope.

Owns when a connection ends that sends nothing, and what a client is told whose bytes are no HTTP. aiohttp owns parsing
and the order of requests. Two of its private members are read: the queue of parsed requests and their count, because
nothing else tells a failed parse, or a request that waits, from silence.

A client that closes its sending side before its answer has begun still gets it. It cannot be told from one that is gone
before something is written to it, so while its request runs it gets `100 Continue` now and then, which every client
skips: for one that is gone the connection breaks, and its request is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from enum import Enum
from typing import Any

from aiohttp import HttpVersion11, web
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader

from baton.router.http.serving.errors import error_answer, parser_status, raw_answer
from baton.router.http.serving.limits import HttpLimits

_REFUSED_S = 1.0
_PROBE_DELAYS_S = (0.05, 0.2, 1.0)
_PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
_log = logging.getLogger(__name__)


class Verdict(Enum):
    """What becomes of a new connection. `REFUSED` ones are told so, `DROPPED` ones are not: there are too many."""

    ADMITTED = "admitted"
    REFUSED = "refused"
    DROPPED = "dropped"


class ConnectionCounts:
    """All open connections of a server and of each client address, those that were refused included until they are
    closed. Lives on one event loop."""

    def __init__(self, max_in_all: int, max_per_address: int) -> None:
        self.num_open = 0
        self.num_refused = 0
        self._max_in_all = max_in_all
        self._max_per_address = max_per_address
        self._num_of: Counter[str] = Counter()

    def opened(self, address: str) -> Verdict:
        """Count a new connection, whatever the verdict."""
        self.num_open += 1
        self._num_of[address] += 1
        if self.num_open <= self._max_in_all and self._num_of[address] <= self._max_per_address:
            return Verdict.ADMITTED
        self.num_refused += 1
        return Verdict.DROPPED if self.num_open > self._max_in_all else Verdict.REFUSED

    def closed(self, address: str) -> None:
        """The connection from `address` is closed."""
        self.num_open -= 1
        self._num_of[address] -= 1
        if not self._num_of[address]:
            del self._num_of[address]


class Connection(web.RequestHandler):
    """Handles one connection. `server` is the one of an `AppRunner`, whose handler is a `Gate`."""

    __slots__ = (
        "_address",
        "_counts",
        "_has_eof",
        "_head_timer",
        "_last_body",
        "_limits",
        "_num_ended",
        "_request",
        "_timer",
        "_verdict",
        "is_broken",
    )

    def __init__(
        self, server: web.Server, limits: HttpLimits, counts: ConnectionCounts, loop: asyncio.AbstractEventLoop
    ) -> None:
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=limits.idle_s,
            access_log=None,  # type: ignore[arg-type]
            max_line_size=limits.max_url_bytes,
            max_field_size=limits.max_header_bytes,
            max_headers=limits.max_headers,
            lingering_time=limits.linger_s,
            auto_decompress=False,
        )
        self.is_broken = False
        self._limits = limits
        self._counts = counts
        self._address = ""
        self._verdict = Verdict.ADMITTED
        self._request: web.BaseRequest | None = None
        self._last_body: StreamReader = EMPTY_PAYLOAD
        self._num_ended = 0
        self._has_eof = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected: it is counted, and refused when there are too many."""
        peer = transport.get_extra_info("peername")
        self._address = str(peer[0]) if peer else ""
        self._verdict = self._counts.opened(self._address)
        if self._verdict is Verdict.ADMITTED:
            super().connection_made(transport)
            self._await_head()
        else:
            self._refuse(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """The connection is closed, by whoever; `exc`: None for a regular end."""
        self._counts.closed(self._address)
        self._cancel_head_timer()
        if self._timer is not None:
            self._timer.cancel()
        if self._verdict is Verdict.ADMITTED:
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes have come: they are parsed, and whatever is no HTTP ends the connection with an answer."""
        if self._verdict is not Verdict.ADMITTED:
            return
        if self._request is None and self._head_timer is None:
            self._await_head()
        try:
            super().data_received(data)
        except ValueError as error:  # of the parser in Python: a length of more digits than Python reads
            self._break_off(error)
            return
        if self._messages:
            message, self._last_body = self._messages[-1]
            if not isinstance(message, RawRequestMessage):
                self._parse_failed()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more. True keeps the connection open for the answers that are due."""
        if self._verdict is not Verdict.ADMITTED or not self._num_due or not self._last_body.is_eof():
            return False
        if self.ssl_context is not None or (self._request is not None and self._request.writer.output_size > 0):
            return False  # TLS has no half-closed connections; a client that waits for an answer ends its part before
        self._has_eof = True
        self._probe_after(0)
        return True

    def begin(self, request: web.BaseRequest) -> None:
        """`request` has been read up to its body, and is handled from now on."""
        self._cancel_head_timer()
        self._request = request

    def end(self) -> None:
        """The request that was begun has been handled."""
        self._request = None
        self._num_ended += 1
        if self._has_eof and not self._num_due:
            self.close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to bytes that are no HTTP, and to a bug: aiohttp's own repeat what the client sent."""
        if request.writer.output_size > 0:
            raise ConnectionError("a second answer to one request")
        if isinstance(exc, HttpProcessingError):
            _log.debug("a request cannot be parsed: %s", type(exc).__name__)
            return error_answer(parser_status(exc, self._limits.max_url_bytes))
        if exc is not None:
            _log.error("a request failed outside of its handler", exc_info=exc)
        return error_answer(status)

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log the error that ended a connection. Errors of parsing hold bytes of the client, which no log may have."""
        error = kw.get("exc_info")
        if isinstance(error, HttpProcessingError | web.RequestPayloadError):
            _log.debug("a connection ended: %s", type(error).__name__)
        else:
            super().log_exception(*args, **kw)

    def _refuse(self, transport: Any) -> None:
        if self._verdict is Verdict.DROPPED:
            transport.abort()
            return
        transport.write(raw_answer(429, "too many connections from this address: close some, or use them again"))
        # closing at once would throw the answer away at a client that is still sending
        self._timer = self._loop.call_later(_REFUSED_S, transport.abort)

    def _await_head(self) -> None:
        self._head_timer = self._loop.call_later(self._limits.header_s, self.force_close)

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    @property
    def _num_due(self) -> int:
        """Requests that have been parsed and not been handled to their end."""
        return self._request_count - self._num_ended

    def _break_off(self, error: ValueError) -> None:
        _log.debug("a request cannot be parsed: %s", type(error).__name__)
        if self.transport is not None and self._request is None:
            self.transport.write(raw_answer(400))
        self.force_close()

    def _parse_failed(self) -> None:
        """Whoever reads a body that will not go on has to hear of it; the parser in C tells nobody."""
        self.is_broken = True
        if self._request is not None and not self._request.content.is_eof():
            self._request.content.feed_eof()

    def _probe_after(self, number: int) -> None:
        delay_s = _PROBE_DELAYS_S[min(number, len(_PROBE_DELAYS_S) - 1)]
        self._timer = self._loop.call_later(delay_s, self._probe, number)

    def _probe(self, number: int) -> None:
        transport, request = self.transport, self._request
        if transport is None or transport.is_closing():
            return
        if request is not None and request.writer.output_size == 0 and request.version >= HttpVersion11:
            transport.write(_PROBE)
        self._probe_after(number + 1)
