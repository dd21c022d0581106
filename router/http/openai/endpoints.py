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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from aiohttp import web

from baton.engine.text.choice_text import TextDelta, TokenEntry
from baton.router.health.metrics import RouterMetrics
from baton.router.http.access.audit import GENERATION, Generation
from baton.router.http.access.guard import IDENTITY
from baton.router.http.admission.admission import Admission, Demand
from baton.router.http.anthropic.request import CountTokensRequest, MessagesRequest
from baton.router.http.anthropic.writer import MessageWriter
from baton.router.http.openai.answer import Answer, Choice, make_choices
from baton.router.http.openai.answer_blocks import AnswerBlocks
from baton.router.http.openai.answer_parts import chat_stream
from baton.router.http.openai.best_of import best_choices
from baton.router.http.openai.event_writer import EventWriter
from baton.router.http.openai.final_requests import Asked, FinalRequests
from baton.router.http.openai.ignored import IgnoredFields
from baton.router.http.openai.model_objects import model_list, model_object
from baton.router.http.openai.prompt_report import PromptOptions, report_prompt
from baton.router.http.openai.replies import (
    NO_REPORT,
    CompletionStream,
    FinishedChoice,
    PromptReport,
    ReplyHead,
    ReplyStream,
    chat_completion,
    json_bytes,
    text_completion,
)
from baton.router.http.openai.request_body import read_request
from baton.router.http.openai.responses_api import ResponseWriter
from baton.router.http.openai.responses_request import ResponsesRequest
from baton.router.http.openai.schemas import ChatCompletionRequest, CompletionRequest, GenerationRequest
from baton.router.http.openai.stored_responses import StoredResponses
from baton.router.http.openai.strict_model import Strict
from baton.router.http.openai.translation import AnswerWriter, TranslatedRequest
from baton.router.http.openai.usage import TokensSoFar, Usage
from baton.router.http.request_log import REQUEST_ID
from baton.router.http.resume.requests import body_of, followed, name_stream
from baton.router.http.served_model import ServedModel
from baton.router.http.serving.json_answer import json_answer
from baton.router.requests.relay import Relay
from baton.router.requests.timings import ClientTimes, timings_of
from baton.router.requests.trace import note_request
from baton.router.routing.goals import AllowedGoals
from baton.runtime.clock import now_us
from baton.wire.errors import BatonError, ModelNotFound, Overloaded

