"""The official client library understands every answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from baton.router.http.openai.prompts import PromptMaker
from baton.wire.errors import RequestFailed
from baton.wire.messages.membership import DECODE
from baton.wire.tiers import TierTokens
from tests.router.fake_node import FakeNode, LegMessage, answering
from tests.router.rig import MODEL, Server, serving

TEXT = "The river goes to the sea."


@pytest.fixture
async def server(prompts: PromptMaker) -> AsyncIterator[Server]:
    async with serving(prompts) as running:
        yield running


def _async_client(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


async def test_the_async_client(server: Server, prompts: PromptMaker) -> None:
    await server.rig.pair(answering(prompts.tokenizer.encode(TEXT), "length"))
    async with _async_client(server) as client:
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == TEXT
        assert chunks[-2].choices[0].finish_reason == "length"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == len(prompts.tokenizer.encode(TEXT))
        answer = await client.completions.create(model=MODEL, prompt=["One prompt", "Another prompt"], n=2)
        assert [(choice.index, choice.text) for choice in answer.choices] == [(index, TEXT) for index in range(4)]
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL


async def test_the_client_is_told_where_cached_tokens_came_from(server: Server) -> None:
    tiers = (TierTokens("host", 4),)
    await server.rig.join(DECODE, lambda node, leg: node.emit(leg, [70], finish="length", cached=5, tiers=tiers))
    prompt: dict[str, Any] = {"model": MODEL, "extra_body": {"max_tokens": 1}}
    async with _async_client(server) as client:
        chat = await client.chat.completions.create(messages=[{"role": "user", "content": "Hi"}], **prompt)
        completion = await client.completions.create(prompt=[*range(9)], **prompt)
        response = await client.responses.create(model=MODEL, input="Hi")
    assert chat.usage is not None
    assert completion.usage is not None
    assert response.usage is not None
    found = (
        chat.usage.prompt_tokens_details,
        completion.usage.prompt_tokens_details,
        response.usage.input_tokens_details,
    )
    for details in found:
        assert details is not None
        assert (details.cached_tokens, details.to_dict()["cached_tokens_by_place"]) == (5, {"decode": 1, "host": 4})


async def test_the_client_raises_the_errors_of_its_own_tree(server: Server) -> None:
    async with _async_client(server) as client:
        with pytest.raises(openai.InternalServerError) as unavailable:
            await client.completions.create(model=MODEL, prompt="Hi")
        assert (unavailable.value.status_code, unavailable.value.code) == (503, "no_node")
        await server.rig.pair()
        with pytest.raises(openai.NotFoundError) as missing:
            await client.completions.create(model="other", prompt="Hi")
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.BadRequestError) as wrong:
            await client.completions.create(model=MODEL, prompt="Hi", temperature=3)
        assert (wrong.value.param, wrong.value.type) == ("temperature", "invalid_request_error")
        assert len(wrong.value.request_id or "") == 32


async def test_the_client_notices_a_stream_that_failed(server: Server) -> None:
    def script(node: FakeNode, leg: LegMessage) -> None:
        if leg.attempt == 1:
            node.emit(leg, [70])
        node.fail(leg, RequestFailed.code, "the pool burned")

    await server.rig.pair(script)
    async with _async_client(server) as client:
        stream = await client.completions.create(model=MODEL, prompt="A prompt of several tokens", stream=True)
        with pytest.raises(openai.APIError):
            _ = [chunk async for chunk in stream]


async def test_the_sync_client(server: Server, prompts: PromptMaker) -> None:
    await server.rig.pair(answering(prompts.tokenizer.encode(TEXT), "length"))

    def talk() -> tuple[str, str | None]:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            chunks = client.completions.create(model=MODEL, prompt="A prompt of several tokens", stream=True)
            answer = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}])
            with pytest.raises(openai.BadRequestError):
                client.completions.create(model=MODEL, prompt="")
            return "".join(chunk.choices[0].text for chunk in chunks), answer.choices[0].message.content

    assert await asyncio.to_thread(talk) == (TEXT, TEXT)
