"""/v1/conversations over HTTP: the official client makes, continues and deletes them; nobody else does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.conversations import Conversation, ConversationItem
from pydantic import TypeAdapter

from baton.router.http.openai.prompts import PromptMaker
from baton.router.http.resume.logs import Memory
from baton.router.http.resume.streams import Streams
from baton.router.http.serving.limits import HttpLimits
from baton.router.http.stored.database import Database
from baton.wire.messages.legs import Decode
from baton.wire.messages.membership import DECODE
from tests.router.conversations import conversing, named_events
from tests.router.fake_node import FakeNode, LegMessage
from tests.router.http_client import Reply, fetch
from tests.router.rig import MODEL, Server
from tests.router.storing import RESPONSES, guard_of, post, prompt_of, says, send, storing

PATH = "/v1/conversations"
UNKNOWN = "conv_" + "0" * 32
ITEM_ID = "msg_" + "0" * 32
USER = {"type": "message", "role": "user", "content": "Hi"}
ROUTES = (
    ("GET", ""), ("POST", ""), ("DELETE", ""), ("GET", "/items"), ("POST", "/items"), ("GET", f"/items/{ITEM_ID}"),
    ("DELETE", f"/items/{ITEM_ID}"),
)  # fmt: skip


@pytest.fixture
async def server(prompts: PromptMaker) -> AsyncIterator[Server]:
    async with storing(prompts, limits=HttpLimits(max_body_bytes=2**16)) as running:
        yield running


async def begin(server: Server, headers: dict[str, str] | None = None, **members: Any) -> str:
    reply = await send(server, "POST", PATH, headers, **members)
    assert reply.status == 200, reply.body
    return str(reply.json()["id"])


async def texts(server: Server, name: str) -> list[str]:
    listed = (await fetch(server, "GET", f"{PATH}/{name}/items?order=asc&limit=100")).json()
    return [item["content"][0]["text"] for item in listed["data"]]


def body_of(end: str) -> dict[str, Any]:
    return {"items": [USER]} if end == "/items" else {}


def is_not_found(reply: Reply) -> bool:
    return (reply.status, reply.error["code"], reply.error["param"]) == (404, "conversation_not_found", "conversation")


async def holding(server: Server) -> FakeNode:
    """A decode node that answers when it is told to."""
    await server.rig.pair()
    node = await server.rig.join(DECODE, lambda _, leg: None)
    server.rig.nodes[-2].die()
    await server.rig.loses_all_but(DECODE, 1)
    return node


async def test_the_official_client_has_a_conversation(server: Server, prompts: PromptMaker) -> None:
    node = await says(server, prompts)
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        items: Any = [{"role": "system", "content": "Be brief."}]
        made = await client.conversations.create(metadata={"topic": "rivers"}, items=items)
        assert made.to_dict() == {**made.to_dict(), "object": "conversation", "metadata": {"topic": "rivers"}}
        answer = await client.responses.create(model=MODEL, input="Hi", conversation=made.id)
        assert (answer.conversation and answer.conversation.id, answer.previous_response_id) == (made.id, None)
        async with client.responses.stream(model=MODEL, input="And?", conversation={"id": made.id}) as stream:
            answer = await stream.get_final_response()
        assert await prompt_of(node, prompts) == "[system]Be brief.[user]Hi[assistant]"
        assert await prompt_of(node, prompts) == "[system]Be brief.[user]Hi[assistant]Well.[user]And?[assistant]"
        added = await client.conversations.items.create(made.id, items=[{"role": "user", "content": "Also"}])
        listed = [item async for item in client.conversations.items.list(made.id, order="asc", limit=2)]
        plain: list[Any] = [item.to_dict() for item in listed]
        assert [(item["role"], item["content"][0]["text"]) for item in plain] == [
            ("system", "Be brief."), ("user", "Hi"), ("assistant", "Well."), ("user", "And?"), ("assistant", "Well."),
            ("user", "Also"),
        ]  # fmt: skip
        assert listed[-1] == added.data[0]
        before = [item.id async for item in client.responses.input_items.list(answer.id, order="asc")]
        assert before == [item.id for item in listed[:4]]
        assert await client.conversations.items.retrieve(plain[0]["id"], conversation_id=made.id) == listed[0]
        left = await client.conversations.items.delete(plain[0]["id"], conversation_id=made.id)
        changed = await client.conversations.update(made.id, metadata={"topic": "lakes"})
        assert (left.metadata, changed.metadata) == ({"topic": "rivers"}, {"topic": "lakes"})
        assert await client.conversations.retrieve(made.id) == changed
        assert (await client.conversations.delete(made.id)).deleted
        with pytest.raises(openai.NotFoundError, match="no such conversation"):
            await client.conversations.retrieve(made.id)
        with pytest.raises(openai.NotFoundError, match="no such response"):
            await client.responses.retrieve(answer.id)


async def test_items_have_the_form_that_the_client_knows(server: Server) -> None:
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "a", "output": "8"}
    reasoning = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    name = await begin(server)
    reply = await send(server, "POST", f"{PATH}/{name}/items", items=[USER, reasoning, call, result])
    adapter: TypeAdapter[Any] = TypeAdapter(ConversationItem)
    for item in reply.json()["data"]:
        adapter.validate_python(item)
        assert (await fetch(server, "GET", f"{PATH}/{name}/items/{item['id']}")).json() == item
    Conversation.model_validate((await fetch(server, "GET", f"{PATH}/{name}")).json())


async def test_what_is_not_to_be_stored_is_not_added(server: Server, prompts: PromptMaker) -> None:
    node = await says(server, prompts)
    name = await begin(server, items=[USER])
    told = (await post(server, conversation=name, store=False, input="And?")).json()
    assert await prompt_of(node, prompts) == "[user]Hi[user]And?[assistant]"
    assert (told["conversation"], told["store"], await texts(server, name)) == ({"id": name}, False, ["Hi"])


async def test_an_item_that_was_deleted_is_in_no_prompt_and_not_in_its_response(
    server: Server, prompts: PromptMaker
) -> None:
    node = await says(server, prompts)
    name = await begin(server)
    told = (await post(server, conversation=name)).json()
    await prompt_of(node, prompts)
    await send(server, "DELETE", f"{PATH}/{name}/items/{told['output'][0]['id']}")
    assert (await fetch(server, "GET", f"{RESPONSES}/{told['id']}")).json() == {**told, "output": []}
    await post(server, conversation=name, input="And?")
    assert await prompt_of(node, prompts) == "[user]Hi[user]And?[assistant]"
    await send(server, "DELETE", f"{RESPONSES}/{told['id']}")
    assert await texts(server, name) == ["And?", "Well."]


async def test_one_response_at_a_time_continues_a_conversation(server: Server, prompts: PromptMaker) -> None:
    node = await holding(server)
    name = await begin(server, items=[USER])
    item = (await fetch(server, "GET", f"{PATH}/{name}/items")).json()["data"][0]["id"]
    asking = asyncio.create_task(post(server, conversation=name))
    leg = await node.expect(Decode)
    for method, path, members in (
        ("POST", RESPONSES, {"model": MODEL, "input": "Hi", "conversation": name}),
        ("POST", f"{PATH}/{name}/items", {"items": [USER]}),
        ("DELETE", f"{PATH}/{name}/items/{item}", {}),
    ):
        reply = await send(server, method, path, **members)
        assert (reply.status, reply.error["code"]) == (400, "conversation_locked")
    assert (await fetch(server, "GET", f"{PATH}/{name}/items")).status == 200
    reading = asyncio.create_task(post(server, conversation=name, store=False))
    node.emit(await node.expect(Decode), prompts.tokenizer.encode("Well."), finish="complete")
    assert (await reading).status == 200
    node.emit(leg, prompts.tokenizer.encode("Well."), finish="complete")
    assert (await asking).json()["store"] is True
    assert await texts(server, name) == ["Hi", "Hi", "Well."]
    assert (await send(server, "POST", f"{PATH}/{name}/items", items=[USER])).status == 200


async def test_a_conversation_that_is_deleted_while_it_is_continued_does_not_come_back(
    server: Server, prompts: PromptMaker
) -> None:
    node = await holding(server)
    name = await begin(server)
    asking = asyncio.create_task(post(server, conversation=name))
    leg = await node.expect(Decode)
    assert (await fetch(server, "DELETE", f"{PATH}/{name}")).status == 200
    node.emit(leg, prompts.tokenizer.encode("Well."), finish="complete")
    told = (await asking).json()
    assert (told["store"], told["warnings"]) == (
        False, ["the response is not stored: its conversation has changed meanwhile, or is gone"],
    )  # fmt: skip
    assert (await fetch(server, "GET", f"{RESPONSES}/{told['id']}")).status == 404
    assert is_not_found(await fetch(server, "GET", f"{PATH}/{name}/items"))


async def test_a_client_that_leaves_unlocks_its_conversation_and_adds_nothing(
    server: Server, prompts: PromptMaker
) -> None:
    node = await holding(server)
    name = await begin(server)
    asking = asyncio.create_task(post(server, conversation=name, stream=True))
    await node.expect(Decode)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    async with asyncio.timeout(10.0):
        while (await send(server, "POST", f"{PATH}/{name}/items", items=[USER])).status != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert await texts(server, name) == ["Hi"]


async def test_a_stream_of_a_conversation_is_resumed_until_something_of_it_is_deleted(prompts: PromptMaker) -> None:
    streams = Streams(Memory(), 60.0)
    async with storing(prompts, streams=streams) as server:
        await says(server, prompts)
        name = await begin(server)
        told = [(await post(server, conversation=name, stream=True)).body for _ in range(3)]
        event_ids = [body.split(b"\n")[0].removeprefix(b"id: ").decode() for body in told]
        again = await fetch(server, "GET", f"/v1/streams/{event_ids[0].rpartition('.')[0]}.0")
        assert (again.status, again.body) == (200, told[0])  # though the conversation has gone on
        assert len(await texts(server, name)) == 6
        output = json.loads(told[1].split(b"data: ")[-1])["response"]["output"][0]
        await send(server, "DELETE", f"{PATH}/{name}/items/{output['id']}")
        assert (await fetch(server, "GET", f"/v1/streams/{event_ids[1]}")).status == 404
        await send(server, "DELETE", f"{PATH}/{name}")
        gone = await fetch(server, "GET", f"/v1/streams/{event_ids[2]}")
        assert (gone.status, gone.error["code"]) == (404, "stream_not_found")
    streams.close()


async def test_the_conversation_of_another_key_is_as_one_that_never_was(prompts: PromptMaker, tmp_path: Path) -> None:
    names = ("alice", "bob")
    alice, bob = ({"authorization": f"Bearer {name}"} for name in names)
    guard = guard_of(tmp_path / "keys.toml", *names, settings='group = "all"\n')
    async with storing(prompts, guard=guard) as server:
        await says(server, prompts)
        own = await begin(server, alice, items=[USER])
        item = (await fetch(server, "GET", f"{PATH}/{own}/items", headers=alice)).json()["data"][0]["id"]
        for method, end in (*ROUTES, ("GET", f"/items/{item}"), ("DELETE", f"/items/{item}")):
            theirs = await send(server, method, f"{PATH}/{own}{end}", bob, **body_of(end))
            never = await send(server, method, f"{PATH}/{UNKNOWN}{end}", bob, **body_of(end))
            assert is_not_found(theirs), (method, end)
            assert theirs.body == never.body
        theirs = await post(server, bob, conversation=own)
        assert is_not_found(theirs)
        assert theirs.body == (await post(server, bob, conversation=UNKNOWN)).body
        assert len((await fetch(server, "GET", f"{PATH}/{own}/items", headers=alice)).json()["data"]) == 1


async def test_looking_at_conversations_counts_as_a_request(prompts: PromptMaker, tmp_path: Path) -> None:
    guard = guard_of(tmp_path / "keys.toml", "alice", settings=f"requests_per_minute = {len(ROUTES)}\n")
    async with storing(prompts, guard=guard) as server:
        headers = {"authorization": "Bearer alice"}
        for status in (404, 429):
            for method, end in ROUTES:
                reply = await send(server, method, f"{PATH}/{UNKNOWN}{end}", headers, **body_of(end))
                assert reply.status == status


@pytest.mark.parametrize(
    "name", ["x", "conv_", f"{UNKNOWN}0", UNKNOWN.upper(), "%00", "conv_' OR 1=1".replace(" ", "%20")]
)
async def test_an_id_that_is_none_is_not_found(server: Server, name: str) -> None:
    made = await begin(server, items=[USER])
    for method, end in ROUTES:
        assert is_not_found(await send(server, method, f"{PATH}/{name}{end}", **body_of(end)))
    for method in ("GET", "DELETE"):
        assert is_not_found(await fetch(server, method, f"{PATH}/{made}/items/{name}"))


@pytest.mark.parametrize(("path", "members", "param"), [
    (PATH, {"items": "Hi"}, "items"),
    (PATH, {"items": [{"role": "nobody", "content": "Hi"}]}, "items[0].role"),
    (PATH, {"items": [{"type": "item_reference", "id": ITEM_ID}]}, "items[0].type"),
    (PATH, {"items": [{"role": "user", "content": "x" * 2**21}]}, None),
    (PATH, {"metadata": {"a": 1}}, "metadata"),
    (PATH, {"colour": "blue"}, "colour"),
    ("items", {"items": []}, "items"),
    ("items", {}, "items"),
    ("items", {"items": [USER] * 2049}, "items"),
    (RESPONSES, {"conversation": 7}, "conversation"),
    (RESPONSES, {"conversation": {}}, "conversation"),
    (RESPONSES, {"conversation": {"id": 7}}, "conversation"),
    (RESPONSES, {"conversation": "c" * 129}, "conversation"),
    (RESPONSES, {"conversation": UNKNOWN, "previous_response_id": "resp_"}, "conversation"),
])  # fmt: skip
async def test_what_cannot_be_meant_is_refused_by_name(
    prompts: PromptMaker, path: str, members: dict[str, Any], param: str | None
) -> None:
    async with storing(prompts) as server:
        if path == "items":
            path = f"{PATH}/{await begin(server)}/items"
        reply = await (post(server, **members) if path == RESPONSES else send(server, "POST", path, **members))
        assert (reply.status, reply.error["param"] if param else None) == (400, param)


async def test_a_list_does_not_go_on_behind_what_is_no_item_of_it(server: Server) -> None:
    reply = await fetch(server, "GET", f"{PATH}/{await begin(server, items=[USER])}/items?after={ITEM_ID}")
    assert (reply.status, reply.error["param"]) == (400, "after")


async def test_a_conversation_is_never_larger_than_a_body_where_it_is_continued(
    server: Server, prompts: PromptMaker
) -> None:
    await says(server, prompts)
    large = {**USER, "told to nobody": "x" * 2**15}
    name = await begin(server, items=[large])
    assert (await post(server, conversation=name)).status == 200
    assert (await send(server, "POST", f"{PATH}/{name}/items", items=[large])).status == 200
    refused = await post(server, conversation=name)
    assert (refused.status, refused.error["param"]) == (400, "conversation")
    assert len(await texts(server, name)) == 4


async def test_a_response_of_a_conversation_is_continued_there_alone(server: Server, prompts: PromptMaker) -> None:
    await says(server, prompts)
    told = (await post(server, conversation=await begin(server))).json()
    refused = await post(server, previous_response_id=told["id"])
    assert (refused.status, refused.error["param"]) == (400, "previous_response_id")
    assert "send the id of that as conversation" in refused.error["message"]


async def test_a_conversation_for_which_there_is_no_room_is_refused(prompts: PromptMaker) -> None:
    async with storing(prompts, Database(None, 2**17, 1000.0)) as server:
        refused = await send(server, "POST", PATH, items=[{**USER, "more": "x" * 2**17}])
        assert (refused.status, "no room" in refused.error["message"]) == (400, True)


async def test_a_router_without_a_store_says_so(prompts: PromptMaker) -> None:
    async with conversing(prompts) as server:
        refused = await send(server, "POST", PATH)
        assert (refused.status, refused.error["code"]) == (400, "unsupported_parameter")
        refused = await post(server, conversation=UNKNOWN)
        assert (refused.status, refused.error["param"]) == (400, "conversation")
        assert is_not_found(await fetch(server, "GET", f"{PATH}/{UNKNOWN}"))


async def test_two_routers_on_one_file_continue_the_same_conversation(prompts: PromptMaker, tmp_path: Path) -> None:
    async with (
        storing(prompts, Database(tmp_path, 2**22, 1000.0)) as one,
        storing(prompts, Database(tmp_path, 2**22, 1000.0)) as other,
    ):
        name = await begin(one)
        held, node = await holding(one), await says(other, prompts)
        asking = asyncio.create_task(post(one, conversation=name, stream=True))
        leg: LegMessage = await held.expect(Decode)
        assert (await post(other, conversation=name, input="Quick")).json()["store"] is True
        held.emit(leg, prompts.tokenizer.encode("Late."), finish="complete")
        late = named_events((await asking).body)[-1]["response"]
        assert (late["store"], late["output"][0]["content"][0]["text"]) == (False, "Late.")
        assert await texts(one, name) == ["Quick", "Well."]
        await post(other, conversation=name, input="And?")
        assert await prompt_of(node, prompts) == "[user]Quick[assistant]"
        assert await prompt_of(node, prompts) == "[user]Quick[assistant]Well.[user]And?[assistant]"
        assert (await fetch(one, "DELETE", f"{PATH}/{name}")).status == 200
        assert is_not_found(await post(other, conversation=name))
