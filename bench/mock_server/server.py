"""The mock server itself: answers by its schedule and records when it did.

Owns the sockets, the numbering of requests and the records. It runs on the event loop of whoever starts it; its stamps
are `time.monotonic()`, taken right before a write is handed to the socket.

Invariant: a chunk is written when it is due or later, never before, and its record says when.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from bench.arguments import checked
from bench.client.clock import sleep_until
from bench.mock_server.reply import ChatQuestion, CompletionQuestion, Question, Reply, sse_event
from bench.mock_server.schedule import Fault, FaultKind, Schedule
from wire.errors import InvalidSetting

_CLOSE_TIMEOUT_S = 0.1
_MAX_BODY_BYTES = 64 * 2**20
_STALL_S = 3600.0
_RESETS = struct.pack("ii", 1, 0)
_EVENTS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


@dataclass(frozen=True, slots=True)
class MockOptions:
    """Where the server listens (port 0: any) and what it says it is. The last `max_records` requests are recorded."""

    host: str = "127.0.0.1"
    port: int = 0
    model: str = "mock"
    owned_by: str = "mock"
    max_records: int = 10_000


@dataclass(slots=True)
class Record:
    """One request. `written_s[i]` is when chunk i was written; `left_s` when the client was found to be gone.

    `client_port` tells connections apart.
    """

    number: int
    path: str
    client_port: int
    received_s: float
    headers: Mapping[str, str]
    body: dict[str, Any] = field(default_factory=dict)
    written_s: list[float] = field(default_factory=list)
    left_s: float | None = None


@asynccontextmanager
async def mock_server(schedule: Schedule, options: MockOptions | None = None) -> AsyncIterator[MockServer]:
    """A running server. Raises `InvalidSetting` when it cannot listen."""
    server = MockServer(schedule, options or MockOptions())
    await server.start()
    try:
        yield server
    finally:
        await server.close()


class MockServer:
    """Use `mock_server`."""

    def __init__(self, schedule: Schedule, options: MockOptions) -> None:
        self._schedule = schedule
        self._options = options
        self._num_requests = 0
        self._num_in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_closing = False
        self._created = int(time.time())
        self.records: deque[Record] = deque(maxlen=options.max_records)
        self.url = ""
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._generate)
        app.router.add_post("/v1/chat/completions", self._generate)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=_CLOSE_TIMEOUT_S)

    async def start(self) -> None:
        """Listen; `url` is then known. Raises `InvalidSetting`."""
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._options.host, self._options.port).start()
        except OSError as error:
            await self._runner.cleanup()
            address = f"{self._options.host}:{self._options.port}"
            raise InvalidSetting(f"cannot listen on {address}: {error.strerror or error}") from None
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def close(self) -> None:
        """Break off what runs and free the port."""
        self._is_closing = True
        await self._runner.cleanup()

    async def until_idle(self, timeout_s: float) -> None:
        """Wait until no request is being answered. Raises `TimeoutError`."""
        async with asyncio.timeout(timeout_s):
            await self._idle.wait()

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _: web.Request) -> web.Response:
        model = {"id": self._options.model, "object": "model", "created": self._created}
        return web.json_response({"object": "list", "data": [model | {"owned_by": self._options.owned_by}]})

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        peer = http.transport.get_extra_info("peername") if http.transport is not None else None
        record = Record(self._num_requests, http.path, peer[1] if peer else 0, time.monotonic(), http.headers)
        self.records.append(record)
        self._num_requests += 1
        self._num_in_flight += 1
        self._idle.clear()
        try:
            return await self._answer(http, record)
        except ValueError:
            return _error(400, "the body is not JSON")
        except InvalidSetting as error:
            return _error(400, str(error))
        except (asyncio.CancelledError, ConnectionError):
            if not self._is_closing:
                record.left_s = time.monotonic()
            raise
        finally:
            self._num_in_flight -= 1
            if not self._num_in_flight:
                self._idle.set()

    async def _answer(self, http: web.Request, record: Record) -> web.StreamResponse:
        record.body = await http.json()
        kind: type[Question] = ChatQuestion if http.path.endswith("/chat/completions") else CompletionQuestion
        question = checked(kind, record.body, "")
        answer = self._schedule.answer(record.number, question.num_output_tokens)
        reply = Reply(question, answer, record.number, self._created)
        if answer.fault is not None and answer.fault.kind is FaultKind.HTTP_ERROR:
            return _error(answer.fault.status, answer.fault.message)
        if question.stream and not answer.has(FaultKind.NOT_EVENTS):
            return await _Stream(http, record, reply).run()
        await sleep_until(record.received_s + answer.writes()[-1][0])
        record.written_s.append(time.monotonic())
        return web.json_response(reply.whole(record.received_s, record.written_s))


class _Stream:
    """One answer as events."""

    def __init__(self, http: web.Request, record: Record, reply: Reply) -> None:
        self._http = http
        self._record = record
        self._reply = reply
        self._response = web.StreamResponse(headers=_EVENTS)

    async def run(self) -> web.StreamResponse:
        answer, fault = self._reply.answer, self._reply.answer.fault
        if fault is not None and fault.kind.breaks_stream:
            await self._write_chunks(min(fault.after_chunks, answer.num_chunks))
            await self._break(fault)
            return self._response
        if not answer.has(FaultKind.NO_CHOICES):
            await self._write_chunks(answer.num_chunks)
        await self._write(self._reply.ending(self._record.received_s, self._record.written_s))
        await self._response.write_eof()
        return self._response

    async def _write_chunks(self, limit: int) -> None:
        begin = 0
        for offset_s, end in self._reply.answer.writes():
            end = min(end, limit)
            if begin >= end:
                return
            events = b"".join(self._reply.chunk(place) for place in range(begin, end))
            await sleep_until(self._record.received_s + offset_s)
            written_s = await self._write((b"" if begin else self._reply.opening()) + events)
            self._record.written_s.extend([written_s] * (end - begin))
            begin = end

    async def _write(self, data: bytes) -> float:
        """Write and return when that began."""
        if not self._response.prepared:
            await self._response.prepare(self._http)
        now_s = time.monotonic()
        await self._response.write(data)
        return now_s

    async def _break(self, fault: Fault) -> None:
        transport = self._http.transport
        match fault.kind:
            case FaultKind.STALL:
                await asyncio.sleep(_STALL_S)
            case FaultKind.NO_DONE:
                await self._write(b": no [DONE] follows\n\n")
                await self._response.write_eof()
                return
            case FaultKind.ERROR_EVENT:
                error = {"message": fault.message, "type": "server_error", "code": None}
                await self._write(sse_event({"error": error}))
            case FaultKind.BAD_JSON:
                await self._write(b'data: {"choices":[{\n\n')
            case FaultKind.RESET if transport is not None:
                transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESETS)
                transport.abort()
        if transport is not None:
            transport.close()


def _error(status: int, message: str) -> web.Response:
    return web.json_response(
        {"error": {"message": message, "type": "mock_error", "param": None, "code": None}}, status=status
    )
