from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from baton.runtime.clock import host_clock
from baton.wire.errors import InvalidSetting
from tests.bench.client.rig import PATIENCE_S, Announcing
from tests.bench.mock_server.schedule import Answer, Fault, FaultKind, Script, Steady
from tests.bench.mock_server.server import MockOptions, MockServer, mock_server

STREAMED = {"prompt": [1, 2, 3], "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(PATIENCE_S)) as session:
        yield session


async def events(
    session: aiohttp.ClientSession, server: MockServer, body: dict[str, Any], path: str = "/v1/completions"
) -> list[dict[str, Any]]:
    """Those of a stream that ends as it should."""
    async with session.post(server.url + path, json=body) as answer:
        assert answer.status == 200
        assert answer.content_type == "text/event-stream"
        parts = (await answer.text()).split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


async def test_chunks_are_written_when_they_are_due(session: aiohttp.ClientSession) -> None:
    schedule = Script((Answer(0.03, (0.02, 0.0, 0.01)),))
    async with mock_server(schedule) as server:
        await events(session, server, STREAMED)
    record = server.records[0]
    assert len(record.written_s) == 4
    for written_s, due_s in zip(record.written_s, (0.03, 0.05, 0.05, 0.06), strict=True):
        assert written_s >= record.received_s + due_s
    assert record.written_s[1] == record.written_s[2]
    assert record.left_s is None


async def test_an_answer_has_the_shape_of_openai(session: aiohttp.ClientSession) -> None:
    async with mock_server(Steady(0.0, 0.0, tokens_per_chunk=2)) as server:
        first, last, usage = await events(session, server, STREAMED | {"return_token_ids": True, "model": "m"})
    assert first["choices"] == [
        {"index": 0, "text": " word word", "logprobs": None, "finish_reason": None, "token_ids": [100, 101]}
    ]
    assert last["choices"][0] | {"logprobs": 0} == {
        "index": 0,
        "text": " word",
        "logprobs": 0,
        "finish_reason": "length",
        "token_ids": [102],
    }
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert (first["id"], first["object"], first["model"]) == ("mock-0", "text_completion", "m")


async def test_a_chat_opens_with_its_role(session: aiohttp.ClientSession) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "stream": True}
    async with mock_server(Steady(0.0, 0.0)) as server:
        opening, only = await events(session, server, body, "/v1/chat/completions")
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert only["choices"][0]["delta"] == {"content": " word"}
    assert only["object"] == "chat.completion.chunk"


@pytest.mark.parametrize(
    ("path", "body", "text_of"),
    [
        ("/v1/completions", {"prompt": "a b"}, lambda choice: choice["text"]),
        ("/v1/chat/completions", {"messages": [{"content": "a b"}]}, lambda choice: choice["message"]["content"]),
    ],
)
async def test_an_answer_need_not_be_a_stream(
    session: aiohttp.ClientSession, path: str, body: dict[str, Any], text_of: Any
) -> None:
    async with (
        mock_server(Steady(0.0, 0.0)) as server,
        session.post(server.url + path, json=body | {"max_tokens": 2, "return_token_ids": True}) as answer,
    ):
        whole = await answer.json()
    assert text_of(whole["choices"][0]) == " word word"
    assert (whole["choices"][0]["token_ids"], whole["usage"]["completion_tokens"]) == ([100, 101], 2)


async def test_batons_timings_fit_to_what_was_written(session: aiohttp.ClientSession) -> None:
    body = STREAMED | {"return_timings": True}
    async with mock_server(Steady(0.02, 0.01), MockOptions(owned_by="baton")) as server:
        usage = (await events(session, server, body))[-1]["usage"]
        alone = (await events(session, server, body | {"max_tokens": 1}))[-1]["usage"]
        unasked = (await events(session, server, STREAMED))[-1]["usage"]
    record, timings = server.records[0], usage["timings"]
    order = ["received", "sent", "prefill_begun", "first_sampled", "first_written"]
    order += ["kv_ready", "decode_begun", "second_sampled", "second_written"]
    stamps_us = [timings[f"{name}_us"] for name in order]
    assert stamps_us == sorted(stamps_us)
    assert stamps_us[0] == round(record.received_s * 1e6)
    assert timings["first_written_us"] == round(record.written_s[0] * 1e6)
    assert timings["second_written_us"] == round(record.written_s[1] * 1e6)
    assert (timings["clock"], timings["attempts"]) == (host_clock(), 1)
    assert set(usage["kv_transfer"]) == {"blocks", "bytes", "transfer_ms", "exposed_ms"}
    assert alone["timings"]["second_sampled_us"] is None
    assert "kv_transfer" not in alone
    assert "timings" not in unasked


async def test_requests_are_numbered_as_they_come_and_recorded(session: aiohttp.ClientSession) -> None:
    schedule = Announcing(Script((Answer(0.2), Answer(0.0))), 0)
    async with mock_server(schedule) as server, asyncio.TaskGroup() as tasks:
        tasks.create_task(events(session, server, STREAMED | {"prompt": [7]}))
        await asyncio.wait_for(schedule.has_come.wait(), PATIENCE_S)
        await events(session, server, STREAMED | {"prompt": [8]})
    assert [record.number for record in server.records] == [0, 1]
    assert [record.body["prompt"] for record in server.records] == [[7], [8]]
    assert server.records[0].client_port != server.records[1].client_port
    assert server.records[0].written_s[0] > server.records[1].written_s[0]


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"[]",
        b'{"prompt": 5}',
        b'{"prompt": ""}',
        b'{"prompt": ["a"]}',
        b'{"prompt": "a", "max_tokens": "9"}',
        b"\xff",
    ],
)
async def test_a_bad_body_is_refused(session: aiohttp.ClientSession, data: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    async with (
        mock_server(Steady(0.0, 0.0)) as server,
        session.post(f"{server.url}/v1/completions", data=data, headers=headers) as answer,
    ):
        assert answer.status == 400
        assert (await answer.json())["error"]["message"]


async def test_a_client_that_leaves_is_noticed(session: aiohttp.ClientSession) -> None:
    async with mock_server(Script((Answer(0.0, (PATIENCE_S,)),))) as server:
        async with session.post(f"{server.url}/v1/completions", json=STREAMED) as answer:
            assert await answer.content.readany()
        await server.until_idle(PATIENCE_S)
        left_s, written_s = server.records[0].left_s, server.records[0].written_s
    assert left_s is not None
    assert left_s > written_s[0]


async def test_closing_breaks_off_what_runs(session: aiohttp.ClientSession) -> None:
    async with contextlib.AsyncExitStack() as stack:
        async with mock_server(Script((Answer(0.0, fault=Fault(FaultKind.STALL, 1)),))) as server:
            posting = session.post(f"{server.url}/v1/completions", json=STREAMED)
            answer = await stack.enter_async_context(posting)
            assert await answer.content.readany()
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.content.read()
    assert server.records[0].left_s is None


async def test_a_port_that_is_taken_is_said() -> None:
    async with mock_server(Steady(0.0, 0.0)) as server:
        port = int(server.url.rpartition(":")[2])
        with pytest.raises(InvalidSetting, match=f"cannot listen on 127.0.0.1:{port}"):
            async with mock_server(Steady(0.0, 0.0), MockOptions(port=port)):
                pass
