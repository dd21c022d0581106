"""The endpoints: read a body, make prompts, run the choices, write one JSON answer or a stream of events.

Owns the order of checks and the way a stream ends. A request is refused with a status as long as nothing has been
written; after that a failure is an error event and a connection that breaks off, so that a cut stream never looks
finished. A client that takes nothing for `WRITE_TIMEOUT_S` is dropped; one that leaves cancels its request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace

from aiohttp import web

from program.clock import now_us
from router.metrics import RouterMetrics
from router.openai.choices import Answer, generate, make_answer
from router.openai.prompts import PromptMaker
from router.openai.responses import (
    SSE_DONE,
    ChatStream,
    Choice,
    CompletionStream,
    ReplyHead,
    ReplyStream,
    Usage,
    chat_completion,
    json_bytes,
    model_list,
    model_object,
    sse_error,
    text_completion,
)
from router.openai.schemas import ChatCompletionRequest, CompletionRequest, parse_body
from router.openai.text_stream import TextDelta, join_deltas
from router.relay import Relay
from router.timings import ClientTimes, timings_of
from wire.errors import BatonError, InvalidRequest, ModelNotFound, Overloaded, UnsupportedMediaType

BODY_TIMEOUT_S = 30.0
WRITE_TIMEOUT_S = 30.0
_MAX_CHOICES = 128
_BODY_ENCODINGS = ("identity", "gzip", "deflate")
GenerationRequest = ChatCompletionRequest | CompletionRequest
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Endpoints:
    """The handlers of one router. `is_draining` is set once, at shutdown."""

    relay: Relay
    prompts: PromptMaker
    metrics: RouterMetrics
    model_name: str
    started: int
    max_model_len: Callable[[], int | None]
    is_draining: bool = False

    async def chat(self, http: web.Request) -> web.StreamResponse:
        """`POST /v1/chat/completions`."""
        times = ClientTimes(received_us=now_us())
        body, content_type = await _read(http)
        request = parse_body(body, content_type, ChatCompletionRequest)
        self._check(request)
        prompt_ids = await self.prompts.chat_prompt(request)
        answer = self._answer(request, [prompt_ids], "messages")
        head = self._head("chatcmpl")
        if request.stream:
            stream = ChatStream(head, request.include_usage, request.return_token_ids)
            return await self._stream(http, answer, stream, request, times)
        choices = await self._collect(answer, with_prompt_ids=request.return_token_ids)
        return _json(chat_completion(head, choices, _usage(answer, request, times)))

    async def completions(self, http: web.Request) -> web.StreamResponse:
        """`POST /v1/completions`."""
        times = ClientTimes(received_us=now_us())
        body, content_type = await _read(http)
        request = parse_body(body, content_type, CompletionRequest)
        self._check(request)
        answer = self._answer(request, await self.prompts.completion_prompts(request), "prompt")
        head = self._head("cmpl")
        if request.stream:
            stream = CompletionStream(head, request.include_usage, request.return_token_ids)
            return await self._stream(http, answer, stream, request, times)
        choices = await self._collect(answer, with_prompt_ids=request.return_token_ids)
        return _json(text_completion(head, choices, _usage(answer, request, times)))

    async def models(self, http: web.Request) -> web.Response:
        """`GET /v1/models`."""
        return _json(model_list([self._model()]))

    async def model(self, http: web.Request) -> web.Response:
        """`GET /v1/models/{name}`; names may hold slashes."""
        self._require_model(http.match_info["name"])
        return _json(self._model())

    def _model(self) -> dict[str, object]:
        return model_object(self.model_name, self.started, self.max_model_len())

    def _head(self, prefix: str) -> ReplyHead:
        return ReplyHead(f"{prefix}-{secrets.token_hex(12)}", int(time.time()), self.model_name)

    def _require_model(self, name: str) -> None:
        if name != self.model_name:
            raise ModelNotFound(f"this endpoint serves {self.model_name!r}, not {name!r:.200}", "model")

    def _check(self, request: GenerationRequest) -> None:
        if self.is_draining:
            raise Overloaded("the router is shutting down", retry_after_s=5)
        self._require_model(request.model)

    def _answer(self, request: GenerationRequest, prompts: Sequence[Sequence[int]], param: str) -> Answer:
        """Check what is known only now, before anything is allocated."""
        params = request.decoding_params()
        params.check_vocabulary(self.prompts.tokenizer.vocab_size)
        if len(prompts) * request.n > _MAX_CHOICES:
            raise InvalidRequest(f"{len(prompts)} prompts x {request.n} choices is more than {_MAX_CHOICES}", "n")
        for prompt_ids in prompts:
            self.relay.check_size(len(prompt_ids), params.max_tokens, param)
        self.relay.check_room(len(prompts) * request.n)
        return make_answer(prompts, request.n, params, request.text_options(), self.prompts.tokenizer)

    async def _collect(self, answer: Answer, *, with_prompt_ids: bool) -> list[Choice]:
        pieces: dict[int, list[TextDelta]] = {choice.index: [] for choice in answer.choices}
        async with aclosing(generate(answer, self.relay, self.metrics)) as deltas:
            async for choice, delta in deltas:
                pieces[choice.index].append(delta)
        return [
            Choice(choice.index, join_deltas(pieces[choice.index]), choice.prompt_ids if with_prompt_ids else None)
            for choice in answer.choices
        ]

    async def _stream(
        self,
        http: web.Request,
        answer: Answer,
        stream: ReplyStream,
        request: GenerationRequest,
        times: ClientTimes,
    ) -> web.StreamResponse:
        writer = _EventWriter(http)
        begun: set[int] = set()
        try:
            async with aclosing(generate(answer, self.relay, self.metrics)) as deltas:
                async for choice, delta in deltas:
                    beginning = b""
                    if choice.index not in begun:
                        begun.add(choice.index)
                        beginning = stream.begin(choice.index, choice.prompt_ids if request.return_token_ids else ())
                    num_tokens = choice.text.num_completion_tokens
                    await writer.write(beginning + stream.chunk(choice.index, delta))
                    if num_tokens <= 2:
                        times.written(num_tokens, writer.written_us)
            if len(answer.choices) == 1:
                self.metrics.streamed(times, answer.choices[0].journal.times)
            ending = stream.usage(_usage(answer, request, times)) if request.include_usage else b""
            await writer.finish(ending + SSE_DONE)
            return writer.response
        except ConnectionError as error:
            # no news: clients leave. aiohttp finds the connection closed and leaves it at that
            _log.debug("a client is gone: %s", error)
            return writer.response
        except Exception as error:  # the edge of one stream: whatever it is, no second answer may follow its headers
            if not writer.has_begun:
                raise
            if not isinstance(error, BatonError):
                _log.exception("a stream failed")
            with contextlib.suppress(ConnectionError):
                await writer.break_off(sse_error(error))
            return writer.response


class _EventWriter:
    """Writes server-sent events; sends its headers with the first of them. `written_us`: when the last were written."""

    def __init__(self, http: web.Request) -> None:
        self._http = http
        headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        self.response = web.StreamResponse(headers=headers)
        self.has_begun = False
        self.written_us = 0

    async def write(self, events: bytes) -> None:
        """Raises `ConnectionResetError` when the client is gone or takes nothing."""
        async with self._deadline():
            if not self.has_begun:
                self.has_begun = True
                await self.response.prepare(self._http)
            self.written_us = now_us()
            await self.response.write(events)

    async def finish(self, events: bytes) -> None:
        """The last events and the regular end of the response. Raises as `write`."""
        await self.write(events)
        async with self._deadline():
            await self.response.write_eof()

    async def break_off(self, events: bytes) -> None:
        """Send `events`, then end the connection without ending the response. Raises as `write`."""
        await self.write(events)
        if self._http.transport is not None:
            self._http.transport.close()

    @asynccontextmanager
    async def _deadline(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                yield
        except TimeoutError:
            if isinstance(self._http.transport, asyncio.WriteTransport):
                self._http.transport.abort()
            raise ConnectionResetError(f"the client took nothing for {WRITE_TIMEOUT_S:g} s") from None


async def _read(http: web.Request) -> tuple[bytes, str | None]:
    encoding = http.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in _BODY_ENCODINGS:
        raise UnsupportedMediaType(f"content encoding {encoding!r:.100} is not supported: send the body as it is")
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await http.read(), http.headers.get("Content-Type")
    except TimeoutError:
        raise web.HTTPRequestTimeout from None
    except web.RequestPayloadError:
        raise InvalidRequest("the body is damaged: it cannot be read as its headers say") from None


def _usage(answer: Answer, request: GenerationRequest, times: ClientTimes) -> Usage:
    """With timings only for an answer of one choice: those of several would be of different requests to the nodes."""
    usage = answer.usage()
    if not request.return_timings or len(answer.choices) != 1:
        return usage
    journal = answer.choices[0].journal
    return replace(usage, timings=timings_of(times, journal.times, journal.attempt))


def _json(payload: dict[str, object]) -> web.Response:
    return web.Response(body=json_bytes(payload), content_type="application/json")
