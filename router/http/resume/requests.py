"""How a request resumes a stream, and how one that begins is written down: between HTTP and `Streams`.

A client names the last event it has: in `Last-Event-ID`, as the standard of server-sent events says, with the same
request again or with `GET /v1/streams/ID`, where ID is the id of any event of the stream. The latter takes the request
from the journal. Either way it goes through the endpoint that began the stream, so every endpoint's streams can be
resumed; log probabilities of a prompt are in no journal, and a stream that tells them cannot.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from aiohttp import web

from baton.router.http.access.guard import IDENTITY, RESUME_ROUTE
from baton.router.http.resume.records import Past, StreamHead, ToldFigures, digest_of
from baton.router.http.resume.streams import Kept, Streams
from baton.router.http.serving.bodies import Place
from baton.router.http.serving.body_reader import read_body
from baton.router.requests.output import Delivery
from baton.wire.errors import InvalidRequest, StreamNotFound

LAST_EVENT_ID = "Last-Event-ID"
_MAX_DIGITS = 9
_STREAM_MEMBER = b'"stream"'
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_Deliveries = Sequence[tuple[int, Delivery]]


@dataclass(frozen=True, slots=True)
class Resumed:
    """The stream that a request resumes, whose client has its first `num_received` events."""

    kept: Kept
    head: StreamHead
    num_received: int


@dataclass(frozen=True, slots=True)
class EventIds:
    """The ids of a stream's events: that of the n-th is `stream_id`, a dot and n. The client has the first
    `num_received`."""

    stream_id: str
    num_received: int = 0


@dataclass(slots=True)
class Beginning:
    """What is known of a request before its stream begins."""

    body: bytes
    content_type: str
    stream_id: str = ""
    created: int = 0


STREAMS: Final = web.AppKey("streams", Streams)
RESUMED: Final = web.RequestKey("resumed", Resumed)
BEGINNING: Final = web.RequestKey("beginning", Beginning)


class Resumable(Protocol):
    """What generates the deliveries of a stream."""

    @property
    def has_ended(self) -> bool:
        """Whether every choice has its finish reason."""
        ...

    @property
    def is_scored(self) -> bool:
        """Whether log probabilities of the prompt are told."""
        ...

    @property
    def prompts(self) -> Sequence[Sequence[int]]:
        """The tokens of each prompt."""
        ...

    @property
    def seed(self) -> int:
        """What all its noise is made of."""
        ...

    def go_on_after(self, past: Past) -> None:
        """Begin with these deliveries, and generate what comes after them."""
        ...

    def write_down(self, write: Callable[[_Deliveries | ToldFigures], None]) -> None:
        """Call `write` with all deliveries that come, and with figures, before anybody else gets them."""
        ...


def add_resuming(app: web.Application, streams: Streams) -> None:
    """Let clients of `app` resume streams."""
    app[STREAMS] = streams
    app.router.add_get(RESUME_ROUTE, resume, allow_head=False)


async def resume(http: web.Request) -> web.StreamResponse:
    """What a stream tells after one of its events. Last-Event-ID, if sent, names the event, and otherwise the path."""
    named = http.headers.get(LAST_EVENT_ID) or http.match_info["event_id"]
    resumed = http[RESUMED] = await _look_up(http, http.app[STREAMS], named)
    for resource in http.app.router.resources():
        if resource.canonical == resumed.head.path:
            handler: _Handler = next(route.handler for route in resource if route.method == "POST")
            return await handler(http)
    raise StreamNotFound("this router has no endpoint like the one that began the stream")


async def body_of(http: web.Request, place: Place) -> tuple[bytes, str | None]:
    """The body of a request, and its content type: the one it has, or that of the stream it resumes. Raises as
    `read_body`, and `StreamNotFound`."""
    resumed = http.get(RESUMED)
    if resumed is not None:
        place.add(len(resumed.head.body))
        return resumed.head.body, resumed.head.content_type
    body, content_type = await read_body(http, place), http.headers.get("Content-Type")
    streams = http.app.get(STREAMS)
    if streams is not None:
        if _STREAM_MEMBER in body:  # what is not a stream is not kept in memory while it is answered
            http[BEGINNING] = Beginning(body, content_type or "")
        if LAST_EVENT_ID in http.headers:
            resumed = await _look_up(http, streams, http.headers[LAST_EVENT_ID])
            if resumed.head.path != _path(http) or resumed.head.body != body:
                raise InvalidRequest(f"{LAST_EVENT_ID} is of another request: send the same one again")
            http[RESUMED] = resumed
    return body, content_type


def name_stream(http: web.Request, reply_id: str, created: int) -> tuple[str, int]:
    """The id of the answer and when it was begun: these, or those of the stream that is resumed."""
    resumed, beginning = http.get(RESUMED), http.get(BEGINNING)
    if resumed is not None:
        return resumed.head.stream_id, resumed.head.created
    if beginning is not None:
        beginning.stream_id, beginning.created = reply_id, created
    return reply_id, created


def seed_of_stream(http: web.Request) -> int | None:
    """The seed of the stream that is resumed, None when there is none."""
    resumed = http.get(RESUMED)
    return None if resumed is None else resumed.head.seed


@asynccontextmanager
async def followed(http: web.Request, answer: Resumable) -> AsyncIterator[EventIds | None]:
    """While the stream of `answer` is written: it is in a journal. Returns the ids of its events, None when it cannot
    be resumed. Raises `StreamNotFound`."""
    streams, resumed = http.app.get(STREAMS), http.get(RESUMED)
    kept: Kept | None = None
    if streams is not None and resumed is not None:
        kept = resumed.kept
        past = await streams.take_up(kept)
        if digest_of(answer.prompts) != resumed.head.prompt_digest:
            raise StreamNotFound("the stream cannot be resumed: its prompt would be another one by now")
        answer.go_on_after(past)
    elif streams is not None and not answer.is_scored and BEGINNING in http:
        kept = streams.begin(_head(http, http[BEGINNING], answer))
        del http[BEGINNING]  # the body is in the journal
    if streams is None or kept is None:
        yield None
        return
    answer.write_down(partial(streams.add, kept))
    with streams.reading(kept, partial(_break_off, http)):
        try:
            yield EventIds(kept.stream_id, 0 if resumed is None else resumed.num_received)
        finally:
            kept.has_ended = answer.has_ended


def _head(http: web.Request, beginning: Beginning, answer: Resumable) -> StreamHead:
    return StreamHead(
        beginning.stream_id,
        _owner(http),
        _path(http),
        beginning.content_type,
        beginning.body,
        beginning.created,
        answer.seed,
        digest_of(answer.prompts),
    )


async def _look_up(http: web.Request, streams: Streams, event_id: str) -> Resumed:
    stream_id, _, number = event_id.rpartition(".")
    if not (number.isascii() and number.isdigit() and len(number) <= _MAX_DIGITS):
        raise StreamNotFound("this is not the id of an event")
    kept, head = await streams.find(stream_id, _owner(http))
    return Resumed(kept, head, int(number))


def _path(http: web.Request) -> str:
    return http.path.rstrip("/")  # each route has a twin with a slash


def _owner(http: web.Request) -> str:
    identity = http.get(IDENTITY)
    return "" if identity is None else identity.name


def _break_off(http: web.Request) -> None:
    if http.transport is not None:
        http.transport.abort()
