"""No endpoint lets the event loop parse a large body."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton.router.http.openai import request_body
from baton.router.http.openai.prompts import PromptMaker
from baton.router.http.openai.stored_responses import StoredResponses
from baton.router.http.operators.operations import POOLING_PATHS
from baton.router.http.serving.bodies import MAX_INLINE_BYTES
from baton.router.http.serving.limits import MAX_JSON_TEXTS
from baton.router.http.stored.database import Database
from baton.router.http.stored.store import ResponseStore
from tests.router.http_client import Reply, fetch
from tests.router.rig import MODEL, Server, serving

FILLER = {"user": "u" * MAX_INLINE_BYTES}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": MODEL, "messages": []},
    "/v1/completions": {"model": MODEL, "prompt": 1},
    "/v1/responses": {"model": MODEL, "input": 1},
    "/v1/conversations": {"items": 1},
    "/v1/conversations/{conversation_id}": {"metadata": 1},
    "/v1/conversations/{conversation_id}/items": {"items": 1},
    "/v1/messages": {"model": MODEL, "messages": []},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": []},
    "/tokenize": {"prompt": 1},
    "/detokenize": {"tokens": 1},
    "/admin/drain": {"node": 1},
    "/admin/prefer": {"node": 1},
}
"""Of every endpoint that reads a body; each is refused when it has been parsed."""


@pytest.fixture
async def server(prompts: PromptMaker) -> AsyncIterator[Server]:
    store = ResponseStore(Database(None, 2**20, 1000.0))
    async with serving(prompts, stored=StoredResponses(store)) as running:
        yield running
    await store.close()


async def post(server: Server, path: str, members: dict[str, Any]) -> Reply:
    path = path.format(conversation_id="conv_" + "0" * 32)
    return await fetch(server, "POST", path, json.dumps(members).encode())


def test_these_are_all_endpoints_that_read_a_body(server: Server) -> None:
    assert server.app is not None
    routes = [route for route in server.app.router.routes() if route.method == "POST" and route.resource is not None]
    paths = {route.resource.canonical.rstrip("/") for route in routes if route.resource is not None}
    assert paths == {*BODIES, *POOLING_PATHS, "/ping"}


@pytest.mark.parametrize("path", BODIES)
async def test_a_large_body_is_parsed_off_the_loop(server: Server, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    parse = request_body.parse_body

    def note(*arguments: Any) -> Any:
        threads.append(threading.get_ident())
        return parse(*arguments)

    monkeypatch.setattr(request_body, "parse_body", note)
    reply = await post(server, path, BODIES[path] | FILLER)
    assert reply.status == 400
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()


@pytest.mark.parametrize("path", BODIES)
async def test_a_body_with_too_many_members_is_refused_by_its_limit(server: Server, path: str) -> None:
    members = {f"k{number}": 1 for number in range(MAX_JSON_TEXTS)}
    reply = await post(server, path, BODIES[path] | members)
    assert reply.status == 400
    assert f"{MAX_JSON_TEXTS:,} names" in reply.json()["error"]["message"]