RequestT = TypeVar("RequestT", bound=Strict)
TranslatedT = TypeVar("TranslatedT", bound=TranslatedRequest)
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Endpoints:
    """The handlers of one router. `is_draining` is set once, at shutdown. `is_strict`: fields that change nothing are
    refused instead of ignored. `goals`: None when the router has none."""

    relay: Relay
    admission: Admission
    served: Mapping[str, ServedModel]
    metrics: RouterMetrics
    max_model_len: Callable[[str], int | None]
    is_draining: bool = False
    is_strict: bool = False
    goals: AllowedGoals | None = None
    stored: StoredResponses = field(default_factory=StoredResponses)

    async def chat(self, http: web.Request) -> web.StreamResponse:
        """`POST /v1/chat/completions`."""
        times = ClientTimes(received_us=now_us())
        notes = IgnoredFields(self.is_strict)
        request = await _parse(http, ChatCompletionRequest, notes)
        model = self._model_for(request)
        request = model.with_defaults(request)
        model.prompts.note_ignored(request, notes)
        prompt_ids, media = await model.prompts.chat_prompt(request)
        asked = Asked(model, request, [prompt_ids], "messages", media=media)
        answer = await self._answer(http, asked, notes)
        head = self._head(http, "chatcmpl", model, notes)
        parts = model.prompts.answer_parts(request, prompt_ids, head.id_of)
        if request.stream:
            stream = chat_stream(head, request.include_usage, request.with_token_ids, parts)
            return await self._stream(http, answer, stream, request, times)
        choices = await self._collect(answer, request, keeps_entries=parts is not None)
        usage = _usage(answer, request, times)
        if parts is not None:
            choices, usage = await asyncio.to_thread(parts.finished, choices, usage)
            hidden = dict.fromkeys(warning for choice in choices for warning in parts.warnings(choice.index))
            head = replace(head, warnings=(*head.warnings, *hidden))
        return await json_answer(http, chat_completion(head, choices, usage))

    async def completions(self, http: web.Request) -> web.StreamResponse:
        """`POST /v1/completions`."""
        times = ClientTimes(received_us=now_us())
        notes = IgnoredFields(self.is_strict)
        request = await _parse(http, CompletionRequest, notes)
        model = self._model_for(request)
        request = model.prompts.with_end_of_middle(model.with_defaults(request))
        prompts = await model.prompts.completion_prompts(request)
        echoes = await model.prompts.echoes(request, prompts)
        answer = await self._answer(http, Asked(model, request, prompts, "prompt", echoes), notes)
        head = self._head(http, "cmpl", model, notes)
        if request.stream:
            stream = CompletionStream(head, request.include_usage, request.with_token_ids)
            return await self._stream(http, answer, stream, request, times)
        choices = await self._collect(answer, request)
        if request.num_candidates > request.n:
            choices = await asyncio.to_thread(best_choices, choices, request)
        return await json_answer(http, text_completion(head, choices, _usage(answer, request, times)))

    async def responses(self, http: web.Request) -> web.StreamResponse:
        """`POST /v1/responses`."""
        times = ClientTimes(received_us=now_us())
        notes = IgnoredFields(self.is_strict)
        request = await _parse(http, ResponsesRequest, notes)
        async with self.stored.following(http, request, notes) as (whole, store):
            return await self._translated(http, whole, partial(ResponseWriter, store=store), times, notes)

    async def messages(self, http: web.Request) -> web.StreamResponse:
        """`POST /v1/messages`, in Anthropic's format."""
        times = ClientTimes(received_us=now_us())
        notes = IgnoredFields(self.is_strict)
        return await self._translated(http, await _parse(http, MessagesRequest, notes), MessageWriter, times, notes)

    async def count_tokens(self, http: web.Request) -> web.StreamResponse:
        """`POST /v1/messages/count_tokens`, in Anthropic's format."""
        notes = IgnoredFields(self.is_strict)
        request = await _parse(http, CountTokensRequest, notes)
        prompt = await self._model_for(request).prompts.chat_prompt(request.as_chat())
        self.metrics.count_ignored(notes.labels)
        return _json({"input_tokens": len(prompt.token_ids)})

    async def _translated(
        self,
        http: web.Request,
        request: TranslatedT,
        make_writer: Callable[[ReplyHead, TranslatedT, AnswerBlocks], AnswerWriter],
        times: ClientTimes,
        notes: IgnoredFields,
    ) -> web.StreamResponse:
        """An endpoint of another interface: it has a translation of its requests and a writer of its answers."""
        model = self._model_for(request)
        request = model.with_defaults(request)
        chat = model.with_defaults(request.as_chat())
        model.prompts.note_ignored(chat, notes)
        prompt_ids, media = await model.prompts.chat_prompt(chat)
        asked = Asked(model, chat, [prompt_ids], request.conversation_field, media=media)
        answer = await self._answer(http, asked, notes)
        parts, text = model.prompts.choice_parts(chat, prompt_ids), answer.choices[0].text
        head = self._head(http, "resp", model, notes)
        blocks = AnswerBlocks(parts, text, head.id_of, shows_reasoning=chat.include_reasoning)
        writer = make_writer(head, request, blocks)
        if chat.stream:
            return await self._stream(http, answer, writer, chat, times)
        (choice,) = await self._collect(answer, chat, keeps_entries=True)
        usage = _usage(answer, chat, times)
        return await json_answer(http, await writer.whole(choice.whole, usage))

    async def models(self, http: web.Request) -> web.Response:
        """`GET /v1/models`."""
        return _json(model_list(map(self._model_object, self.served.values())))

    async def model(self, http: web.Request) -> web.Response:
        """`GET /v1/models/{name}`; names may hold slashes."""
        return _json(self._model_object(self.model_named(http.match_info["name"].removesuffix("/"))))

    def _model_object(self, model: ServedModel) -> dict[str, object]:
        media = [kind for kind in model.prompts.media_kinds if self.relay.takes_media(model.name, kind)]
        limit, switches = self.max_model_len(model.name), model.prompts.thinking_switches
        return model_object(model.name, model.started, limit, ("text", *media), switches)

    def _head(self, http: web.Request, prefix: str, model: ServedModel, notes: IgnoredFields) -> ReplyHead:
        self.metrics.count_ignored(notes.labels)
        reply_id, created = name_stream(http, f"{prefix}-{secrets.token_hex(16)}", int(time.time()))
        return ReplyHead(reply_id, created, model.name, notes.warnings)

    def model_named(self, name: str) -> ServedModel:
        """The served model of that name. Raises `ModelNotFound`."""
        if name not in self.served:
            served = ", ".join(map(repr, self.served))
            raise ModelNotFound(f"this endpoint serves {served}, not {name!r:.200}", "model")
        return self.served[name]

    def _model_for(self, request: GenerationRequest | TranslatedRequest) -> ServedModel:
        if self.is_draining:
            raise Overloaded("the router is shutting down", retry_after_s=5)
        return self.model_named(request.model)

    async def _answer(self, http: web.Request, asked: Asked, notes: IgnoredFields) -> Answer:
        """Make the answer, after the checks that need token ids."""
        model, request = asked.model, asked.request
        note_request(model.name, sum(map(len, asked.prompts)))
        requests = await FinalRequests(self.relay, self.goals, self.max_model_len).of(asked, http, notes)
        choices = make_choices(
            requests,
            request.num_candidates,
            model.prompts.text_options(request),
            model.prompts.tokenizer,
            asked.echoes,
            generates=request.generates,
        )
        demand = Demand.of_prompts(
            http.get(IDENTITY),
            [each.prompt.num_tokens for each in requests],
            request.num_candidates,
            max(each.params.max_tokens or 0 for each in requests) or None,
            request.priority,
        )
        answer = Answer(choices, self.relay, self.metrics.of_model(model.name), self.admission, demand)
        http[GENERATION] = Generation(model.name, answer)
        return answer

    async def _collect(
        self, answer: Answer, request: GenerationRequest, *, keeps_entries: bool = False
    ) -> list[FinishedChoice]:
        texts: list[list[str]] = [[] for _ in answer.choices]
        entries: list[list[TokenEntry]] = [[] for _ in answer.choices]
        reasons: list[str | None] = [None for _ in answer.choices]
        keeps_entries |= request.with_token_ids or answer.choices[0].request.params.logprobs is not None
        with answer:
            while pieces := await answer.take():
                for choice, delta, _ in pieces:
                    texts[choice.index].append(delta.text)
                    reasons[choice.index] = delta.finish_reason
                    if keeps_entries:
                        entries[choice.index] += delta.entries
        return [
            FinishedChoice(
                choice.index,
                TextDelta("".join(texts[choice.index]), entries[choice.index], reasons[choice.index]),
                choice.request.prompt.token_ids if request.with_token_ids else None,
                await self._report(answer, choice, request.prompt_options),
            )
            for choice in answer.choices
        ]

    async def _report(self, answer: Answer, choice: Choice, options: PromptOptions) -> PromptReport:
        """What the answer tells of the prompt of `choice`, of which there has been a piece."""
        if not options.echo and options.num_listed is None:
            return NO_REPORT
        prompt_ids, scored = choice.request.prompt.token_ids, answer.scored_prompt(choice)
        return await report_prompt(
            self.served[choice.request.model].prompts.tokenizer, options, prompt_ids, choice.echo, scored
        )

    async def _stream(
        self,
        http: web.Request,
        answer: Answer,
        stream: ReplyStream,
        request: GenerationRequest,
        times: ClientTimes,
    ) -> web.StreamResponse:
        async with followed(http, answer) as ids:
            with EventWriter(http, ids) as writer, answer:
                try:
                    await self._write_events(writer, answer, stream, request, times)
                except ConnectionError as error:
                    # this is normal: clients disconnect, and aiohttp handles the closed connection
                    _log.debug("a client is gone: %s", error)
                except Exception as error:  # the outer edge of one stream: no second answer may follow its headers
                    if not writer.has_begun:
                        raise
                    if not isinstance(error, BatonError):
                        _log.exception("the stream of request %s failed", http[REQUEST_ID])
                    with contextlib.suppress(ConnectionError):
                        await writer.break_off(stream.error(error, writer.num_told))
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
                    so_far = TokensSoFar(choice.request.prompt.num_tokens, num_tokens)
                if choice.index not in begun:
                    begun.add(choice.index)
                    prompt_ids = choice.request.prompt.token_ids if request.with_token_ids else ()
                    begun_with = so_far and so_far._replace(num_completion_tokens=0)
                    report = await self._report(answer, choice, request.prompt_options)
                    events.append(stream.begin(choice.index, prompt_ids, begun_with, report))
                events.append(stream.chunk(choice.index, delta, so_far))
            if pieces[0].num_tokens <= 2:
                written_us = now_us()
                for piece in pieces:
                    times.written(piece.num_tokens, written_us)
            if not answer.has_ended:
                await writer.write(b"".join(events))
                continue
            if request.include_usage:
                events.append(await stream.usage(_usage(answer, request, times)))
            await writer.finish(b"".join((*events, stream.end)))
            if len(answer.choices) == 1 and answer.choices[0].figures is not None:
                self.metrics.of_model(request.model).streamed(times, answer.choices[0].figures.times)


async def _parse(http: web.Request, schema: type[RequestT], notes: IgnoredFields) -> RequestT:
    return await read_request(http, schema, notes, body_of)


def _usage(answer: Answer, request: GenerationRequest, times: ClientTimes) -> Usage:
    """The usage of an answer. Only an answer of one choice has timings: several choices are several requests."""
    usage = answer.usage()
    figures = answer.choices[0].figures
    if not request.return_timings or len(answer.choices) != 1 or figures is None:
        return usage
    return replace(usage, timings=timings_of(times, figures.times, figures.num_attempts))


def _json(payload: dict[str, object]) -> web.Response:
    return web.Response(body=json_bytes(payload), content_type="application/json")
