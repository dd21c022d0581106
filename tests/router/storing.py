"""Helper: a server that stores responses, and requests to it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from baton.router.http.access.guard import Guard
from baton.router.http.access.keys import digest_of
from baton.router.http.openai.prompts import PromptMaker
from baton.router.http.openai.stored_responses import StoredResponses
from baton.router.http.stored.database import Database
from baton.router.http.stored.store import ResponseStore
from baton.wire.messages.legs import Decode
from tests.router.conversations import conversing
from tests.router.fake_node import FakeNode, answering
from tests.router.http_client import Reply, fetch
from tests.router.rig import MODEL, Server

RESPONSES = "/v1/responses"


@asynccontextmanager
async def storing(prompts: PromptMaker, database: Database | None = None, **settings: Any) -> AsyncIterator[Server]:
    """`settings`: see `serving`."""
    store = ResponseStore(database or Database(None, 2**22, 1000.0))
    try:
        async with conversing(prompts, stored=StoredResponses(store), **settings) as server:
            yield server
    finally:
        await store.close()


async def post(server: Server, headers: dict[str, str] | None = None, **members: Any) -> Reply:
    """A request for a response."""
    return await send(server, "POST", RESPONSES, headers, **{"model": MODEL, "input": "Hi"} | members)


async def send(server: Server, method: str, path: str, headers: dict[str, str] | None = None, **members: Any) -> Reply:
    """A request with a body of these members; a POST always has one."""
    body = json.dumps(members).encode() if members or method == "POST" else b""
    return await fetch(server, method, path, body, headers)


async def says(server: Server, prompts: PromptMaker, text: str = "Well.") -> FakeNode:
    """All answers are `text`; the decode node."""
    _, node = await server.rig.pair(answering(prompts.tokenizer.encode(text), "complete"))
    return node


async def prompt_of(node: FakeNode, prompts: PromptMaker) -> str:
    """The text of the next prompt that the node gets."""
    leg = await node.expect(Decode)
    return prompts.tokenizer.decode(leg.prompt.token_ids, skip_special_tokens=False)


def guard_of(path: Path, *names: str, settings: str = "") -> Guard:
    """A guard that lets in these keys, each with its name as the key."""
    path.write_text("".join(f'[{name}]\n{settings}sha256 = "{digest_of(name).hex()}"\n' for name in names))
    return Guard(path, "", b"s" * 32)
