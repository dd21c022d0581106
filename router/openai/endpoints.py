"""The endpoints: read a body, make prompts, run the choices, write one JSON answer or a stream of events.

Owns the order of checks and the way a stream ends. A request is refused with a status as long as nothing has been
written; after that a failure is an error event and a connection that breaks off, so that a cut stream never looks
finished. A client that leaves cancels its request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from aiohttp import web

from engine.text.choice_text import TextDelta, join_deltas
from program.clock import now_us
from router.legs import RelayRequest
from router.metrics import RouterMetrics
from router.openai.answer import Answer, make_choices
from router.openai.event_writer import EventWriter
from router.openai.ignored import IgnoredFields
from router.openai.prompts import cache_salt_of, truncated
from router.openai.responses import (
    ChatStream,
    CompletionStream,
    FinishedChoice,
    ReplyHead,
    ReplyStream,
    TokensSoFar,
    Usage,
    chat_completion,
    json_bytes,
    model_list,
    model_object,
    text_completion,
)
from router.openai.responses_api import ResponseObject, ResponseStream
from router.openai.responses_request import ResponsesRequest
from router.openai.schemas import MAX_CHOICES, ChatCompletionRequest, CompletionRequest, parse_body
from router.relay import Relay
from router.request_trace import note_model
from router.served_model import ServedModel
from router.timings import ClientTimes, timings_of
from wire.errors import BatonError, InvalidRequest, ModelNotFound, Overloaded, UnsupportedMediaType

BODY_TIMEOUT_S = 30.0
_BODY_ENCODINGS = ("identity", "gzip", "deflate")
GenerationRequest = ChatCompletionRequest | CompletionRequest | ResponsesRequest
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Endpoints:
    """The handlers of one router. `is_draining` is set once, at shutdown. `is_strict`: fields that change nothing are
    refused instead of ignored."""

    relay: Relay
    served: Mapping[str, ServedModel]
    metrics: RouterMetrics
    max_model_len: Callable[[str], int | None]
    is_draining: bool = False
    is_strict: bool = False

    async def chat(self, http: web.Request) -> web.StreamResponse:
        """`POST /v1/chat/completions`."""
        times = ClientTimes(received_us=now_us())
        body, content_type = await read_body(http)
        notes = IgnoredFields(self.is_strict)
        request = parse_body(body, content_type, ChatCompletionRequest, notes)
        model = self._model_for(request)
        prompt_ids = await model.prompts.chat_prompt(request)
        answer = self._answer(model, request, [prompt_ids], "messages")
        head = self._head("chatcmpl", model, notes)
        if request.stream:
            stream = ChatStream(head, request.include_usage, request.with_token_ids)
            return await self._stream(http, answer, stream, request, times)
        choices = await self._collect(answer, with_prompt_ids=request.with_token_ids)
        return _json(chat_completion(head, choices, _usage(answer, request, times)))

    async def completions(self, http: web.Request) -> web.StreamResponse:
        """`POST /v1/completions`."""
        times = ClientTimes(received_us=now_us())
        body, content_type = await read_body(http)
        notes = IgnoredFields(self.is_strict)
        request = parse_body(body, content_type, CompletionRequest, notes)
        model = self._model_for(request)
        request = model.prompts.with_end_of_middle(request)
        answer = self._answer(model, request, await model.prompts.completion_prompts(request), "prompt")
        head = self._head("cmpl", model, notes)
        if request.stream:
            stream = CompletionStream(head, request.include_usage, request.with_token_ids)
            return await self._stream(http, answer, stream, request, times)
        choices = await self._collect(answer, with_prompt_ids=request.with_token_ids)
        return _json(text_completion(head, choices, _usage(answer, request, times)))

    async def responses(self, http: web.Request) -> web.StreamResponse:
        """`POST /v1/responses`."""
        times = ClientTimes(received_us=now_us())
        body, content_type = await read_body(http)
        notes = IgnoredFields(self.is_strict)
        request = parse_body(body, content_type, ResponsesRequest, notes)
        model = self._model_for(request)
        answer = self._answer(model, request, [await model.prompts.chat_prompt(request.as_chat())], "input")
        response = ResponseObject(self._head("resp", model, notes), request)
        if request.stream:
            return await self._stream(http, answer, ResponseStream(response), request, times)
        (choice,) = await self._collect(answer, with_prompt_ids=False)
        return _json(response.ended(choice.whole, answer.usage()))

    async def models(self, http: web.Request) -> web.Response:
        """`GET /v1/models`."""
        return _json(model_list(map(self._model_object, self.served.values())))

    async def model(self, http: web.Request) -> web.Response:
        """`GET /v1/models/{name}`; names may hold slashes."""
        return _json(self._model_object(self.model_named(http.match_info["name"].removesuffix("/"))))

    def _model_object(self, model: ServedModel) -> dict[str, object]:
        return model_object(model.name, model.started, self.max_model_len(model.name))

    def _head(self, prefix: str, model: ServedModel, notes: IgnoredFields) -> ReplyHead:
        self.metrics.count_ignored(notes.labels)
        return ReplyHead(f"{prefix}-{secrets.token_hex(12)}", int(time.time()), model.name, notes.warnings)

    def model_named(self, name: str) -> ServedModel:
        """The served model of that name. Raises `ModelNotFound`."""
        if name not in self.served:
            served = ", ".join(map(repr, self.served))
            raise ModelNotFound(f"this endpoint serves {served}, not {name!r:.200}", "model")
        return self.served[name]

    def _model_for(self, request: GenerationRequest) -> ServedModel:
        if self.is_draining:
            raise Overloaded("the router is shutting down", retry_after_s=5)
        return self.model_named(request.model)

    def _answer(
        self, model: ServedModel, request: GenerationRequest, prompts: Sequence[Sequence[int]], param: str
    ) -> Answer:
        """Make the answer, after the checks that need token ids. Nothing has been allocated before them."""
        note_model(model.name)
        params = request.decoding_params()
        params.check_vocabulary(model.prompts.tokenizer.vocab_size)
        if len(prompts) * request.n > MAX_CHOICES:
            raise InvalidRequest(f"{len(prompts)} prompts x {request.n} choices is more than {MAX_CHOICES}", "n")
        requests: list[RelayRequest] = []
        for whole_prompt in prompts:
            prompt_ids = truncated(request, whole_prompt, self.max_model_len(model.name))
            max_tokens = self.relay.check_size(model.name, len(prompt_ids), params.max_tokens, param)
            fitted, salt = params.with_at_most(max_tokens), cache_salt_of(request.cache_salt)
            requests.append(RelayRequest(model.name, tuple(prompt_ids), fitted, salt))
        self.relay.check_room(len(prompts) * request.n)
        choices = make_choices(requests, request.n, request.text_options(), model.prompts.tokenizer)
        return Answer(choices, self.relay, self.metrics)

    async def _collect(self, answer: Answer, *, with_prompt_ids: bool) -> list[FinishedChoice]:
        deltas: list[list[TextDelta]] = [[] for _ in answer.choices]
        with answer:
            while pieces := await answer.take():
                for piece in pieces:
                    deltas[piece.choice.index].append(piece.delta)
        return [
            FinishedChoice(
                choice.index, join_deltas(deltas[choice.index]), choice.request.prompt_ids if with_prompt_ids else None
            )
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
        with EventWriter(http) as writer, answer:
            try:
                await self._write_events(writer, answer, stream, request, times)
            except ConnectionError as error:
                # this is normal: clients disconnect, and aiohttp handles the closed connection
                _log.debug("a client is gone: %s", error)
            except Exception as error:  # the outer edge of one stream: no second answer may follow its headers
                if not writer.has_begun:
                    raise
                if not isinstance(error, BatonError):
                    _log.exception("a stream failed")
                with contextlib.suppress(ConnectionError):
                    await writer.break_off(stream.error(error))
        return writer.response

    async def _write_events(
        self,
        writer: EventWriter,
        answer: Answer,
        stream: ReplyStream,
        request: GenerationRequest,
        times: ClientTimes,
    ) -> None:
        """Write everything that came together in one write; the last write includes the end of the stream."""
        begun: set[int] = set()
        with_usage = request.include_continuous_usage
        while pieces := await answer.take():
            events: list[bytes] = []
            for choice, delta, num_tokens in pieces:
                so_far = None
                if with_usage:
                    so_far = TokensSoFar(len(choice.request.prompt_ids), num_tokens)
                if choice.index not in begun:
                    begun.add(choice.index)
                    prompt_ids = choice.request.prompt_ids if request.with_token_ids else ()
                    events.append(
                        stream.begin(choice.index, prompt_ids, so_far and so_far._replace(num_completion_tokens=0))
                    )
                events.append(stream.chunk(choice.index, delta, so_far))
            if pieces[0].num_tokens <= 2:
                written_us = now_us()
                for piece in pieces:
                    times.written(piece.num_tokens, written_us)
            if not answer.has_ended:
                await writer.write(b"".join(events))
                continue
            if request.include_usage:
                events.append(stream.usage(_usage(answer, request, times)))
            await writer.finish(b"".join((*events, stream.end)))
            if len(answer.choices) == 1 and answer.choices[0].figures is not None:
                self.metrics.streamed(times, answer.choices[0].figures.times)


async def read_body(http: web.Request) -> tuple[bytes, str | None]:
    """The body and its content type. Raises `InvalidRequest`, `UnsupportedMediaType`, or the 408 of a slow body."""
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
    """The usage of an answer. Only an answer of one choice has timings: several choices are several requests."""
    usage = answer.usage()
    figures = answer.choices[0].figures
    if not request.return_timings or len(answer.choices) != 1 or figures is None:
        return usage
    return replace(usage, timings=timings_of(times, figures.times, figures.num_attempts))


def _json(payload: dict[str, object]) -> web.Response:
    return web.Response(body=json_bytes(payload), content_type="application/json")
