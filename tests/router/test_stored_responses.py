"""Stored responses over HTTP: the official client continues, retrieves, lists and deletes them; nobody else does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from baton.router.__main__ import _response_store
from baton.router.http.openai.prompts import PromptMaker
from baton.router.http.openai.stored_responses import StoredResponses
from baton.router.http.resume.logs import Memory
from baton.router.http.resume.streams import Streams
from baton.router.http.serving.limits import HttpLimits
from baton.router.http.stored import responses
from baton.router.http.stored.database import Database
from baton.router.http.stored.store import ResponseStore
from baton.router.settings import RouterSettings
from baton.wire.errors import InvalidSetting, RequestFailed
from baton.wire.messages.legs import Decode
from baton.wire.messages.membership import DECODE
from tests.router.conversations import choosing, conversing, doubling, named_events
from tests.router.fake_node import FakeNode, LegMessage, answering
from tests.router.http_client import Reply, fetch
from tests.router.rig import MODEL, Server, serving
from tests.router.storing import RESPONSES, guard_of, post, prompt_of, says, storing

TOOL = {"type": "function", "name": "double", "parameters": {"type": "object", "properties": {}}}
UNKNOWN = "resp_" + "0" * 32
LIMITS = HttpLimits(max_body_bytes=2**16)


@pytest.fixture
async def server(prompts: PromptMaker) -> AsyncIterator[Server]:
    async with storing(prompts, limits=LIMITS) as running:
        yield running


@pytest.fixture
async def client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def is_not_found(reply: Reply) -> bool:
    return (reply.status, reply.error["code"], reply.error["param"]) == (
        400, "previous_response_not_found", "previous_response_id",
    )  # fmt: skip


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_the_official_client_runs_a_loop_with_a_tool_and_sends_only_what_is_new(
    server: Server, client: openai.AsyncOpenAI, prompts: PromptMaker, is_streamed: bool
) -> None:
    await server.rig.pair(choosing(prompts, doubling))
    settings: Any = {"model": MODEL, "tools": [TOOL]}
    asked: Any = "What is twice 4?"
    answer: Any = None
    while answer is None or answer.output[-1].type == "function_call":
        if answer is not None:
            asked = [{"type": "function_call_output", "call_id": answer.output[-1].call_id, "output": "8"}]
            settings["previous_response_id"] = answer.id
        if is_streamed:
            async with client.responses.stream(input=asked, **settings) as stream:
                answer = await stream.get_final_response()
        else:
            answer = await client.responses.create(input=asked, **settings)
        assert answer.to_dict()["store"] is True
    assert answer.output_text == "It is 8."
    assert answer.previous_response_id == settings["previous_response_id"]
    stored = await client.responses.retrieve(answer.id)
    assert stored.to_dict() == (answer.to_dict() if not is_streamed else stored.to_dict())
    assert stored.output_text == "It is 8."
    kinds = [item.type async for item in client.responses.input_items.list(answer.id, order="asc", limit=2)]
    assert kinds == ["message", "reasoning", "message", "function_call", "function_call_output"]
    await client.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError, match="no such response"):
        await client.responses.retrieve(answer.id)


async def test_the_prompt_is_that_of_the_whole_conversation(server: Server, prompts: PromptMaker) -> None:
    node = await says(server, prompts, "<think>\nHm.\n</think>\n\nWell.")
    first = (await post(server, instructions="Be brief.")).json()
    await prompt_of(node, prompts)
    second = (await post(server, previous_response_id=first["id"], input="And?")).json()
    earlier = [{"role": "user", "content": "Hi"}, *first["output"], {"role": "user", "content": "And?"}]
    continued = await prompt_of(node, prompts)
    await post(server, input=earlier)
    assert continued == await prompt_of(node, prompts)
    assert continued == "[user]Hi[assistant]<Hm.>Well.[user]And?[assistant]"  # without the instructions
    await post(server, previous_response_id=second["id"], instructions="Be long.", input="So?")
    assert await prompt_of(node, prompts) == (
        "[system]Be long.[user]Hi[assistant]<Hm.>Well.[user]And?[assistant]<Hm.>Well.[user]So?[assistant]"
    )


async def test_the_next_prompt_begins_with_the_tokens_of_the_last_prompt_and_answer(prompts: PromptMaker) -> None:
    store = ResponseStore(Database(None, 2**22, 1000.0))
    async with serving(prompts, stored=StoredResponses(store)) as server:  # with the template of a checkpoint
        answer = [*prompts.tokenizer.encode("It goes to the sea."), max(prompts.tokenizer.eos_token_ids)]
        _, node = await server.rig.pair(answering(answer))
        previous: str | None = None
        before: list[int] = []
        for asked in ("Where does the river go?", "And then?", "So?"):
            previous = (await post(server, input=asked, previous_response_id=previous)).json()["id"]
            prompt_ids = list((await node.expect(Decode)).prompt.token_ids)
            assert prompt_ids[: len(before)] == before
            before = [*prompt_ids, *answer]
    await store.close()


def test_settings_choose_the_store(tmp_path: Path) -> None:
    assert _response_store(RouterSettings(responses_store_bytes=0)) is None
    with pytest.raises(InvalidSetting, match="--responses-store-bytes 0"):
        _response_store(RouterSettings(responses_store=str(tmp_path), responses_store_bytes=0))
    with pytest.raises(InvalidSetting, match="--responses-store /proc/no/such"):
        _response_store(RouterSettings(responses_store="/proc/no/such"))


async def test_a_folder_outlives_the_router(prompts: PromptMaker, tmp_path: Path) -> None:
    names: list[str] = []
    for _ in range(2):
        store = _response_store(RouterSettings(responses_store=str(tmp_path / "new")))
        assert store is not None
        store.start()
        async with conversing(prompts, stored=StoredResponses(store)) as server:
            await says(server, prompts)
            names.append((await post(server, previous_response_id=names[-1] if names else None)).json()["id"])
            assert (await fetch(server, "GET", f"{RESPONSES}/{names[0]}")).status == 200
        await store.close()


async def test_a_stream_is_stored_when_its_last_event_comes(server: Server, prompts: PromptMaker) -> None:
    await says(server, prompts)
    events = named_events((await post(server, stream=True)).body)
    told = events[-1]["response"]
    assert {event["response"]["store"] for event in events if "response" in event} == {True}
    reply = await fetch(server, "GET", f"{RESPONSES}/{told['id']}")
    assert (reply.status, reply.json()) == (200, told)
    Response.model_validate(reply.json())


async def test_an_answer_that_was_cut_can_be_continued_and_one_that_failed_is_not_there(
    server: Server, prompts: PromptMaker
) -> None:
    node = await server.rig.join(DECODE, answering(prompts.tokenizer.encode("We"), "length"))
    cut = (await post(server)).json()
    assert (cut["status"], (await post(server, previous_response_id=cut["id"])).status) == ("incomplete", 200)

    def failing(each: FakeNode, leg: LegMessage) -> None:
        if leg.attempt == 1:
            each.emit(leg, [70])
        each.fail(leg, RequestFailed.code, "the pool burned")

    node.script = failing
    events = named_events((await post(server, stream=True)).body)
    failed = events[-1]["response"]
    assert (await fetch(server, "GET", f"{RESPONSES}/{failed['id']}")).status == 404


async def test_what_is_not_to_be_stored_is_not(server: Server, prompts: PromptMaker) -> None:
    await says(server, prompts)
    first = (await post(server)).json()
    unstored = (await post(server, previous_response_id=first["id"], store=False)).json()
    assert (unstored["store"], unstored["previous_response_id"]) == (False, first["id"])
    assert (await fetch(server, "GET", f"{RESPONSES}/{unstored['id']}")).status == 404
    assert is_not_found(await post(server, previous_response_id=unstored["id"]))


async def test_a_conversation_of_which_a_part_was_deleted_is_not_continued(
    server: Server, prompts: PromptMaker
) -> None:
    await says(server, prompts)
    ids: list[str] = []
    for _ in range(3):
        ids.append((await post(server, previous_response_id=ids[-1] if ids else None)).json()["id"])
    reply = await fetch(server, "DELETE", f"{RESPONSES}/{ids[1]}")
    assert reply.json() == {"id": ids[1], "object": "response", "deleted": True}
    assert (await post(server, previous_response_id=ids[0])).status == 200
    for gone in ids[1:]:
        assert is_not_found(await post(server, previous_response_id=gone))
    assert (await fetch(server, "GET", f"{RESPONSES}/{ids[2]}")).status == 200
    assert len((await fetch(server, "GET", f"{RESPONSES}/{ids[2]}/input_items")).json()["data"]) == 1
    assert (await fetch(server, "DELETE", f"{RESPONSES}/{ids[1]}")).status == 404


async def test_the_response_of_another_key_is_as_one_that_never_was(prompts: PromptMaker, tmp_path: Path) -> None:
    names = ("alice", "bob")
    guard = guard_of(tmp_path / "keys.toml", *names, settings='group = "all"\n')
    alice, bob = ({"authorization": f"Bearer {name}"} for name in names)
    async with storing(prompts, guard=guard) as server:
        await says(server, prompts)
        own = (await post(server, alice)).json()["id"]
        for method, end in (("GET", ""), ("GET", "/input_items"), ("DELETE", "")):
            theirs = await fetch(server, method, f"{RESPONSES}/{own}{end}", headers=bob)
            never = await fetch(server, method, f"{RESPONSES}/{UNKNOWN}{end}", headers=bob)
            assert (theirs.status, theirs.body) == (never.status, never.body)
            assert (theirs.status, theirs.error["code"]) == (404, "response_not_found")
        theirs = await post(server, bob, previous_response_id=own)
        assert is_not_found(theirs)
        assert theirs.body == (await post(server, bob, previous_response_id=UNKNOWN)).body
        assert (await fetch(server, "GET", f"{RESPONSES}/{own}", headers=alice)).status == 200
        assert (await post(server, alice, previous_response_id=own)).status == 200


async def test_looking_at_stored_responses_counts_as_a_request(prompts: PromptMaker, tmp_path: Path) -> None:
    guard = guard_of(tmp_path / "keys.toml", "alice", settings="requests_per_minute = 3\n")
    headers = {"authorization": "Bearer alice"}
    async with storing(prompts, guard=guard) as server:
        tries = [("GET", ""), ("GET", "/input_items"), ("DELETE", ""), ("GET", ""), ("DELETE", "")]
        replies = [await fetch(server, method, f"{RESPONSES}/{UNKNOWN}{end}", headers=headers) for method, end in tries]
        assert [reply.status for reply in replies] == [404, 404, 404, 429, 429]


@pytest.mark.parametrize("name", [
    "x", "..%2f..%2fetc%2fpasswd", "%2e%2e", "resp_", f"{UNKNOWN}0", UNKNOWN.upper(), "resp_%F0%9F%98%80", "%ff%fe",
    "resp_' OR 1=1 --".replace(" ", "%20"), "%00", "r" * 7000, f"{UNKNOWN}%0a", UNKNOWN.replace("0", "%D9%A0"),
])  # fmt: skip
async def test_an_id_that_is_none_is_not_found(server: Server, name: str) -> None:
    for method, end in (("GET", ""), ("GET", "/input_items"), ("DELETE", "")):
        assert (await fetch(server, method, f"{RESPONSES}/{name}{end}")).status == 404


@pytest.mark.parametrize("value", ["", "../x", "\u0660", "resp_\x00", "r" * 128])
async def test_a_previous_id_that_is_none_is_not_found(server: Server, value: str) -> None:
    assert is_not_found(await post(server, previous_response_id=value))


@pytest.mark.parametrize("value", ["r" * 129, "r" * 60_000, 7, ["resp_1"], {}, True])
async def test_a_previous_id_that_is_too_long_or_no_text_is_refused(server: Server, value: Any) -> None:
    reply = await post(server, previous_response_id=value)
    assert (reply.status, reply.error["param"]) == (400, "previous_response_id")


async def test_input_is_listed_in_pages(server: Server, prompts: PromptMaker) -> None:
    await says(server, prompts)
    asked = [{"role": "user", "content": f"{number}"} for number in range(30)]
    name = (await post(server, input=asked)).json()["id"]

    async def page(query: str) -> Any:
        reply = await fetch(server, "GET", f"{RESPONSES}/{name}/input_items{query}")
        return reply.json() if reply.status == 200 else reply.error["param"]

    def texts(found: Any) -> list[int]:
        return [int(item["content"][0]["text"]) for item in found["data"]]

    first = await page("")
    assert (texts(first), first["has_more"]) == (list(range(29, 9, -1)), True)
    assert (first["first_id"], first["last_id"]) == (first["data"][0]["id"], first["data"][-1]["id"])
    rest = await page(f"?after={first['last_id']}&limit=100&include[]=web_search_call.results")
    assert (texts(rest), rest["has_more"]) == (list(range(9, -1, -1)), False)
    assert texts(await page(f"?order=asc&limit=2&after={rest['last_id']}")) == [1, 2]
    assert await page(f"?after={rest['last_id']}") == {
        "object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False,
    }  # fmt: skip
    refused = {"limit": ["0", "101", "x", "-1", "1.0", "9" * 5000], "order": ["up"], "after": ["msg_x", "x" * 200]}
    refused |= {"include": ["everything", "message.output_text.logprobs"]}
    for param, values in refused.items():
        for value in values:
            assert await page(f"?{param}={value}") == param


async def test_a_stored_response_has_no_log_probabilities_and_no_stream(server: Server, prompts: PromptMaker) -> None:
    await says(server, prompts)
    told = (await post(server, top_logprobs=1)).json()
    assert told["output"][0]["content"][0]["logprobs"]
    stored = (await fetch(server, "GET", f"{RESPONSES}/{told['id']}?stream=false")).json()
    assert stored["output"][0]["content"][0]["logprobs"] == []
    for query, param in (("stream=true", "stream"), ("include[]=message.output_text.logprobs", "include")):
        reply = await fetch(server, "GET", f"{RESPONSES}/{told['id']}?{query}")
        assert (reply.status, reply.error["param"]) == (400, param)


async def test_a_conversation_is_never_larger_than_a_body(server: Server, prompts: PromptMaker) -> None:
    await says(server, prompts)
    previous: str | None = None
    item = {"role": "user", "content": "x", "told to nobody": "x" * 2**15}
    for _ in range(2):
        reply = await post(server, previous_response_id=previous, input=[item])
        assert reply.status == 200
        previous = reply.json()["id"]
    refused = await post(server, previous_response_id=previous)
    assert (refused.status, refused.error["param"]) == (400, "previous_response_id")
    assert len((await fetch(server, "GET", f"{RESPONSES}/{previous}/input_items")).json()["data"]) == 3


async def test_a_chain_that_is_too_long_is_neither_continued_nor_listed(
    server: Server, prompts: PromptMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await says(server, prompts)
    first = (await post(server)).json()["id"]
    second = (await post(server, previous_response_id=first)).json()["id"]
    monkeypatch.setattr(responses, "MAX_TURNS", 1)
    for refused in (
        await post(server, previous_response_id=second),
        await fetch(server, "GET", f"{RESPONSES}/{second}/input_items"),
    ):
        assert (refused.status, responses.TOO_LONG in refused.error["message"]) == (400, True)


async def test_a_store_that_fails_costs_no_answer(prompts: PromptMaker, caplog: pytest.LogCaptureFixture) -> None:
    database = Database(None, 2**22, 1000.0)
    async with storing(prompts, database) as server:
        await says(server, prompts)
        first = (await post(server)).json()["id"]
        database.link.execute("PRAGMA query_only = ON")
        whole = (await post(server)).json()
        streamed = named_events((await post(server, stream=True)).body)[-1]["response"]
        for told in (whole, streamed):
            assert (told["status"], told["store"]) == ("completed", False)
            assert told["warnings"] == ["the response is not stored: the store of responses cannot be reached"]
            assert (await fetch(server, "GET", f"{RESPONSES}/{told['id']}")).status == 404
        assert (await post(server, previous_response_id=first, store=False)).status == 200
        database.link.execute("PRAGMA query_only = OFF")
        database.link.execute("DROP TABLE turn")
        reply = await fetch(server, "GET", f"{RESPONSES}/{first}")
        assert (reply.status, reply.error["code"], "retry-after" in reply.headers) == (503, "overloaded", True)


async def test_a_response_that_is_deleted_while_it_is_continued_does_not_come_back(
    server: Server, prompts: PromptMaker
) -> None:
    await says(server, prompts)
    first = (await post(server)).json()["id"]
    held: list[LegMessage] = []
    node = await server.rig.join(DECODE, lambda _, leg: held.append(leg))
    for other in server.rig.nodes[:-1]:
        other.die()
    await server.rig.loses_all_but(DECODE, 1)
    asking = asyncio.create_task(post(server, previous_response_id=first))
    leg = await node.expect(Decode)  # the conversation was read
    assert (await fetch(server, "DELETE", f"{RESPONSES}/{first}")).status == 200
    node.emit(leg, prompts.tokenizer.encode("Well."), finish="complete")
    told = (await asking).json()
    assert told["warnings"] == ["the response is not stored: the response that it follows is gone"]
    assert (await fetch(server, "GET", f"{RESPONSES}/{told['id']}")).status == 404


async def test_a_response_that_was_deleted_cannot_be_resumed(prompts: PromptMaker) -> None:
    streams = Streams(Memory(), 60.0)
    async with storing(prompts, streams=streams) as server:
        await says(server, prompts)
        body = (await post(server, stream=True)).body
        event_id = body.split(b"\n")[0].removeprefix(b"id: ").decode()
        name = json.loads(body.split(b"data: ")[1].split(b"\n")[0])["response"]["id"]
        assert (await fetch(server, "GET", f"/v1/streams/{event_id}")).status == 200
        assert (await fetch(server, "DELETE", f"{RESPONSES}/{name}")).status == 200
        assert (await fetch(server, "GET", f"/v1/streams/{event_id}")).status == 404
        assert (await fetch(server, "GET", f"{RESPONSES}/{name}")).status == 404
    streams.close()


@pytest.mark.parametrize("is_strict", [False, True])
async def test_a_router_without_a_store_says_so(prompts: PromptMaker, is_strict: bool) -> None:
    async with conversing(prompts) as server:
        server.endpoints.is_strict = is_strict
        await says(server, prompts)
        reply = await post(server, previous_response_id=UNKNOWN)
        assert (reply.status, reply.error["param"], reply.error["code"]) == (
            400, "previous_response_id", "unsupported_parameter",
        )  # fmt: skip
        assert "stores no responses" in reply.error["message"]
        plain = (await post(server)).json()
        assert (plain["store"], "warnings" in plain) == (False, False)
        asked = await post(server, store=True)
        if is_strict:
            assert (asked.status, asked.error["param"]) == (400, "store")
        else:
            assert asked.json()["warnings"] == ["store is ignored: this router stores no responses"]
        assert (await fetch(server, "GET", f"{RESPONSES}/{plain['id']}")).status == 404


async def test_two_routers_on_one_file_work_together(prompts: PromptMaker, tmp_path: Path) -> None:
    async with (
        storing(prompts, Database(tmp_path, 2**22, 1000.0)) as one,
        storing(prompts, Database(tmp_path, 2**22, 1000.0)) as other,
    ):
        await says(one, prompts)
        node = await says(other, prompts)
        first = (await post(one)).json()["id"]
        second = (await post(other, previous_response_id=first)).json()["id"]
        assert await prompt_of(node, prompts) == "[user]Hi[assistant]Well.[user]Hi[assistant]"
        assert (await fetch(one, "DELETE", f"{RESPONSES}/{second}")).status == 200
        assert (await fetch(other, "GET", f"{RESPONSES}/{second}")).status == 404
