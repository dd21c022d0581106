"""Answers of megabytes that are not streamed: whole, in pieces, beside other work, and not for ever."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from typing import Any

import pytest

from baton.router.http.openai.prompts import PromptMaker
from baton.router.http.serving.limits import HttpLimits
from baton.wire.messages.membership import DECODE
from baton.wire.messages.output import TokenEvent, TokenLogprobs, Tokens
from tests.router.fake_node import FakeNode, LegMessage
from tests.router.http_client import chat_body, connected, parse_reply, post_chat, post_completion, request_bytes
from tests.router.rig import Server, serving

NUM_TOKENS = 200
TOP_IDS = tuple(range(60, 80))


def _scored(node: FakeNode, leg: LegMessage) -> None:
    """All tokens in one message, each with twenty alternatives."""
    ids: Sequence[int] = [65 + index % 20 for index in range(NUM_TOKENS)]
    logprobs = tuple(TokenLogprobs(-0.5, TOP_IDS, tuple(-0.1 * rank for rank in range(20))) for _ in ids)
    event = TokenEvent(leg.handoff_id, leg.attempt, 0, tuple(ids), logprobs, "length", 0)
    node.send(Tokens(node.hello.epoch, (event,)))


async def _joined(server: Server) -> None:
    await server.rig.join(DECODE, _scored, max_request_tokens=4096)


async def test_a_large_chat_answer_is_whole_and_comes_in_pieces(prompts: PromptMaker) -> None:
    async with serving(prompts) as server:
        await _joined(server)
        reply = await post_chat(server, n=2, max_tokens=NUM_TOKENS, logprobs=True, top_logprobs=20)
        assert (reply.status, reply.is_whole) == (200, True)
        assert reply.headers["content-type"].startswith("application/json")
        assert len(reply.headers["x-request-id"]) == 32
        assert len(reply.pieces) > 10
        assert max(map(len, reply.pieces)) < 2**16
        for choice in reply.json()["choices"]:
            assert len(choice["logprobs"]["content"]) == NUM_TOKENS
            assert {len(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]} == {20}
        assert reply.json()["usage"]["completion_tokens"] == 2 * NUM_TOKENS


async def test_a_large_completion_has_lists_of_one_length(prompts: PromptMaker) -> None:
    async with serving(prompts) as server:
        await _joined(server)
        reply = await post_completion(server, n=4, max_tokens=NUM_TOKENS, logprobs=5)
        assert len(reply.pieces) > 1
        for choice in reply.json()["choices"]:
            assert {len(items) for items in choice["logprobs"].values()} == {NUM_TOKENS}
            assert choice["logprobs"]["text_offset"] == sorted(choice["logprobs"]["text_offset"])


async def test_other_tasks_get_their_turn_while_a_large_answer_is_made(prompts: PromptMaker) -> None:
    async with serving(prompts) as server:
        await _joined(server)
        num_turns = 0

        async def count() -> None:
            nonlocal num_turns
            while True:
                num_turns += 1
                await asyncio.sleep(0)

        async with connected(server) as connection:
            body = json.dumps(chat_body(n=2, max_tokens=NUM_TOKENS, logprobs=True, top_logprobs=20)).encode()
            await connection.send(request_bytes("POST", "/v1/chat/completions", body))
            await connection.until(b"\r\n\r\n")
            other = asyncio.create_task(count())
            reply = parse_reply(await connection.to_end())
            other.cancel()
        assert num_turns >= len(reply.pieces) / 2  # the first pieces came together with the headers


async def test_a_client_that_does_not_take_its_answer_is_dropped(prompts: PromptMaker) -> None:
    async with serving(prompts, limits=HttpLimits(write_s=0.3)) as server:
        await _joined(server)
        async with connected(server, buffer_bytes=4096) as connection:
            body = json.dumps(chat_body(n=4, max_tokens=NUM_TOKENS, logprobs=True, top_logprobs=20)).encode()
            await connection.send(request_bytes("POST", "/v1/chat/completions", body))
            async with asyncio.timeout(10):
                while not server.http.connections.num_open:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                while server.http.connections.num_open:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            with contextlib.suppress(ConnectionError):
                await connection.to_end()
            assert not parse_reply(bytes(connection.received)).is_whole


@pytest.mark.parametrize(("members", "param"), [
    ({"n": 128, "max_tokens": 400, "logprobs": True, "top_logprobs": 20}, "max_tokens"),
    ({"n": 128, "max_completion_tokens": 400, "logprobs": True, "top_logprobs": 20}, "max_completion_tokens"),
    ({"n": 128, "max_tokens": 40_000}, "max_tokens"),
])  # fmt: skip
async def test_an_answer_that_would_hold_too_much_is_refused(
    prompts: PromptMaker, members: dict[str, Any], param: str
) -> None:
    async with serving(prompts) as server:
        await server.rig.join(DECODE, max_request_tokens=2**20)
        reply = await post_chat(server, **members)
        assert (reply.status, reply.error["param"]) == (400, param)
        assert "an answer may hold" in reply.error["message"]
