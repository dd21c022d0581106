"""`/v1/conversations`: conversations that have an id of their own, and their items.

Owns these routes. The rules are those of stored responses: a conversation is found by the API key that made it and by
no other, and deleting it removes all that belongs to it. While a response of it is in the making, items are neither
added nor removed one by one. `stored_responses` has how a response continues one.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from aiohttp import web

from baton.router.http.access.guard import CONVERSATION_ITEM_ROUTE, CONVERSATION_ITEMS_ROUTE, CONVERSATION_ROUTE
from baton.router.http.openai.conversations_request import (
    ConversationCreate,
    ConversationItemsCreate,
    ConversationUpdate,
)
from baton.router.http.openai.fields import UNSUPPORTED
from baton.router.http.openai.replies import json_bytes
from baton.router.http.openai.request_body import read_request
from baton.router.http.openai.stored_items import new_items, objects_of
from baton.router.http.openai.stored_pages import check_include, list_of, no_such_item, owner_of, page_of
from baton.router.http.openai.stored_responses import CONVERSATION_ID, forget_stream, no_such_conversation
from baton.router.http.serving.json_answer import json_answer
from baton.router.http.stored.records import Item, Listed, NamedConversation, NoSuchItem, Unfit
from baton.router.http.stored.store import ResponseStore
from baton.wire.errors import InvalidRequest

ROUTE = "/v1/conversations"
_ITEM_ID = re.compile(r"(msg|rs|fc|fco)_[0-9a-f]{32}", re.ASCII)
_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True)
class StoredConversations:
    """The conversations of one router, None where it stores none."""

    store: ResponseStore | None = None

    def add_routes(self, app: web.Application) -> None:
        """Add the routes to `app`."""
        app.router.add_post(ROUTE, self.begin)
        app.router.add_get(CONVERSATION_ROUTE, self.retrieve)
        app.router.add_post(CONVERSATION_ROUTE, self.update)
        app.router.add_delete(CONVERSATION_ROUTE, self.delete)
        app.router.add_get(CONVERSATION_ITEMS_ROUTE, self.items)
        app.router.add_post(CONVERSATION_ITEMS_ROUTE, self.add_items)
        app.router.add_get(CONVERSATION_ITEM_ROUTE, self.item)
        app.router.add_delete(CONVERSATION_ITEM_ROUTE, self.delete_item)

    async def begin(self, http: web.Request) -> web.StreamResponse:
        """`POST /v1/conversations`."""
        if self.store is None:
            sentence = "conversations are not supported: this router stores none, send all items to /v1/responses"
            raise InvalidRequest(sentence, None, UNSUPPORTED)
        request = await read_request(http, ConversationCreate)
        sent = () if request.items is None else request.items.items
        items = await asyncio.to_thread(new_items, sent, _new_id)
        begin, metadata = self.store.conversations.begin, json_bytes(dict(request.metadata or {}))
        conversation_id = f"conv_{secrets.token_hex(16)}"
        named = await _ask(self.store, partial(begin, owner_of(http), conversation_id, metadata, items))
        return await json_answer(http, _object(named))

    async def retrieve(self, http: web.Request) -> web.StreamResponse:
        """`GET /v1/conversations/{conversation_id}`."""
        store, names = self._named(http)
        return await json_answer(http, _object(await _ask(store, partial(store.conversations.get, *names))))

    async def update(self, http: web.Request) -> web.StreamResponse:
        """`POST /v1/conversations/{conversation_id}`: other metadata."""
        store, names = self._named(http)
        request = await read_request(http, ConversationUpdate)
        metadata = json_bytes(dict(request.metadata or {}))
        return await json_answer(
            http, _object(await _ask(store, partial(store.conversations.change, *names, metadata)))
        )

    async def delete(self, http: web.Request) -> web.StreamResponse:
        """`DELETE /v1/conversations/{conversation_id}`: its items and responses are removed too."""
        store, names = self._named(http)
        for response_id in await _ask(store, partial(store.conversations.delete, *names)):
            forget_stream(http, response_id)
        return await json_answer(http, {"id": names[1], "object": "conversation.deleted", "deleted": True})

    async def items(self, http: web.Request) -> web.StreamResponse:
        """`GET /v1/conversations/{conversation_id}/items`."""
        check_include(http)
        page = page_of(http)
        store, names = self._named(http)
        listed = await _ask(store, partial(store.conversations.listed, *names, page))
        return await json_answer(http, await asyncio.to_thread(list_of, listed))

    async def add_items(self, http: web.Request) -> web.StreamResponse:
        """`POST /v1/conversations/{conversation_id}/items`."""
        check_include(http)
        store, names = self._named(http)
        request = await read_request(http, ConversationItemsCreate)
        items = await asyncio.to_thread(new_items, request.items.items, _new_id)
        store.locks.check(*names)
        if not await _ask(store, partial(store.conversations.add, *names, items)):
            raise no_such_conversation()
        return await json_answer(http, await asyncio.to_thread(list_of, Listed(items, has_more=False)))

    async def item(self, http: web.Request) -> web.StreamResponse:
        """`GET /v1/conversations/{conversation_id}/items/{item_id}`."""
        check_include(http)
        store, names = self._named(http)
        item: Item = await _ask(store, partial(store.conversations.item, *names, _item_id(http)))
        return await json_answer(http, (await asyncio.to_thread(objects_of, [item]))[0])

    async def delete_item(self, http: web.Request) -> web.StreamResponse:
        """`DELETE /v1/conversations/{conversation_id}/items/{item_id}`."""
        store, names = self._named(http)
        store.locks.check(*names)
        left = await _ask(store, partial(store.conversations.delete_item, *names, _item_id(http)))
        if left.response_id is not None:
            forget_stream(http, left.response_id)
        return await json_answer(http, _object(left.named))

    def _named(self, http: web.Request) -> tuple[ResponseStore, tuple[str, str]]:
        """The store, and the owner and id of the conversation that the path names. Raises `ConversationNotFound`."""
        conversation_id = http.match_info["conversation_id"]
        if self.store is None or CONVERSATION_ID.fullmatch(conversation_id) is None:
            raise no_such_conversation()
        return self.store, (owner_of(http), conversation_id)


async def _ask(store: ResponseStore, work: Callable[[], _Found | None]) -> _Found:
    """What `work` finds. Raises `ConversationNotFound`, `InvalidRequest` for what does not fit, and `Overloaded`."""
    try:
        found = await store.ask(work)
    except NoSuchItem:
        raise no_such_item() from None
    except Unfit as error:
        raise InvalidRequest(str(error)) from None
    if found is None:
        raise no_such_conversation()
    return found


def _item_id(http: web.Request) -> str:
    item_id = http.match_info["item_id"]
    if _ITEM_ID.fullmatch(item_id) is None:
        raise no_such_conversation()
    return item_id


def _object(named: NamedConversation) -> dict[str, Any]:
    members = {"id": named.conversation_id, "object": "conversation", "created_at": named.created_at}
    return {**members, "metadata": json.loads(named.metadata)}


def _new_id(_: str) -> str:
    return secrets.token_hex(16)
