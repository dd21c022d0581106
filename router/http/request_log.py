"""The requests in flight and the last ones that ended, as records without text.

Owns the beginning and the end of each record, and the bounds of what is kept: a number of ended requests, and of
flights in them, because one request may have many. Only requests for an answer of the model are recorded: a POST to a
route below `/v1/`. Whoever wants to know of every ended request is an observer.

Owns the ids of requests too: the client's own `X-Request-Id` where it is sane, otherwise a random one. Ids are labels:
they are echoed, logged and looked up, and never reach a node. Two requests may have the same id, because requests in
flight are told apart by their handoff ids, which the router makes itself.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections import deque
from collections.abc import Callable, Sequence

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from baton.router.http.openai.errors import status_of
from baton.router.requests.trace import CURRENT_TRACE, RequestTrace
from baton.runtime.clock import now_us
from baton.runtime.process import FIELDS

HEADER = "X-Request-Id"
REQUEST_ID = web.RequestKey("request_id", str)
_SANE = re.compile(r"[A-Za-z0-9._-]{1,128}", re.ASCII)
DEFAULT_NUM_KEPT = 1000
_FLIGHTS_PER_REQUEST = 4
Observer = Callable[[RequestTrace], None]
_log = logging.getLogger(__name__)


class RequestLog:
    """Records of one router. `observers` are called once for each request that ended."""

    def __init__(self, num_kept: int = DEFAULT_NUM_KEPT, observers: Sequence[Observer] = ()) -> None:
        self._num_kept = num_kept
        self._observers = tuple(observers)
        self._running: dict[int, RequestTrace] = {}
        self._ended: deque[RequestTrace] = deque()
        self._num_flights = 0

    def recent(self) -> list[RequestTrace]:
        """Requests in flight, then those that ended, newest first."""
        return [*reversed(self._running.values()), *reversed(self._ended)]

    def find(self, name: str) -> list[RequestTrace]:
        """The requests with this id, or with a flight of this handoff id (32 hex digits), newest first."""
        return [
            trace
            for trace in self.recent()
            if name == trace.request_id or any(name == flight.handoff_id for flight in trace.flights)
        ]

    def middleware(self) -> Middleware:
        """Records requests. Its place is inside of whatever chooses the request id."""

        @web.middleware
        async def record(request: web.Request, handler: Handler) -> web.StreamResponse:
            is_known = request.match_info.http_exception is None
            generates = request.method == "POST" or request.path.startswith("/v1/streams/")
            if not generates or not is_known or not request.path.startswith("/v1/"):
                return await handler(request)
            trace = RequestTrace(request[REQUEST_ID], request.path, request.headers.get("traceparent", "")[:128])
            token = CURRENT_TRACE.set(trace)
            self.begin(trace)
            try:
                response = await handler(request)
                trace.status = response.status
            except web.HTTPException as error:
                trace.status = error.status
                raise
            except Exception as error:
                trace.status = None if isinstance(error, ConnectionError) else status_of(error)
                raise
            finally:
                CURRENT_TRACE.reset(token)
                self.end(trace)
            return response

        return record

    def begin(self, trace: RequestTrace) -> None:
        """The request is in flight from now on."""
        self._running[id(trace)] = trace

    def end(self, trace: RequestTrace) -> None:
        """The request has its answer, or will never have one. To be called once after `begin`."""
        trace.ended_us = now_us()
        del self._running[id(trace)]
        for observer in self._observers:
            observer(trace)
        if not self._num_kept:
            return
        self._ended.append(trace)
        self._num_flights += len(trace.flights)
        most_flights = self._num_kept * _FLIGHTS_PER_REQUEST
        while len(self._ended) > self._num_kept or (self._num_flights > most_flights and len(self._ended) > 1):
            self._num_flights -= len(self._ended.popleft().flights)


def log_request(trace: RequestTrace) -> None:
    """An observer: one line per request, at level info."""
    _log.info("request ended", extra={FIELDS: request_fields(trace)})


def request_fields(trace: RequestTrace) -> dict[str, object]:
    """The members of a line in the log: times in seconds, each prompt counted once, tokens of all choices together."""
    flights = trace.flights
    return {
        "request_id": trace.request_id,
        "path": trace.path,
        "model": trace.model,
        "status": trace.status,
        "end": trace.end,
        "finish_reasons": ",".join(sorted({flight.finish_reason for flight in flights} - {""})),
        "num_choices": len(flights),
        "num_prompt_tokens": trace.num_prompt_tokens,
        "num_output_tokens": sum(flight.num_output_tokens for flight in flights),
        "num_attempts": trace.num_attempts,
        "ttft_s": trace.after_us(trace.first_token_us),
        "duration_s": trace.after_us(trace.ended_us),
    }


def choose_request_id(http: web.Request) -> str:
    """The id that this request has from now on. An id with other characters, or a second one, is not used."""
    given = http.headers.getall(HEADER, ())
    return given[0] if len(given) == 1 and _SANE.fullmatch(given[0]) else secrets.token_hex(16)
