"""Responses that are stored, as requests see them: what one follows, and `/v1/responses/{id}`.

Owns these three routes, and the rules: a response is found by the API key that asked for it and by no other, one that
was deleted, forgotten or never there is all the same, and a conversation of which a part is gone is not continued with
what is left. Does not know where responses lie.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web

from baton.router.http.access.guard import IDENTITY, ITEMS_ROUTE, RESPONSE_ROUTE
from baton.router.http.openai.fields import REFUSED, UNSUPPORTED
from baton.router.http.openai.ignored import Ignored, IgnoredFields
from baton.router.http.openai.replies import ReplyHead
from baton.router.http.openai.responses_api import StoreResponse, reply_id_of
from baton.router.http.openai.responses_request import INCLUDABLE, INCLUDE_LOGPROBS, MAX_RESPONSE_ID, ResponsesRequest
from baton.router.http.openai.stored_items import items_of, turn_of
from baton.router.http.resume.requests import STREAMS
from baton.router.http.serving.bodies import BODIES
from baton.router.http.serving.json_answer import json_answer
from baton.router.http.serving.limits import limits_of
from baton.router.http.stored.database import Turn, Unfit
from baton.router.http.stored.store import ResponseStore
from baton.wire.errors import InvalidRequest, ResponseNotFound

PREVIOUS, PREVIOUS_NOT_FOUND = "previous_response_id", "previous_response_not_found"
_ID = re.compile(r"resp_[0-9a-f]{32}", re.ASCII)
_STORE = {"store": Ignored("this router stores no responses", (False,))}
_LIMIT = re.compile(r"[1-9][0-9]?|100", re.ASCII)
_DEFAULT_LIMIT = "20"
_TRUE = ("true", "1")


@dataclass(frozen=True, slots=True)
class StoredResponses:
    """The stored responses of one router, None where it stores none."""

    store: ResponseStore | None = None

    def add_routes(self, app: web.Application) -> None:
        """Add the routes to `app`."""
        app.router.add_get(RESPONSE_ROUTE, self.retrieve)
        app.router.add_delete(RESPONSE_ROUTE, self.delete)
        app.router.add_get(ITEMS_ROUTE, self.input_items)

    async def continued(self, http: web.Request, request: ResponsesRequest, notes: IgnoredFields) -> ResponsesRequest:
        """The request with the conversation that it follows before its own input. Raises `InvalidRequest`."""
        previous_id = request.previous_response_id
        if self.store is None:
            _refuse_to_store(request, notes)
        if self.store is None or previous_id is None:
            return request
        bodies, max_bytes = http.app[BODIES], limits_of(http).max_body_bytes
        with bodies.place(http) as place:
            turns = await self._conversation(http, self.store, previous_id, max_bytes)
            if not turns or turns[0].previous_id is not None:
                raise InvalidRequest(
                    "previous_response_id: there is no such response, or one that it follows is gone",
                    PREVIOUS,
                    PREVIOUS_NOT_FOUND,
                )
            place.add(sum(turn.num_bytes for turn in turns))
            return await bodies.parse(place, partial(_after, request, turns))

    def storing(self, http: web.Request, request: ResponsesRequest) -> StoreResponse | None:
        """What stores the response to `request`, None when it is not to be stored."""
        store = self.store
        if store is None or not request.store:
            return None

        async def put(response: dict[str, Any], head: ReplyHead) -> str:
            make = partial(turn_of, response, request.input.items, request.previous_response_id, head.id_of)
            try:
                await store.put(_owner(http), response["id"], make)
            except Unfit as error:
                return str(error)
            return ""

        return put

    async def retrieve(self, http: web.Request) -> web.StreamResponse:
        """`GET /v1/responses/{response_id}`."""
        _check_include(http)
        if http.query.get("stream") in _TRUE:
            raise InvalidRequest("stream: a stored response is told as a whole", "stream", UNSUPPORTED)
        store, response_id = self._named(http)
        turn = await store.get(_owner(http), response_id)
        if turn is None:
            raise _not_found()
        return await json_answer(http, await asyncio.to_thread(json.loads, turn.response))

    async def delete(self, http: web.Request) -> web.StreamResponse:
        """`DELETE /v1/responses/{response_id}`. Its stream cannot be resumed any more either."""
        store, response_id = self._named(http)
        if not await store.delete(_owner(http), response_id):
            raise _not_found()
        if (streams := http.app.get(STREAMS)) is not None:
            streams.forget(reply_id_of(response_id))
        return await json_answer(http, {"id": response_id, "object": "response", "deleted": True})

    async def input_items(self, http: web.Request) -> web.StreamResponse:
        """`GET /v1/responses/{response_id}/input_items`: the whole conversation before the response, as far as it is
        stored."""
        _check_include(http)
        page = _Page.of(http)
        store, response_id = self._named(http)
        # what it follows was read for it, and came with a body as large
        turns = await self._conversation(http, store, response_id, 2 * limits_of(http).max_body_bytes)
        if not turns:
            raise _not_found()
        return await json_answer(http, await asyncio.to_thread(page.listed, turns))

    def _named(self, http: web.Request) -> tuple[ResponseStore, str]:
        """The store, and the id that the path names. Raises `ResponseNotFound`."""
        response_id = http.match_info["response_id"]
        if self.store is None or _ID.fullmatch(response_id) is None:
            raise _not_found()
        return self.store, response_id

    async def _conversation(
        self, http: web.Request, store: ResponseStore, response_id: str, max_bytes: int
    ) -> Sequence[Turn]:
        if _ID.fullmatch(response_id) is None:
            return ()
        try:
            return await store.conversation(_owner(http), response_id, max_bytes)
        except Unfit as error:
            raise InvalidRequest(f"{error}: send what matters of it as input", PREVIOUS) from None


@dataclass(frozen=True, slots=True)
class _Page:
    """The part of a list that a request asks for."""

    limit: int
    is_descending: bool
    after: str | None

    @classmethod
    def of(cls, http: web.Request) -> _Page:
        """Raises `InvalidRequest`."""
        limit, order, after = http.query.get("limit", _DEFAULT_LIMIT), http.query.get("order", "desc"), None
        if _LIMIT.fullmatch(limit) is None:
            raise InvalidRequest("limit must be from 1 to 100", "limit")
        if order not in ("asc", "desc"):
            raise InvalidRequest("order must be asc or desc", "order")
        if len(after := http.query.get("after") or "") > MAX_RESPONSE_ID:
            raise InvalidRequest("after is no item of this list", "after")
        return cls(int(limit), order == "desc", after or None)

    def listed(self, turns: Sequence[Turn]) -> dict[str, Any]:
        """The input of the last of `turns`, which follows the others. Raises `InvalidRequest`."""
        items = [*items_of(turns[:-1]), *json.loads(turns[-1].items)]
        if self.is_descending:
            items.reverse()
        begin = 0
        if self.after is not None:
            begin = 1 + next((at for at, item in enumerate(items) if item["id"] == self.after), len(items))
            if begin > len(items):
                raise InvalidRequest("after is no item of this list", "after")
        data = items[begin : begin + self.limit]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
        return {"object": "list", "data": data, **ends, "has_more": begin + self.limit < len(items)}


def _after(request: ResponsesRequest, turns: Sequence[Turn]) -> ResponsesRequest:
    return request.model_copy(update={"input": request.input.after(items_of(turns))})


def _refuse_to_store(request: ResponsesRequest, notes: IgnoredFields) -> None:
    """What a router without a store makes of the fields about it. Raises `InvalidRequest`."""
    if request.previous_response_id is not None:
        sentence = "previous_response_id is not supported: this router stores no responses, send all items as input"
        raise InvalidRequest(sentence, PREVIOUS, UNSUPPORTED)
    if request.store and "store" in request.model_fields_set:
        code = notes.ignore("store", True, _STORE)
        if code is not None:
            raise InvalidRequest(f"store {REFUSED[code]}", "store", code)


def _check_include(http: web.Request) -> None:
    for name in (*http.query.getall("include", ()), *http.query.getall("include[]", ())):
        if name not in INCLUDABLE:
            raise InvalidRequest(f"include must be one of {', '.join(INCLUDABLE)}", "include")
        if name == INCLUDE_LOGPROBS:
            raise InvalidRequest("include: log probabilities are not stored", "include", UNSUPPORTED)


def _owner(http: web.Request) -> str:
    identity = http.get(IDENTITY)
    return "" if identity is None else identity.name


def _not_found() -> ResponseNotFound:
    return ResponseNotFound("there is no such response, or it is no longer stored")
