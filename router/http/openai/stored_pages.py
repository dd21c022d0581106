"""Lists of stored items over HTTP: which page a request asks for, and the form of the answer.

The same for the input of a response and for a conversation. Knows no store.
"""

from __future__ import annotations

import re
from typing import Any

from aiohttp import web

from baton.router.http.access.guard import IDENTITY
from baton.router.http.openai.fields import UNSUPPORTED
from baton.router.http.openai.responses_request import INCLUDABLE, INCLUDE_LOGPROBS, MAX_RESPONSE_ID
from baton.router.http.openai.stored_items import objects_of
from baton.router.http.stored.records import Listed, Page
from baton.wire.errors import InvalidRequest

_LIMIT = re.compile(r"[1-9][0-9]?|100", re.ASCII)
_DEFAULT_LIMIT = "20"


def page_of(http: web.Request) -> Page:
    """The page that a request asks for. Raises `InvalidRequest`."""
    limit, order, after = http.query.get("limit", _DEFAULT_LIMIT), http.query.get("order", "desc"), None
    if _LIMIT.fullmatch(limit) is None:
        raise InvalidRequest("limit must be from 1 to 100", "limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", "order")
    if len(after := http.query.get("after") or "") > MAX_RESPONSE_ID:
        raise no_such_item()
    return Page(int(limit), order == "desc", after or None)


def list_of(listed: Listed) -> dict[str, Any]:
    """The answer that tells a page."""
    data = objects_of(listed.items)
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"object": "list", "data": data, **ends, "has_more": listed.has_more}


def no_such_item() -> InvalidRequest:
    """The error about an item after which a list was to go on."""
    return InvalidRequest("after is no item of this list", "after")


def check_include(http: web.Request) -> None:
    """Raise `InvalidRequest` for what cannot be told of stored items."""
    for name in (*http.query.getall("include", ()), *http.query.getall("include[]", ())):
        if name not in INCLUDABLE:
            raise InvalidRequest(f"include must be one of {', '.join(INCLUDABLE)}", "include")
        if name == INCLUDE_LOGPROBS:
            raise InvalidRequest("include: log probabilities are not stored", "include", UNSUPPORTED)


def owner_of(http: web.Request) -> str:
    """Whose responses and conversations a request is about."""
    identity = http.get(IDENTITY)
    return "" if identity is None else identity.name
