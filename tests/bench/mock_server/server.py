"""The mock server itself: answers in OpenAI's format by its schedule and records when it did.

Owns the sockets, the numbering of requests and the records. Reads as much of a body as its answer depends on and lets
the rest pass. Baton's own members of `usage` are made up: shares of the times at which chunks were really written, so
that they fit to what the client sees. It runs on the event loop of whoever starts it; its stamps are
`time.monotonic()`, taken right before a write is handed to the socket.

Invariant: a chunk is written when it is due or later, never before, and its record says when.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

from aiohttp import web
from pydantic import Field

from baton.bench.arguments import checked
from baton.bench.client.driver import sleep_until
from baton.runtime.clock import host_clock
from baton.wire.errors import InvalidSetting
from tests.bench.mock_server.schedule import BREAKS, Answer, Fault, FaultKind, Schedule

_CLOSE_TIMEOUT_S = 0.1
_MAX_BODY_BYTES = 64 * 2**20
_STALL_S = 3600.0
_RESETS = struct.pack("ii", 1, 0)
_EVENTS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
_DEFAULT_OUTPUT_TOKENS = 16
_FIRST_TOKEN_ID = 100
_CHAT_PATH = "/v1/chat/completions"
_KV_BYTES = 2**20
# shares of the time to the first token, then of the gap to the second
_TO_FIRST = {"received_us": 0, "sent_us": 0.02, "prefill_begun_us": 0.2, "first_sampled_us": 0.9, "first_written_us": 1}
_TO_SECOND = {"kv_ready_us": 0.30, "decode_begun_us": 0.40, "second_sampled_us": 0.90, "second_written_us": 1.0}
_Limit = Annotated[int, Field(strict=True, ge=1)] | None
_Prompt = Annotated[str | list[Annotated[int, Field(strict=True)]], Field(min_length=1)] | None
_Messages = Annotated[list[dict[str, Any]], Field(min_length=1)] | None


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


@dataclass(frozen=True, slots=True)
class _Question:
    """The members of a body that matter. Completions need a prompt, a chat its messages."""

    prompt: _Prompt = None
    messages: _Messages = None
    model: str = ""
    max_tokens: _Limit = None
    max_completion_tokens: _Limit = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool = False
    return_timings: bool = False

    @property
    def num_asked(self) -> int:
        return self.max_tokens or self.max_completion_tokens or _DEFAULT_OUTPUT_TOKENS

    @property
    def num_prompt_tokens(self) -> int:
        """Ids, or words where the prompt is text."""
        if isinstance(self.prompt, list):
            return len(self.prompt)
        texts = [self.prompt or "", *(str(message.get("content", "")) for message in self.messages or ())]
        return len(" ".join(texts).split())


@asynccontextmanager
async def mock_server(schedule: Schedule, options: MockOptions | None = None) -> AsyncIterator[MockServer]:
    """A running server; what still runs at the end is broken off. Raises `InvalidSetting` when it cannot listen."""
    options = options or MockOptions()
    server = MockServer(schedule, options)
    runner = web.AppRunner(server.app, handler_cancellation=True, access_log=None, shutdown_timeout=_CLOSE_TIMEOUT_S)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, options.host, options.port).start()
        except OSError as error:
            reason = error.strerror or error
            raise InvalidSetting(f"cannot listen on {options.host}:{options.port}: {reason}") from None
        host, port = runner.addresses[0][:2]
        server.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        yield server
    finally:
        server.is_closing = True
        await runner.cleanup()


class MockServer:
    """Use `mock_server`. `url` is where it listens, `is_closing` whether it breaks answers off itself."""

    def __init__(self, schedule: Schedule, options: MockOptions) -> None:
        self._schedule = schedule
        self._options = options
        self._num_requests = 0
        self._num_in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.records: deque[Record] = deque(maxlen=options.max_records)
        self.url = ""
        self.is_closing = False
        self.app = web.Application(client_max_size=_MAX_BODY_BYTES)
        self.app.router.add_get("/health", self._health)
        self.app.router.add_get("/v1/models", self._models)
        for path in ("/v1/completions", _CHAT_PATH):
            self.app.router.add_post(path, self._generate)

    async def until_idle(self, timeout_s: float) -> None:
        """Wait until no request is being answered. Raises `TimeoutError`."""
        async with asyncio.timeout(timeout_s):
            await self._idle.wait()

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _: web.Request) -> web.Response:
        model = {"id": self._options.model, "object": "model", "owned_by": self._options.owned_by, "created": 0}
        return web.json_response({"object": "list", "data": [model]})

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        peer = http.transport.get_extra_info("peername") if http.transport is not None else None
        record = Record(self._num_requests, http.path, peer[1] if peer else 0, time.monotonic(), http.headers)
        self.records.append(record)
        self._num_requests += 1
        self._num_in_flight += 1
        self._idle.clear()
        try:
            record.body = await http.json()
            question = checked(_Question, record.body, "")
            if (question.messages if http.path == _CHAT_PATH else question.prompt) is None:
                return _error(400, "there is no prompt")
            return await _Reply(http, record, question, self._schedule.answer(record.number, question.num_asked)).send()
        except ValueError:
            return _error(400, "the body is not JSON")
        except InvalidSetting as error:
            return _error(400, str(error))
        except (asyncio.CancelledError, ConnectionError):
            if not self.is_closing:
                record.left_s = time.monotonic()
            raise
        finally:
            self._num_in_flight -= 1
            if not self._num_in_flight:
                self._idle.set()


class _Reply:
    """One answer. Token t of every answer has the id 100 + t."""

    def __init__(self, http: web.Request, record: Record, question: _Question, answer: Answer) -> None:
        self._http = http
        self._record = record
        self._question = question
        self._answer = answer
        self._fault = answer.fault.kind if answer.fault is not None else None
        self._num_tokens = answer.num_tokens(answer.num_chunks)
        self._is_chat = http.path == _CHAT_PATH
        self._response = web.StreamResponse(headers=_EVENTS)

    async def send(self) -> web.StreamResponse:
        answer, fault = self._answer, self._answer.fault
        if fault is not None and fault.kind is FaultKind.HTTP_ERROR:
            return _error(fault.status, fault.message)
        if not self._question.stream or self._fault is FaultKind.NOT_EVENTS:
            await sleep_until(self._record.received_s + answer.writes()[-1][0])
            self._record.written_s.append(time.monotonic())
            choice = self._choice("message", 0, self._num_tokens, is_last=True)
            return web.json_response(self._object("", [choice], usage=self._usage()))
        if fault is not None and fault.kind in BREAKS:
            await self._write_chunks(min(fault.after_chunks, answer.num_chunks))
            await self._break(fault)
            return self._response
        if self._fault is not FaultKind.NO_CHOICES:
            await self._write_chunks(answer.num_chunks)
        has_usage = (self._question.stream_options or {}).get("include_usage") and self._fault is not FaultKind.NO_USAGE
        await self._write((self._event([], usage=self._usage()) if has_usage else b"") + b"data: [DONE]\n\n")
        await self._response.write_eof()
        return self._response

    async def _write_chunks(self, limit: int) -> None:
        begin = 0
        for offset_s, end in self._answer.writes():
            end = min(end, limit)
            if begin >= end:
                return
            events = b"".join(self._chunk(place) for place in range(begin, end))
            if self._is_chat and not begin:
                opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                events = self._event([opening]) + events
            await sleep_until(self._record.received_s + offset_s)
            written_s = await self._write(events)
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
        last_words = {
            FaultKind.NO_DONE: b": no [DONE] follows\n\n",
            FaultKind.ERROR_EVENT: _sse({"error": {"message": fault.message, "type": "server_error", "code": None}}),
            FaultKind.BAD_JSON: b'data: {"choices":[{\n\n',
        }
        if fault.kind in last_words:
            await self._write(last_words[fault.kind])
        if fault.kind is FaultKind.NO_DONE:
            return await self._response.write_eof()
        if fault.kind is FaultKind.STALL:
            await asyncio.sleep(_STALL_S)
        if (transport := self._http.transport) is not None:
            if fault.kind is FaultKind.RESET:
                transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESETS)
                transport.abort()
            transport.close()

    def _chunk(self, place: int) -> bytes:
        begin, end = self._answer.num_tokens(place), self._answer.num_tokens(place + 1)
        return self._event([self._choice("delta", begin, end, is_last=place + 1 == self._answer.num_chunks)])

    def _event(self, choices: list[dict[str, Any]], **members: Any) -> bytes:
        return _sse(self._object(".chunk", choices, **members))

    def _object(self, chat_suffix: str, choices: list[dict[str, Any]], **members: Any) -> dict[str, Any]:
        kind = f"chat.completion{chat_suffix}" if self._is_chat else "text_completion"
        head = {"id": f"mock-{self._record.number}", "object": kind, "created": 0, "model": self._question.model}
        return {**head, "choices": choices, **members}

    def _choice(self, chat_member: str, begin: int, end: int, *, is_last: bool) -> dict[str, Any]:
        text = self._answer.text(begin, end)
        finish = "length" if self._num_tokens >= self._question.num_asked else "stop"
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish if is_last else None}
        choice |= {chat_member: {"content": text}} if self._is_chat else {"text": text}
        if chat_member == "message" and self._is_chat:
            choice["message"]["role"] = "assistant"
        if self._question.return_token_ids:
            choice["token_ids"] = list(range(_FIRST_TOKEN_ID + begin, _FIRST_TOKEN_ID + end))
        return choice

    def _usage(self) -> dict[str, Any]:
        num_prompt = self._question.num_prompt_tokens + (self._fault is FaultKind.WRONG_PROMPT_USAGE)
        num_output = 0 if self._fault is FaultKind.NO_CHOICES else self._num_tokens
        num_output += self._fault is FaultKind.WRONG_COMPLETION_USAGE
        usage = {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output}
        of_baton = _baton_members(self._record) if self._question.return_timings and self._record.written_s else {}
        return {**usage, "prompt_tokens_details": {"cached_tokens": 0}, **of_baton}


def _baton_members(record: Record) -> dict[str, Any]:
    """`kv_transfer` and `timings` of an answer whose first two chunks are its first two tokens."""

    def between_us(begin_s: float, end_s: float, shares: Mapping[str, float]) -> dict[str, int]:
        return {name: round((begin_s + (end_s - begin_s) * share) * 1e6) for name, share in shares.items()}

    first_s, *later_s = record.written_s
    timings: dict[str, Any] = {"clock": host_clock(), "attempts": 1, **dict.fromkeys(_TO_SECOND)}
    timings |= between_us(record.received_s, first_s, _TO_FIRST)
    if not later_s:
        return {"timings": timings}
    timings |= between_us(first_s, later_s[0], _TO_SECOND)
    transfer_ms = (timings["kv_ready_us"] - timings["first_sampled_us"]) / 1e3
    transfer = {"blocks": 1, "bytes": _KV_BYTES, "transfer_ms": transfer_ms, "exposed_ms": transfer_ms}
    return {"kv_transfer": transfer, "timings": timings}


def _sse(payload: dict[str, Any]) -> bytes:
    """`payload` as one server-sent event."""
    return b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n"


def _error(status: int, message: str) -> web.Response:
    error = {"message": message, "type": "mock_error", "param": None, "code": None}
    return web.json_response({"error": error}, status=status)
