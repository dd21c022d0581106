"""Streams that are resumed: every event comes once, whatever broke, and to nobody else."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.engine.text.answers.formats import AnswerFormat
from baton.launch.api_client import ApiClient
from baton.router.http.access.guard import Guard
from baton.router.http.access.keys import digest_of
from baton.router.http.openai.prompts import PromptMaker
from baton.router.http.resume.logs import Folder, LogPlace, Memory
from baton.router.http.resume.streams import Streams
from baton.wire.drafts import VerifiedDraft
from baton.wire.errors import RequestFailed
from baton.wire.messages.legs import Cancel, Decode
from baton.wire.messages.membership import DECODE
from baton.wire.tiers import TierTokens
from tests.router.fake_node import FakeNode
from tests.router.http_client import (
    Connection,
    Reply,
    chat_body,
    completion_body,
    connected,
    fetch,
    parse_reply,
    request_bytes,
)
from tests.router.rig import MODEL, Server, serving

KEEP_S = 60.0
IDS = [70, 71, 72, 73, 74, 75]
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = "/v1/messages"
NUM_FIRST = {CHAT: 1, COMPLETIONS: 0, MESSAGES: 3}
"""Events before that of the first token."""
_EVENT = re.compile(rb"id: (\S+)\ndata: (.*)\n\n")
Event = tuple[str, str]


@asynccontextmanager
async def router(prompts: PromptMaker, place: LogPlace, guard: Guard | None = None) -> AsyncIterator[Server]:
    streams = Streams(place, KEEP_S)
    try:
        async with serving(prompts, streams=streams, guard=guard) as server:
            yield server
    finally:
        streams.close()


def events_of(body: bytes) -> list[Event]:
    """Ids and data of the whole events."""
    return [(name.decode(), data.decode()) for name, data in _EVENT.findall(re.sub(rb"event: .*\n", b"", body))]


def body_of(path: str, **members: Any) -> bytes:
    make = completion_body if path == COMPLETIONS else chat_body
    return json.dumps(make(stream=True, max_tokens=len(IDS), **members)).encode()


def without_ids(events: list[Event]) -> list[str]:
    """What the events say, without what is random in every answer."""
    return [re.sub(r'"(id|created|usage)":("[^"]*"|\d+|\{.*\})', "", data) for _, data in events]


async def begin(server: Server, node: FakeNode, connection: Connection, path: str, num_tokens: int) -> list[Event]:
    """Start a stream whose client gets so many tokens; its events."""
    await connection.send(request_bytes("POST", path, body_of(path)))
    leg = await node.expect(Decode)
    for place in range(num_tokens):
        node.emit(leg, [IDS[place]], place)
    await connection.until(b"\n\n", num_tokens + NUM_FIRST[path])
    return events_of(bytes(connection.received))


def finish(node: FakeNode, leg: Decode) -> None:
    first = len(leg.output_ids)
    for place in range(first, len(IDS)):
        node.emit(leg, [IDS[place]], place, finish="length" if place == len(IDS) - 1 else "")


async def whole(prompts: PromptMaker, path: str) -> list[Event]:
    """The stream when nothing breaks."""
    async with router(prompts, Memory()) as server:
        node = await server.rig.join(DECODE)
        asking = asyncio.create_task(fetch(server, "POST", path, body_of(path)))
        finish(node, await node.expect(Decode))
        return events_of((await asking).body)


async def resumed(server: Server, path: str, last: str, *, again: bool, headers: dict[str, str] | None = None) -> Reply:
    """The answer to a client that has the event `last`: it sends its request `again`, or asks for the rest."""
    sent = {"last-event-id": last, **(headers or {})}
    if again:
        return await fetch(server, "POST", path, body_of(path), sent)
    return await fetch(server, "GET", f"/v1/streams/{last}", headers=headers)


@pytest.mark.parametrize("path", list(NUM_FIRST))
@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 4])
async def test_a_client_that_lost_its_connection_gets_the_rest_once(
    prompts: PromptMaker, path: str, again: bool, num_tokens: int
) -> None:
    async with router(prompts, Memory()) as server:
        node = await server.rig.join(DECODE)
        async with connected(server) as connection:
            before = await begin(server, node, connection, path, num_tokens)
        await node.expect(Cancel)
        asking = asyncio.create_task(resumed(server, path, before[-1][0], again=again))
        leg = await node.expect(Decode)
        assert list(leg.output_ids) == IDS[:num_tokens]
        assert leg.params.max_tokens == len(IDS)
        finish(node, leg)
        after = events_of((await asking).body)
    assert without_ids(before + after) == without_ids(await whole(prompts, path))
    names = [name for name, _ in before + after]
    assert [int(name.rpartition(".")[2]) for name in names] == list(range(1, len(names) + 1))
    if path != MESSAGES:
        bodies = [json.loads(data) for _, data in before + after[:-1]]
        assert len({(each["id"], each["created"]) for each in bodies}) == 1


async def test_baton_chat_gets_its_whole_answer_although_the_connection_breaks(prompts: PromptMaker) -> None:
    texts: list[str] = []

    def ask(url: str) -> None:
        for chunk in ApiClient(url).stream_chat(chat_body(max_tokens=len(IDS))):
            texts.extend(choice["delta"].get("content", "") for choice in chunk["choices"])

    async with router(prompts, Memory()) as server:
        node = await server.rig.join(DECODE)
        asking = asyncio.create_task(asyncio.to_thread(ask, server.url))
        leg = await node.expect(Decode)
        node.emit(leg, IDS[:2], 0)
        async with asyncio.timeout(30):
            while not any(texts):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        inner = server.http._runner.server
        assert inner is not None
        for connection in inner.connections:
            assert connection.transport is not None
            connection.transport.abort()
        finish(node, await node.expect(Decode))
        await asking
    assert "".join(texts) == prompts.tokenizer.decode(IDS)


async def test_events_that_were_under_way_when_the_connection_broke_come_from_the_journal(prompts: PromptMaker) -> None:
    async with router(prompts, Memory()) as server:
        node = await server.rig.join(DECODE)
        async with connected(server) as connection:
            events = await begin(server, node, connection, CHAT, 4)
        asking = asyncio.create_task(resumed(server, CHAT, events[1][0], again=False))
        finish(node, await node.expect(Decode, handoff_id=None))
        assert events_of((await asking).body)[:3] == events[2:]


async def test_a_stream_goes_on_at_another_router_when_the_first_one_died(prompts: PromptMaker, tmp_path: Path) -> None:
    folder = tmp_path / "journals"
    async with router(prompts, Folder(folder)) as server:
        node = await server.rig.join(DECODE)
        async with connected(server) as connection:
            before = await begin(server, node, connection, CHAT, 3)
        await server.rig.settle()
    (file,) = folder.glob("*.stream")
    assert (folder.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)
    file.write_bytes(file.read_bytes() + b"\x05\x00\x00\x00torn")
    async with router(prompts, Folder(folder)) as server:
        node = await server.rig.join(DECODE)
        asking = asyncio.create_task(resumed(server, CHAT, before[-1][0], again=True))
        finish(node, await node.expect(Decode))
        after = events_of((await asking).body)
    assert without_ids(before + after) == without_ids(await whole(prompts, CHAT))
    assert list(folder.glob("*.stream")) == []  # the stream has ended, and so has the router


async def test_choices_that_have_ended_are_told_and_not_generated_again(prompts: PromptMaker) -> None:
    async with router(prompts, Memory()) as server:
        node = await server.rig.join(DECODE)
        body = body_of(COMPLETIONS, n=2)
        async with connected(server) as connection:
            await connection.send(request_bytes("POST", COMPLETIONS, body))
            leg = await node.expect(Decode)
            second = leg.forks[0]
            node.emit(leg, IDS[:2], 0, finish="length")
            node.emit(Decode(second, *[getattr(leg, name) for name in leg.__slots__[1:]]), IDS[:3], 0)
            await connection.until(b"\n\n", 2)
            (_, first_id), *_ = [(data, name) for name, data in events_of(bytes(connection.received))]
        sent = {"last-event-id": first_id}
        asking = asyncio.create_task(fetch(server, "POST", COMPLETIONS, body, sent))
        leg = await node.expect(Decode)
        assert (leg.params.choice, list(leg.output_ids)) == (1, IDS[:3])
        finish(node, leg)
        reply = await asking
        assert (reply.status, events_of(reply.body)[-1][1]) == (200, "[DONE]")
        assert not node.has(Decode)


async def test_who_has_everything_gets_nothing_more(prompts: PromptMaker) -> None:
    events = []
    async with router(prompts, Memory()) as server:
        node = await server.rig.join(DECODE)
        asking = asyncio.create_task(fetch(server, "POST", CHAT, body_of(CHAT)))
        finish(node, await node.expect(Decode))
        events = events_of((await asking).body)
        for number, (name, _) in enumerate(events, 1):
            reply = await resumed(server, CHAT, name, again=False)
            assert (reply.status, events_of(reply.body)) == (200, events[number:])
        assert not node.has(Decode)


async def test_numbers_and_ids_inside_of_events_go_on(prompts: PromptMaker) -> None:
    async with router(prompts, Memory()) as server:
        node = await server.rig.join(DECODE)
        body = json.dumps({"model": MODEL, "input": "Hi", "stream": True, "max_output_tokens": len(IDS)}).encode()
        async with connected(server) as connection:
            await connection.send(request_bytes("POST", RESPONSES, body))
            node.emit(await node.expect(Decode), IDS[:2], 0)
            await connection.until(b"\n\n", 5)
            before = events_of(bytes(connection.received))
        sent = {"last-event-id": before[-1][0]}
        asking = asyncio.create_task(fetch(server, "POST", RESPONSES, body, sent))
        finish(node, await node.expect(Decode))
        after = events_of((await asking).body)
    bodies = [json.loads(data) for _, data in before + after]
    assert [each["sequence_number"] for each in bodies] == list(range(len(bodies)))
    assert len({each["item_id"] for each in bodies if "item_id" in each}) == 1
    assert len({each["response"]["id"] for each in bodies if "response" in each}) == 1
    deltas = [each["delta"] for each in bodies if each["type"] == "response.output_text.delta"]
    assert bodies[-1]["response"]["output"][0]["content"][0]["text"] == "".join(deltas)


async def test_a_second_reader_ends_the_first(prompts: PromptMaker) -> None:
    async with router(prompts, Memory()) as server:
        node = await server.rig.join(DECODE)
        async with connected(server) as connection:
            events = await begin(server, node, connection, CHAT, 2)
            asking = asyncio.create_task(resumed(server, CHAT, events[-1][0], again=False))
            with pytest.raises((ConnectionError, AssertionError)):
                await connection.until(b"[DONE]")
            leg = await node.expect(Decode)
            finish(node, leg)
            assert events_of((await asking).body)[-1][1] == "[DONE]"


async def test_an_answer_that_failed_can_be_resumed_and_goes_on(prompts: PromptMaker) -> None:
    async with router(prompts, Memory()) as server:
        node = await server.rig.join(DECODE)
        async with connected(server) as connection:
            events = await begin(server, node, connection, CHAT, 2)
            server.rig.relay.fail_all(RequestFailed("as the test says"))
            failed = parse_reply(await connection.to_end())
            assert b"id: " not in failed.body.split(b"\n\n")[-2]
        asking = asyncio.create_task(resumed(server, CHAT, events[-1][0], again=False))
        finish(node, await node.expect(Decode))
        assert events_of((await asking).body)[-1][1] == "[DONE]"


@pytest.mark.parametrize(
    "event_id", ["", "7", ".", "x.1", "chatcmpl-000000000000000000000000.1", "../../etc/passwd.1", f"x.{'9' * 400}"]
)
async def test_an_id_that_was_never_given_out_is_not_found(prompts: PromptMaker, event_id: str) -> None:
    async with router(prompts, Memory()) as server:
        await server.rig.join(DECODE)
        reply = await fetch(server, "POST", CHAT, body_of(CHAT), {"last-event-id": event_id or "-"})
        assert (reply.status, reply.error["code"]) == (404, "stream_not_found")


@pytest.mark.parametrize("number", ["", "-1", "+1", " 1", "1_0", "\u00b2", "1.5", "9" * 10])
async def test_a_number_that_no_event_has_is_not_found(prompts: PromptMaker, number: str) -> None:
    async with router(prompts, Memory()) as server:
        node = await server.rig.join(DECODE)
        async with connected(server) as connection:
            events = await begin(server, node, connection, CHAT, 2)
        assert [name.rpartition(".")[2] for name, _ in events] == [str(place) for place in range(1, len(events) + 1)]
        stream_id = events[-1][0].rpartition(".")[0]
        reply = await fetch(server, "POST", CHAT, body_of(CHAT), {"last-event-id": f"{stream_id}.{number}"})
        assert (reply.status, reply.error["code"]) == (404, "stream_not_found")


async def test_another_request_does_not_resume_a_stream(prompts: PromptMaker) -> None:
    async with router(prompts, Memory()) as server:
        node = await server.rig.join(DECODE)
        async with connected(server) as connection:
            events = await begin(server, node, connection, CHAT, 2)
        other = body_of(CHAT, messages=[{"role": "user", "content": "Another"}])
        reply = await fetch(server, "POST", CHAT, other, {"last-event-id": events[-1][0]})
        assert (reply.status, reply.error["code"]) == (400, "invalid_value")


@pytest.fixture
def guard(tmp_path: Path) -> Guard:
    path = tmp_path / "keys.toml"
    path.write_text("".join(f'[{name}]\nsha256 = "{digest_of(name).hex()}"\n' for name in ("alice", "bob")))
    return Guard(path, "", b"s" * 32)


async def test_a_stream_belongs_to_the_key_that_began_it(prompts: PromptMaker, guard: Guard) -> None:
    async with router(prompts, Memory(), guard) as server:
        node = await server.rig.join(DECODE)
        async with connected(server) as connection:
            await connection.send(request_bytes("POST", CHAT, body_of(CHAT), {"authorization": "Bearer alice"}))
            node.emit(await node.expect(Decode), IDS[:1], 0)
            await connection.until(b"\n\n", 2)
            (name, _), *_ = events_of(bytes(connection.received))
        for again in (True, False):
            reply = await resumed(server, CHAT, name, again=again, headers={"authorization": "Bearer bob"})
            assert (reply.status, reply.error["code"]) == (404, "stream_not_found")
            assert (await resumed(server, CHAT, name, again=again)).status == 401
        asking = asyncio.create_task(
            resumed(server, CHAT, name, again=False, headers={"authorization": "Bearer alice"})
        )
        finish(node, await node.expect(Decode))
        assert events_of((await asking).body)[-1][1] == "[DONE]"


async def test_resuming_counts_as_a_request(prompts: PromptMaker, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'[alice]\nsha256 = "{digest_of("alice").hex()}"\nrequests_per_minute = 2\n')
    alice = {"authorization": "Bearer alice"}
    async with router(prompts, Memory(), Guard(path, "", b"s" * 32)) as server:
        statuses = [(await fetch(server, "GET", "/v1/streams/x.1", headers=alice)).status for _ in range(3)]
    assert statuses == [404, 404, 429]


async def test_without_journals_events_have_no_ids(prompts: PromptMaker) -> None:
    async with serving(prompts) as server:
        node = await server.rig.join(DECODE)
        asking = asyncio.create_task(fetch(server, "POST", CHAT, body_of(CHAT), {"last-event-id": "x.1"}))
        finish(node, await node.expect(Decode))
        assert b"id: " not in (await asking).body
        assert (await fetch(server, "GET", "/v1/streams/x.1")).status == 404


TOOL: dict[str, Any] = {"type": "function", "function": {"name": "double", "parameters": {"type": "object"}}}
CALL = '<think>A sum.</think>Well. <tool_call>{"name": "double", "arguments": {"x": 4}}</tool_call>'
_USER = {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": "hi"}]}
_USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
TOLD_AGAIN = {
    "chat": (CHAT, {**_USER, **_USAGE, "tools": [TOOL], "logprobs": True, "top_logprobs": 1}),
    "completions": (COMPLETIONS, {"model": MODEL, "stream": True, "prompt": "hi", **_USAGE, "logprobs": 1}),
    "responses": (
        RESPONSES,
        {"model": MODEL, "stream": True, "input": "hi", "tools": [{"type": "function", **TOOL["function"]}]},
    ),
    "messages": (
        MESSAGES,
        {**_USER, "max_tokens": 99, "tools": [{"name": "double", "input_schema": {"type": "object"}}]},
    ),
}


@pytest.mark.parametrize("interface", TOLD_AGAIN)
@pytest.mark.parametrize("has_file", [False, True])
async def test_a_stream_that_is_told_again_is_the_same_to_the_letter(
    prompts: PromptMaker, tmp_path: Path, interface: str, has_file: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", itertools.count(1_800_000_000.0).__next__)  # a second has passed at each look
    path, members = TOLD_AGAIN[interface]
    maker = replace(prompts, answer_format=AnswerFormat("hermes", "qwen3"))
    place, body = Folder(tmp_path) if has_file else Memory(), json.dumps(members).encode()
    async with router(maker, place) as server:
        node = await server.rig.join(DECODE)
        asking = asyncio.create_task(fetch(server, "POST", path, body))
        ids = prompts.tokenizer.encode(CALL)
        leg = await node.expect(Decode)
        for at, token_id in enumerate(ids):
            node.emit(leg, [token_id], at, "stop" if at == len(ids) - 1 else "", cached=leg.prompt.num_tokens - 1)
        told = _EVENT.findall(re.sub(rb"event: .*\n", b"", (await asking).body))
        assert len(told) > 10
        for number in (0, 1, len(told) // 2, len(told) - 2):
            reply = await fetch(server, "POST", path, body, {"last-event-id": told[number][0].decode()})
            assert _EVENT.findall(re.sub(rb"event: .*\n", b"", reply.body)) == told[number + 1 :]


async def test_figures_of_an_answer_that_broke_off_are_those_of_its_beginning(prompts: PromptMaker) -> None:
    """What was emitted is computed again behind the prompt, which a cache then has: the client paid once."""
    async with router(prompts, Memory()) as server:
        node = await server.rig.join(DECODE)
        body = json.dumps({**_USER, **_USAGE, "max_tokens": len(IDS)}).encode()
        async with connected(server) as connection:
            await connection.send(request_bytes("POST", CHAT, body))
            draft = VerifiedDraft("ngram", 2, 0)
            node.emit(await node.expect(Decode), IDS[:1], 0, cached=2, tiers=[TierTokens("host", 1)], draft=draft)
            await connection.until(b"\n\n", 2)
            last = events_of(bytes(connection.received))[-1][0]
        asking = asyncio.create_task(fetch(server, "POST", CHAT, body, {"last-event-id": last}))
        leg = await node.expect(Decode)
        node.emit(leg, IDS[1:], 1, finish="length", cached=3, draft=VerifiedDraft("ngram", 3, 1))
        usage = json.loads(events_of((await asking).body)[-2][1])["usage"]
    details = usage["prompt_tokens_details"]
    assert (details["cached_tokens"], details["cached_tokens_by_place"]) == (2, {"decode": 1, "host": 1})
    assert usage["completion_tokens_details"] == {"drafts": {"ngram": {"steps": 2, "tokens": 5, "accepted": 1}}}


async def test_what_a_node_says_behind_a_stop_string_is_told_neither_before_nor_again(prompts: PromptMaker) -> None:
    *_, third = [json.loads(data)["choices"][0]["text"] for _, data in (await whole(prompts, COMPLETIONS))[:3]]
    asked = completion_body(stream=True, stop=[third], stream_options={"include_usage": True})
    body = json.dumps(asked).encode()
    async with router(prompts, Memory()) as server:
        node = await server.rig.join(DECODE)
        asking = asyncio.create_task(fetch(server, "POST", COMPLETIONS, body))
        leg = await node.expect(Decode)
        node.emit(leg, IDS[:3], 0, draft=VerifiedDraft("suffix", 4, 2))
        node.emit(leg, IDS[3:], 3, draft=VerifiedDraft("suffix", 4, 2))
        told = events_of((await asking).body)
        again = await fetch(server, "POST", COMPLETIONS, body, {"last-event-id": told[0][0]})
    assert events_of(again.body) == told[1:]
    usage = json.loads(told[-2][1])["usage"]
    assert usage["completion_tokens_details"]["drafts"]["suffix"]["steps"] == 1
