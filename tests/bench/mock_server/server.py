"""The mock server: answers in OpenAI's format by its schedule and records when it did.

It runs on the event loop of whoever starts it; its stamps are `time.monotonic()`, taken right before a write is handed
to the socket. The text of every token is " word".

Invariant: a chunk is written when it is due or later, never before, and its record says when.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from baton.bench.client.driver import sleep_until
from tests.bench.mock_server.schedule import Answer, FaultKind, Schedule

_STALL_S = 3600.0
_RESETS = struct.pack("ii", 1, 0)
_EVENTS = {"Content-Type": "text/event-stream; charset=utf-8"}
_CHAT_PATH = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class MockOptions:
    """The port on which the server listens (0: any), and what it says it is."""

    port: int = 0
    model: str = "mock"
    owned_by: str = "mock"


@dataclass(slots=True)
class Record:
    """One request. `written_s[i]` is when token i was written; `left_s` when the client was found to be gone."""

    path: str
    received_s: float
    headers: Mapping[str, str]
    body: dict[str, Any] = field(default_factory=dict)
    written_s: list[float] = field(default_factory=list)
    left_s: float | None = None


@asynccontextmanager
async def mock_server(schedule: Schedule, options: MockOptions | None = None) -> AsyncIterator[MockServer]:
    """A running server; what still runs at the end is broken off."""
    options = options or MockOptions()
    server = MockServer(schedule, options)
    runner = web.AppRunner(server.app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", options.port).start()
        server.url = "http://{}:{}".format(*runner.addresses[0][:2])
        yield server
    finally:
        server.is_closing = True
        await runner.cleanup()


class MockServer:
    """Use `mock_server`. `url` is where it listens, `is_closing` whether it breaks answers off itself."""

    def __init__(self, schedule: Schedule, options: MockOptions) -> None:
        self._schedule = schedule
        self._options = options
        self._num_in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.records: list[Record] = []
        self.url = ""
        self.is_closing = False
        self.app = web.Application()
        self.app.router.add_get("/v1/models", self._models)
        for path in ("/v1/completions", _CHAT_PATH):
            self.app.router.add_post(path, self._generate)

    async def until_idle(self, timeout_s: float) -> None:
        """Wait until no request is being answered. Raises `TimeoutError`."""
        async with asyncio.timeout(timeout_s):
            await self._idle.wait()

    async def _models(self, _: web.Request) -> web.Response:
        model = {"id": self._options.model, "object": "model", "owned_by": self._options.owned_by, "created": 0}
        return web.json_response({"object": "list", "data": [model]})

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        record, number = Record(http.path, time.monotonic(), http.headers), len(self.records)
        self.records.append(record)
        self._num_in_flight += 1
        self._idle.clear()
        try:
            record.body = await http.json()
            num_asked = record.body.get("max_tokens") or record.body.get("max_completion_tokens") or 16
            return await _Reply(http, record, num_asked, self._schedule.answer(number, num_asked)).send()
        except (asyncio.CancelledError, ConnectionError):
            if not self.is_closing:
                record.left_s = time.monotonic()
            raise
        finally:
            self._num_in_flight -= 1
            if not self._num_in_flight:
                self._idle.set()


class _Reply:
    """One answer."""

    def __init__(self, http: web.Request, record: Record, num_asked: int, answer: Answer) -> None:
        self._http = http
        self._record = record
        self._num_asked = num_asked
        self._due_s = [record.received_s + due_s for due_s in answer.due_s]
        self._fault = answer.fault
        self._is_chat = http.path == _CHAT_PATH
        self._response = web.StreamResponse(headers=_EVENTS)

    async def send(self) -> web.StreamResponse:
        fault, num = self._fault, len(self._due_s)
        if fault is not None and fault.kind is FaultKind.HTTP_ERROR:
            return web.json_response({"error": {"message": fault.message}}, status=fault.status)
        if not self._record.body.get("stream"):
            await sleep_until(self._due_s[-1])
            return web.json_response({"object": "text_completion", "choices": [{"text": " word"}]})
        await self._write_tokens(num if fault is None else min(fault.after_chunks, num))
        if fault is not None:
            await self._break(fault.kind)
        else:
            await self._write(_sse({"choices": [], "usage": self._usage()}) + b"data: [DONE]\n\n")
            await self._response.write_eof()
        return self._response

    async def _write_tokens(self, count: int) -> None:
        for place, due_s in enumerate(self._due_s[:count]):
            opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            events = _sse({"choices": [opening]}) if self._is_chat and not place else b""
            await sleep_until(due_s)
            self._record.written_s.append(await self._write(events + _sse({"choices": [self._choice(place)]})))

    async def _write(self, data: bytes) -> float:
        """Write and return when that began."""
        if not self._response.prepared:
            await self._response.prepare(self._http)
        now_s = time.monotonic()
        await self._response.write(data)
        return now_s

    async def _break(self, kind: FaultKind) -> None:
        if kind is FaultKind.STALL:
            await asyncio.sleep(_STALL_S)
        if (transport := self._http.transport) is not None:
            if kind is FaultKind.RESET:
                transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESETS)
                transport.abort()
            transport.close()

    def _choice(self, place: int) -> dict[str, Any]:
        is_last = place + 1 == len(self._due_s)
        finish = "length" if len(self._due_s) >= self._num_asked else "stop"
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish if is_last else None}
        choice |= {"delta": {"content": " word"}} if self._is_chat else {"text": " word"}
        return choice

    def _usage(self) -> dict[str, Any]:
        """The tokens of a prompt are ids, or words where it is text."""
        body, num_output = self._record.body, len(self._due_s)
        prompt = body.get("prompt") or " ".join(str(message["content"]) for message in body["messages"])
        num_prompt = len(prompt if isinstance(prompt, list) else prompt.split())
        usage = {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output}
        drafts = {"ngram": {"steps": 1, "tokens": 2, "accepted": 1}}
        details = {"prompt_tokens_details": {"cached_tokens": 0}, "completion_tokens_details": {"drafts": drafts}}
        return {**usage, **details}


def _sse(payload: dict[str, Any]) -> bytes:
    """`payload` as one server-sent event."""
    return b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n"
