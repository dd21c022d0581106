"""Requests of real clients, as they send them, are answered. `python -m tests.clients` has the clients themselves."""

from __future__ import annotations

import json

import pytest

from baton.router.http.openai.prompts import PromptMaker
from tests.clients.recorded import MODEL as MODEL_MARK
from tests.clients.recorded import RECORDED, Recorded
from tests.router.fake_node import answering
from tests.router.http_client import fetch
from tests.router.rig import MODEL, serving


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda it: it.client)
async def test_what_a_client_sends_is_answered(recorded: Recorded, prompts: PromptMaker) -> None:
    async with serving(prompts) as server:
        await server.rig.pair(answering(prompts.tokenizer.encode("The river goes to the sea."), "length"))
        body = json.dumps(recorded.body).replace(MODEL_MARK, MODEL).encode()
        reply = await fetch(server, "POST", recorded.path, body)
        assert reply.status == 200, reply.body
        assert reply.is_whole
        assert reply.body.endswith(b"data: [DONE]\n\n") is bool(recorded.body.get("stream"))
