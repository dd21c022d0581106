"""Responses that are stored, as requests see them: what one follows, and `/v1/responses/{id}`.

Owns these three routes, and the rules: a response is found by the API key that asked for it and by no other, one that
was deleted, forgotten or never there is all the same, and what lacks a part is not continued with what is left. A
conversation is continued by one response at a time. Does not know where responses lie.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from aiohttp import web

from baton.router.http.access.guard import ITEMS_ROUTE, RESPONSE_ROUTE
from baton.router.http.openai.fields import REFUSED, UNSUPPORTED
from baton.router.http.openai.ignored import Ignored, IgnoredFields
from baton.router.http.openai.replies import ReplyHead
from baton.router.http.openai.responses_api import StoreResponse, reply_id_of, response_id_of
from baton.router.http.openai.responses_request import ResponsesRequest
from baton.router.http.openai.stored_items import objects_of, response_of, turn_of
from baton.router.http.openai.stored_pages import check_include, list_of, no_such_item, owner_of, page_of
from baton.router.http.resume.requests import RESUMED, STREAMS
from baton.router.http.serving.bodies import BODIES
from baton.router.http.serving.json_answer import json_answer
from baton.router.http.serving.limits import limits_of
from baton.router.http.stored.conversations import Read
from baton.router.http.stored.records import Item, NoSuchItem, Unfit, Version
from baton.router.http.stored.store import ResponseStore
from baton.wire.errors import ConversationNotFound, InvalidRequest, ResponseNotFound

PREVIOUS, PREVIOUS_NOT_FOUND = "previous_response_id", "previous_response_not_found"
CONVERSATION = "conversation"
CONVERSATION_ID = re.compile(r"conv_[0-9a-f]{32}", re.ASCII)
_RESPONSE_ID = re.compile(r"resp_[0-9a-f]{32}", re.ASCII)
_STORE = {"store": Ignored("this router stores no responses", (False,))}
_TRUE = ("true", "1")


class Following(NamedTuple):
    """A request with what it follows before its own input. `store`: what stores its response, None when it is not to
    be stored."""

    request: ResponsesRequest
    store: StoreResponse | None


@dataclass(frozen=True, slots=True)
class StoredResponses:
    """The stored responses of one router, None where it stores none."""

    store: ResponseStore | None = None

    def add_routes(self, app: web.Application) -> None:
        """Add the routes to `app`."""
        app.router.add_get(RESPONSE_ROUTE, self.retrieve)
        app.router.add_delete(RESPONSE_ROUTE, self.delete)
        app.router.add_get(ITEMS_ROUTE, self.input_items)

    @asynccontextmanager
    async def following(
        self, http: web.Request, request: ResponsesRequest, notes: IgnoredFields
    ) -> AsyncIterator[Following]:
        """What comes before a request is read; until the block ends, nobody else continues its conversation. Raises
        `InvalidRequest`."""
        store, conversation_id = self.store, request.conversation
        if store is None:
            _refuse_to_store(request, notes)
            yield Following(request, None)
        elif conversation_id is None:
            request = await _after_response(http, store, request)
            yield Following(request, _storing(http, store, request, request.previous_response_id))
        elif not request.store:
            request, _ = await _in_conversation(http, store, request, conversation_id)
            yield Following(request, None)
        else:
            with store.locks.held(owner_of(http), conversation_id, is_resumed=RESUMED in http):
                request, version = await _in_conversation(http, store, request, conversation_id)
                yield Following(request, _storing(http, store, request, version))

    async def retrieve(self, http: web.Request) -> web.StreamResponse:
        """`GET /v1/responses/{response_id}`."""
        check_include(http)
        if http.query.get("stream") in _TRUE:
            raise InvalidRequest("stream: a stored response is told as a whole", "stream", UNSUPPORTED)
        store, response_id = self._named(http)
        turn = await store.ask(partial(store.responses.get, owner_of(http), response_id))
        if turn is None:
            raise _not_found()
        return await json_answer(http, await asyncio.to_thread(response_of, turn))

    async def delete(self, http: web.Request) -> web.StreamResponse:
        """`DELETE /v1/responses/{response_id}`. Its stream cannot be resumed any more either."""
        store, response_id = self._named(http)
        if not await store.ask(partial(store.responses.delete, owner_of(http), response_id)):
            raise _not_found()
        forget_stream(http, response_id)
        return await json_answer(http, {"id": response_id, "object": "response", "deleted": True})

    async def input_items(self, http: web.Request) -> web.StreamResponse:
        """`GET /v1/responses/{response_id}/input_items`: the whole conversation before the response, as far as it is
        stored."""
        check_include(http)
        page = page_of(http)
        store, response_id = self._named(http)
        try:
            listed = await store.ask(partial(store.responses.listed_input, owner_of(http), response_id, page))
        except NoSuchItem:
            raise no_such_item() from None
        except Unfit as error:
            raise InvalidRequest(str(error)) from None
        if listed is None:
            raise _not_found()
        return await json_answer(http, await asyncio.to_thread(list_of, listed))

    def _named(self, http: web.Request) -> tuple[ResponseStore, str]:
        """The store, and the id that the path names. Raises `ResponseNotFound`."""
        response_id = http.match_info["response_id"]
        if self.store is None or _RESPONSE_ID.fullmatch(response_id) is None:
            raise _not_found()
        return self.store, response_id


async def _after_response(http: web.Request, store: ResponseStore, request: ResponsesRequest) -> ResponsesRequest:
    """The request with the responses that it follows before its own input. Raises `InvalidRequest`."""
    previous_id = request.previous_response_id
    if previous_id is None:
        return request
    items: Sequence[Item] | None = None
    if _RESPONSE_ID.fullmatch(previous_id) is not None:
        max_bytes = limits_of(http).max_body_bytes
        try:
            items = await store.ask(partial(store.responses.until, owner_of(http), previous_id, max_bytes))
        except Unfit as error:
            raise InvalidRequest(f"previous_response_id: {error}", PREVIOUS) from None
    if items is None:
        sentence = "previous_response_id: there is no such response, or one that it follows is gone"
        raise InvalidRequest(sentence, PREVIOUS, PREVIOUS_NOT_FOUND)
    return await _after(http, request, items)


async def _in_conversation(
    http: web.Request, store: ResponseStore, request: ResponsesRequest, conversation_id: str
) -> tuple[ResponsesRequest, Version]:
    """The request with the items of a conversation before its own input. One that resumes its stream gets those of the
    time when it began. Raises `InvalidRequest`."""
    found: Read | None = None
    if CONVERSATION_ID.fullmatch(conversation_id) is not None:
        resumed, max_bytes = http.get(RESUMED), limits_of(http).max_body_bytes
        before = "" if resumed is None else response_id_of(resumed.head.stream_id)
        read = partial(store.conversations.read, owner_of(http), conversation_id, max_bytes, before)
        try:
            found = await store.ask(read)
        except Unfit as error:
            raise InvalidRequest(f"conversation: {error}", CONVERSATION) from None
    if found is None:
        raise no_such_conversation()
    return await _after(http, request, found.items), found.version


async def _after(http: web.Request, request: ResponsesRequest, items: Sequence[Item]) -> ResponsesRequest:
    bodies = http.app[BODIES]
    with bodies.place(http) as place:
        place.add(sum(len(item.content) for item in items))
        return await bodies.parse(
            place, lambda: request.model_copy(update={"input": request.input.after(objects_of(items))})
        )


def _storing(
    http: web.Request, store: ResponseStore, request: ResponsesRequest, follows: str | Version | None
) -> StoreResponse | None:
    if not request.store:
        return None

    async def put(response: dict[str, Any], head: ReplyHead) -> str:
        make = partial(turn_of, response, request.input.items, follows, head.id_of)
        try:
            await store.put(owner_of(http), response["id"], make)
        except Unfit as error:
            return str(error)
        return ""

    return put


def _refuse_to_store(request: ResponsesRequest, notes: IgnoredFields) -> None:
    """What a router without a store makes of the fields about it. Raises `InvalidRequest`."""
    for name in (PREVIOUS, CONVERSATION):
        if getattr(request, name) is not None:
            sentence = f"{name} is not supported: this router stores no responses, send all items as input"
            raise InvalidRequest(sentence, name, UNSUPPORTED)
    if request.store and "store" in request.model_fields_set:
        code = notes.ignore("store", True, _STORE)
        if code is not None:
            raise InvalidRequest(f"store {REFUSED[code]}", "store", code)


def _not_found() -> ResponseNotFound:
    return ResponseNotFound("there is no such response, or it is no longer stored")


def forget_stream(http: web.Request, response_id: str) -> None:
    """The stream of a response of which something was deleted cannot be resumed any more."""
    if (streams := http.app.get(STREAMS)) is not None:
        streams.forget(reply_id_of(response_id))


def no_such_conversation() -> ConversationNotFound:
    """The error about a conversation, or an item of one, that was deleted, forgotten or never there."""
    return ConversationNotFound("there is no such conversation or item, or it is no longer stored", CONVERSATION)
