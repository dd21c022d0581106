"""/v1/messages: Anthropic's form of requests, answers, streams and errors, with tools and thinking."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from baton.router.http.anthropic.request import MessagesRequest
from baton.router.http.openai.ignored import IgnoredFields
from baton.router.http.openai.prompts import PromptMaker
from baton.wire.errors import RequestFailed
from baton.wire.grammar import Grammar
from baton.wire.messages.legs import Decode, Prefill
from baton.wire.messages.membership import DECODE, PREFILL
from tests.router.conversations import CALL, PARAMETERS, THOUGHT, choosing, conversing, doubling, named_events
from tests.router.fake_node import FakeNode, LegMessage, answering
from tests.router.http_client import Reply, fetch
from tests.router.rig import MODEL, Server

PATH = "/v1/messages"
TOOL = {"name": "double", "description": "2x", "input_schema": PARAMETERS}
USER = {"role": "user", "content": "What is twice 4?"}
OFF = {"type": "disabled"}
BASE: Mapping[str, Any] = {"model": MODEL, "max_tokens": 100, "messages": [USER]}


@pytest.fixture
async def server(prompts: PromptMaker) -> AsyncIterator[Server]:
    async with conversing(prompts) as running:
        yield running


async def _post(server: Server, path: str = PATH, **members: Any) -> Reply:
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "some-beta-2025-01-01"}
    return await fetch(server, "POST", path, json.dumps({**BASE, **members}).encode(), headers)


async def _answers(server: Server, prompts: PromptMaker, text: str, finish: str = "complete") -> Any:
    return await server.rig.pair(answering(prompts.tokenizer.encode(text), finish))


async def _prompt(server: Server, prompts: PromptMaker, **members: Any) -> str:
    chat = MessagesRequest.model_validate({**BASE, **members}).as_chat()
    ids, _ = await server.endpoints.served[MODEL].prompts.chat_prompt(chat)
    return prompts.tokenizer.decode(ids, skip_special_tokens=False)


async def test_an_answer(server: Server, prompts: PromptMaker) -> None:
    await _answers(server, prompts, f"{THOUGHT}Let me see.{CALL}")
    reply = await _post(server, tools=[TOOL])
    message = reply.json()
    thinking, text, use = message["content"]
    assert (thinking["type"], thinking["thinking"], bool(thinking["signature"])) == ("thinking", "A sum.", True)
    assert text == {"type": "text", "text": "Let me see."}
    assert (use["type"], use["name"], use["input"]) == ("tool_use", "double", {"x": 4})
    assert use["id"]
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", MODEL)
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    usage = message["usage"]
    assert usage["input_tokens"] > 0
    assert 0 < usage["output_tokens_details"]["thinking_tokens"] < usage["output_tokens"]


async def test_a_stream_tells_the_same(server: Server, prompts: PromptMaker) -> None:
    await _answers(server, prompts, f"{THOUGHT}Let me see.{CALL}{CALL}")
    whole = (await _post(server, tools=[TOOL])).json()
    reply = await _post(server, tools=[TOOL], stream=True)
    events = named_events(reply.body)
    kinds = [event["type"] for event in events]
    assert (kinds[:2], kinds[-2:]) == (["message_start", "ping"], ["message_delta", "message_stop"])
    blocks: list[dict[str, Any]] = []
    texts: list[str] = []
    for event in events[2:-2]:
        assert event["index"] == len(blocks) - (event["type"] != "content_block_start")
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
            texts.append("")
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            texts[-1] += delta["".join(set(delta) - {"type"})] if delta["type"] != "signature_delta" else ""
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert texts == ["A sum.", "Let me see.", '{"x": 4}', '{"x": 4}']
    edges = [event["type"] for event in events[2:-2] if event["type"] != "content_block_delta"]
    assert edges == ["content_block_start", "content_block_stop"] * len(blocks)
    start, delta = events[0]["message"], events[-2]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    assert start["usage"]["input_tokens"] == whole["usage"]["input_tokens"] > 0
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert delta["usage"] == whole["usage"]


async def test_a_loop_with_a_tool(server: Server, prompts: PromptMaker) -> None:
    await server.rig.pair(choosing(prompts, doubling))
    first = (await _post(server, tools=[TOOL])).json()
    result = {"type": "tool_result", "tool_use_id": first["content"][-1]["id"], "content": "8"}
    messages = [USER, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
    last = (await _post(server, tools=[TOOL], messages=messages)).json()
    assert (last["content"][-1]["text"], last["stop_reason"]) == ("It is 8.", "end_turn")


@pytest.mark.parametrize(("finish", "members", "stop"), [
    ("length", {}, ("max_tokens", None)),
    ("complete", {"stop_sequences": ["see"]}, ("stop_sequence", "see")),
    ("complete", {}, ("end_turn", None)),
])  # fmt: skip
async def test_why_an_answer_ended(
    server: Server, prompts: PromptMaker, finish: str, members: dict[str, Any], stop: tuple[str, str | None]
) -> None:
    await _answers(server, prompts, "Let me see. Eight.", finish)
    message = (await _post(server, **members)).json()
    assert (message["stop_reason"], message["stop_sequence"]) == stop
    streamed = named_events((await _post(server, stream=True, **members)).body)[-2]["delta"]
    assert (streamed["stop_reason"], streamed["stop_sequence"]) == stop


async def test_arguments_that_were_cut_are_kept(server: Server, prompts: PromptMaker) -> None:
    await _answers(server, prompts, '{"x": ', "length")
    message = (await _post(server, tools=[TOOL], tool_choice={"type": "tool", "name": "double"})).json()
    assert message["content"][0]["input"] == {"INVALID_JSON": '{"x": '}
    assert message["stop_reason"] == "max_tokens"


async def test_the_template_gets_the_conversation(server: Server, prompts: PromptMaker) -> None:
    messages = [
        USER,
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "A sum.", "signature": "x"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "Well."},
            {"type": "tool_use", "id": "a", "name": "double", "input": {"x": 4}},
            {"type": "tool_use", "id": "b", "name": "double", "input": {"x": 4}, "cache_control": None},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "8"}], "is_error": False},
            {"type": "tool_result", "tool_use_id": "b"},
            {"type": "text", "text": "And"},
            {"type": "text", "text": "then?"},
        ]},
    ]  # fmt: skip
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2;"},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be kind."},
    ]
    told = 'double{"x": 4}'
    asked = f"[user]{USER['content']}"
    assert await _prompt(server, prompts, messages=messages, system=system) == (
        f"[system]Be brief.\nBe kind.{asked}[assistant]<A sum.>Well.{told}{told}[tool]8a[tool]b"
        "[user]And\nthen?[assistant]"
    )
    assert await _prompt(server, prompts, system="Be brief.") == f"[system]Be brief.{asked}[assistant]"
    assert await _prompt(server, prompts, tools=[TOOL]) == f"double{json.dumps(PARAMETERS)};{asked}[assistant]"
    assert await _prompt(server, prompts, tools=[TOOL], tool_choice={"type": "none"}) == f"{asked}[assistant]"
    assert (await _prompt(server, prompts, thinking={"type": "enabled", "budget_tokens": 2000})).endswith("<think>")
    assert (await _prompt(server, prompts, output_config={"effort": "low"})).endswith("<think>")
    begun = [USER, {"role": "assistant", "content": "It is"}]
    assert await _prompt(server, prompts, messages=begun) == f"{asked}[assistant]It is"


async def test_thinking_that_is_not_wanted_is_not_told(server: Server, prompts: PromptMaker) -> None:
    await _answers(server, prompts, f"{THOUGHT}Eight.")
    hidden: list[dict[str, str]] = [{"type": "disabled"}, {"type": "between_tools", "display": "omitted"}]
    for thinking in hidden:
        body = (await _post(server, thinking=thinking)).json()
        assert [block["type"] for block in body["content"]] == ["text"], thinking
        assert body["usage"]["output_tokens_details"]["thinking_tokens"] > 0


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_all_hidden_thinking_says_so(
    server: Server, prompts: PromptMaker, stream: bool
) -> None:
    asked: dict[str, Any] = {"thinking": {"type": "enabled", "display": "omitted"}, "stream": stream}
    await _answers(server, prompts, "One and two and", "length")
    told = (await _post(server, **asked)).body.decode()
    assert "the answer is empty because all of its tokens are reasoning" in told
    assert "One and" not in told
    await _answers(server, prompts, "One.</think>Two.")
    assert "warnings" not in (await _post(server, **asked)).body.decode()


async def test_a_budget_bounds_thinking(server: Server, prompts: PromptMaker) -> None:
    prefill, _ = await _answers(server, prompts, "Hm.</think>Well.")
    await _post(server, thinking={"type": "enabled", "budget_tokens": 5})
    grammar = (await prefill.expect(Prefill)).params.grammar
    assert grammar is not None
    assert grammar.text.startswith("start: thought SPACE? <[*]>*\n")


@pytest.mark.parametrize(("choice", "text", "items"), [
    ({"type": "any"}, '[{"name": "double", "parameters": {"x": 4}}]', {"minItems": 1}),
    ({"type": "any", "disable_parallel_tool_use": True}, '[{"name": "double", "parameters": {"x": 4}}]',
     {"minItems": 1, "maxItems": 1}),
    ({"type": "tool", "name": "double"}, '{"x": 4}', {}),
])  # fmt: skip
async def test_a_choice_of_tools_is_enforced(
    server: Server, prompts: PromptMaker, choice: dict[str, Any], text: str, items: dict[str, int]
) -> None:
    prefill, _ = await _answers(server, prompts, text)
    (use,) = (await _post(server, tools=[TOOL], tool_choice=choice, thinking=OFF)).json()["content"]
    assert (use["type"], use["input"]) == ("tool_use", {"x": 4})
    grammar = (await prefill.expect(Prefill)).params.grammar
    assert grammar is not None
    schema = json.loads(grammar.text)
    assert {name: schema[name] for name in ("minItems", "maxItems") if name in schema} == items


async def test_a_format_of_the_output(server: Server, prompts: PromptMaker) -> None:
    prefill, _ = await _answers(server, prompts, '{"x": 4}')
    asked = {"type": "json_schema", "schema": PARAMETERS}
    for members in ({"output_config": {"format": asked}}, {"output_format": asked}):
        assert (await _post(server, thinking=OFF, **members)).json()["content"] == [
            {"type": "text", "text": '{"x": 4}'}
        ]
        assert (await prefill.expect(Prefill)).params.grammar == Grammar.json_schema(PARAMETERS)


async def test_sampling_parameters_reach_the_nodes(server: Server, prompts: PromptMaker) -> None:
    _, decode = await _answers(server, prompts, "Hi.")
    await _post(server, temperature=0.5, top_p=0.9, top_k=40, max_tokens=7)
    params = (await decode.expect(Decode)).params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.5, 0.9, 40, 7)


async def test_tokens_are_counted_without_an_answer(server: Server, prompts: PromptMaker) -> None:
    members = {"system": "Be brief.", "tools": [TOOL]}
    body = {"model": MODEL, "messages": [USER], **members}
    reply = await fetch(server, "POST", f"{PATH}/count_tokens?beta=true", json.dumps(body).encode())
    expected = prompts.tokenizer.encode(await _prompt(server, prompts, **members), add_special_tokens=False)
    assert (reply.status, reply.json()) == (200, {"input_tokens": len(expected)})


async def test_what_coding_agents_send_is_served(server: Server, prompts: PromptMaker) -> None:
    for role in (PREFILL, DECODE):
        script = answering(prompts.tokenizer.encode("Hello."), "complete")
        await server.rig.join(role, script, max_request_tokens=2**16, num_blocks=2**14)
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    tools = [{**TOOL, "name": f"tool_{number}"} for number in range(200)]
    reply = await _post(
        server, f"{PATH}?beta=true",
        system=[{"type": "text", "text": "word " * 3000, **cached}],
        messages=[{"role": "user", "content": [{"type": "text", "text": "hi", **cached}]}],
        tools=[*tools, {**TOOL, **cached, "type": "custom", "eager_input_streaming": True, "strict": False}],
        metadata={"user_id": "user_1"}, temperature=1, max_tokens=32000, service_tier="auto",
        thinking={"type": "enabled", "budget_tokens": 31999}, tool_choice={"type": "auto"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, new_field={"a": 1},
    )  # fmt: skip
    assert reply.status == 200, reply.body
    assert reply.json()["warnings"] == [
        "metadata is ignored: it is a tag, and Baton keeps no tags",
        "context_management is ignored: nothing is cut from a conversation",
        "new_field is ignored: this endpoint knows no such field",
        "messages[].content[].cache_control is ignored: prefixes are cached without being marked",
        "system[].cache_control is ignored: prefixes are cached without being marked",
        "tools[].cache_control is ignored: prefixes are cached without being marked",
    ]


async def test_a_stream_that_fails_ends_with_an_error_event(server: Server) -> None:
    def script(node: FakeNode, leg: LegMessage) -> None:
        if leg.attempt == 1:
            node.emit(leg, [70])
        node.fail(leg, RequestFailed.code, "the pool burned")

    await server.rig.pair(script)
    reply = await _post(server, stream=True)
    last = named_events(reply.body)[-1]
    assert (reply.is_whole, last["type"], last["error"]["type"]) == (False, "error", "api_error")
    await server.rig.settle()


def _said(*blocks: object, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}]}


IMAGE: Mapping[str, Any] = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": "eA=="},
}
USE: Mapping[str, Any] = {"type": "tool_use", "id": "a", "name": "f", "input": {}}


@pytest.mark.parametrize(("members", "named"), [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": ["x"]}, "messages[0]"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    (_said("x"), "messages[0].content[0]"),
    (_said({"type": "image", "source": {}}), "messages[0].content[0].source.type"),
    (_said({"type": "image", "source": {"type": "url", "url": "https://x"}}), "messages[0].content[0].source.type"),
    (_said({"type": "image", "source": {"type": "base64", "media_type": "image/tiff", "data": "eA=="}}),
     "messages[0].content[0].source"),
    (_said({"type": "image", "source": {**IMAGE["source"], "data": ""}}), "messages[0].content[0].source"),
    (_said(IMAGE), "messages"),
    (_said(IMAGE, role="assistant"), "messages[0].content[0].type"),
    (_said({"type": "document", "source": {}}), "messages[0].content[0].type"),
    (_said({"type": ["text"]}), "messages[0].content[0].type"),
    (_said({"type": "text"}), "messages[0].content[0].text"),
    (_said(USE), "messages[0].content[0].type"),
    (_said({**USE, "input": "{}"}, role="assistant"), "messages[0].content[0].input"),
    (_said({"type": "tool_result"}), "messages[0].content[0].tool_use_id"),
    (_said({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}),
     "messages[0].content[0].content[0].type"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{**TOOL, "input_schema": {"type": "string"}}]}, "tools[0].input_schema"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "required"}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "any"}, "output_format": {"type": "json_schema", "schema": {}}},
     "tool_choice"),
    ({"thinking": {"type": "maybe"}}, "thinking.type"),
    ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "foo"}}}},
     "output_config.format.schema.type"),
    ({"temperature": 3.0}, "temperature"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"thread": {"type": "create"}}, "thread"),
])  # fmt: skip
async def test_what_is_wrong_is_named_in_anthropics_form(server: Server, members: dict[str, Any], named: str) -> None:
    reply = await _post(server, **members)
    body = reply.json()
    assert (reply.status, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")
    assert body["error"]["message"].startswith((f"{named} ", f"{named}:")), body
    assert body["request_id"] == reply.headers["x-request-id"] == reply.headers["request-id"]


async def test_a_client_that_wants_its_conversation_stored_is_told_to_send_all_of_it(server: Server) -> None:
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        error = (await _post(server, thread=thread)).json()["error"]
        assert error["details"]["error_code"] == "thread_unsupported_request"
    assert "details" not in (await _post(server, temperature=3.0)).json()["error"]


async def test_other_errors_have_their_types(server: Server) -> None:
    for status, kind, reply in (
        (404, "not_found_error", await _post(server, model="other")),
        (404, "not_found_error", await _post(server, f"{PATH}/nothing")),
        (415, "invalid_request_error", await fetch(server, "POST", PATH, b"{}", {"content-type": "text/plain"})),
    ):
        assert (reply.status, reply.json()["error"]["type"]) == (status, kind)


def test_a_strict_router_refuses_what_it_would_ignore() -> None:
    with pytest.raises(ValueError, match="this router is strict"):
        MessagesRequest.model_validate({**BASE, "metadata": {"user_id": "x"}}, context=IgnoredFields(True))
