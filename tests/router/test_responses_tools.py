"""/v1/responses with tools and reasoning: items of its output and input, and the events of its streams."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from baton.router.http.openai.prompts import PromptMaker
from baton.router.http.openai.responses_request import ResponsesRequest
from baton.wire.grammar import Grammar
from baton.wire.messages.legs import Prefill
from tests.router.conversations import CALL, PARAMETERS, THOUGHT, choosing, conversing, doubling, named_events
from tests.router.fake_node import answering
from tests.router.http_client import Reply, fetch
from tests.router.rig import MODEL, Server

TOOL = {"type": "function", "name": "double", "description": "2x", "parameters": PARAMETERS}
INPUT = "What is twice 4?"
EVENTS: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)


@pytest.fixture
async def server(prompts: PromptMaker) -> AsyncIterator[Server]:
    async with conversing(prompts) as running:
        yield running


async def _post(server: Server, **members: Any) -> Reply:
    body = {"model": MODEL, "input": INPUT} | members
    return await fetch(server, "POST", "/v1/responses", json.dumps(body).encode())


async def _answers(server: Server, prompts: PromptMaker, text: str, finish: str = "complete") -> Any:
    return await server.rig.pair(answering(prompts.tokenizer.encode(text), finish))


async def _prompt(server: Server, prompts: PromptMaker, **members: Any) -> str:
    chat = ResponsesRequest.model_validate({"model": MODEL, "input": INPUT, **members}).as_chat()
    ids, _ = await server.endpoints.served[MODEL].prompts.chat_prompt(chat)
    return prompts.tokenizer.decode(ids, skip_special_tokens=False)


async def test_reasoning_text_and_calls_are_items(server: Server, prompts: PromptMaker) -> None:
    await _answers(server, prompts, f"{THOUGHT}Let me see.{CALL}{CALL}")
    answer = (await _post(server, tools=[TOOL])).json()
    Response.model_validate(answer)
    reasoning, message, *calls = answer["output"]
    assert (reasoning["type"], message["type"], answer["status"]) == ("reasoning", "message", "completed")
    assert (reasoning["content"][0]["text"], message["content"][0]["text"]) == ("A sum.", "Let me see.")
    told = [(call["type"], call["name"], call["arguments"]) for call in calls]
    assert told == [("function_call", "double", '{"x": 4}')] * 2
    assert len({item["id"] for item in answer["output"]}) == len({call["call_id"] for call in calls}) + 2 == 4
    num_reasoning = answer["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert 0 < num_reasoning < answer["usage"]["output_tokens"]
    assert answer["tools"] == [{**TOOL, "strict": False}]


async def test_a_stream_tells_the_same_in_events_that_the_client_knows(server: Server, prompts: PromptMaker) -> None:
    await _answers(server, prompts, f"{THOUGHT}Let me see.{CALL}{CALL}")
    events = named_events((await _post(server, tools=[TOOL], stream=True)).body)
    for event in events:
        EVENTS.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = list(dict.fromkeys((event["type"], event.get("output_index")) for event in events))
    assert [f"{index} {kind.removeprefix('response.')}" for kind, index in kinds] == [
        "None created", "None in_progress",
        "0 output_item.added", "0 content_part.added", "0 reasoning_text.delta", "0 reasoning_text.done",
        "0 content_part.done", "0 output_item.done",
        "1 output_item.added", "1 content_part.added", "1 output_text.delta", "1 output_text.done",
        "1 content_part.done", "1 output_item.done",
        *(f"{index} {kind}" for index in (2, 3) for kind in (
            "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"
        )),
        "None completed",
    ]  # fmt: skip
    output = events[-1]["response"]["output"]
    for index, item in enumerate(output):
        of_item = [event for event in events if event.get("output_index") == index]
        whole = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert "".join(event["delta"] for event in of_item if event["type"].endswith("delta")) == whole
        assert of_item[-1]["item"] == item
        begun = of_item[0]["item"]
        assert (begun["id"], begun.get("arguments", ""), begun.get("content", [])) == (item["id"], "", [])


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_the_official_client_runs_a_loop_with_a_tool(
    server: Server, prompts: PromptMaker, is_streamed: bool
) -> None:
    await server.rig.pair(choosing(prompts, doubling))
    tools: Any = [TOOL]
    items: list[Any] = [{"role": "user", "content": INPUT}]
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answer: Any = None
        while answer is None or answer.output[-1].type == "function_call":
            if is_streamed:
                async with client.responses.stream(model=MODEL, input=items, tools=tools) as stream:
                    answer = await stream.get_final_response()
            else:
                answer = await client.responses.create(model=MODEL, input=items, tools=tools)
            items += answer.output
            for call in (item for item in answer.output if item.type == "function_call"):
                result = str(2 * json.loads(call.arguments)["x"])
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    assert answer.output_text == "It is 8."


async def test_a_turn_of_several_items_is_one_message(server: Server, prompts: PromptMaker) -> None:
    call = {"type": "function_call", "call_id": "a", "name": "double", "arguments": '{"x": 4}', "status": "completed"}
    items = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "A sum."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Well."}]},
        call,
        {**call, "call_id": "b"},
        {"type": "function_call_output", "call_id": "a", "output": "8"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "9"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
    ]
    told = 'double{"x": 4}'
    assert await _prompt(server, prompts, input=items) == (
        f"[user]hi[assistant]<A sum.>Well.{told}{told}[tool]8a[tool]9b[assistant]"
    )
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Sums"}]}
    assert await _prompt(server, prompts, input=[summary, call, {"role": "assistant", "content": "Eight."}]) == (
        f"[assistant]<Sums>{told}[assistant]Eight.[assistant]"
    )


async def test_the_template_gets_instructions_tools_and_effort(server: Server, prompts: PromptMaker) -> None:
    tools = f"double{json.dumps(PARAMETERS)};"
    assert await _prompt(server, prompts, tools=[TOOL], instructions="Be brief.") == (
        f"{tools}[system]Be brief.[user]{INPUT}[assistant]"
    )
    assert await _prompt(server, prompts, tools=[TOOL], tool_choice="none") == f"[user]{INPUT}[assistant]"
    high = await _prompt(server, prompts, reasoning={"effort": "high", "summary": "auto"})
    assert high == f"[user]{INPUT}[assistant]<think>"


async def test_a_named_function_is_called_with_its_arguments(server: Server, prompts: PromptMaker) -> None:
    prefill, _ = await _answers(server, prompts, '{"x": 4}')
    named = {"type": "function", "name": "double"}
    answer = (await _post(server, tools=[TOOL], tool_choice=named, reasoning={"effort": "none"})).json()
    assert [(item["name"], item["arguments"]) for item in answer["output"]] == [("double", '{"x": 4}')]
    assert answer["tool_choice"] == named
    closed = {**PARAMETERS, "additionalProperties": False}
    assert (await prefill.expect(Prefill)).params.grammar == Grammar.json_schema(closed)


async def test_an_answer_that_is_cut_leaves_its_last_item_incomplete(server: Server, prompts: PromptMaker) -> None:
    await _answers(server, prompts, f"{THOUGHT}Let me", "length")
    answer = (await _post(server)).json()
    assert [(item["type"], item["status"]) for item in answer["output"]] == [
        ("reasoning", "completed"),
        ("message", "incomplete"),
    ]


async def test_an_empty_answer_has_an_empty_message(server: Server, prompts: PromptMaker) -> None:
    await server.rig.pair(answering([max(prompts.tokenizer.eos_token_ids)]))
    (item,) = (await _post(server)).json()["output"]
    assert (item["type"], item["content"][0]["text"]) == ("message", "")
    events = named_events((await _post(server, stream=True)).body)
    assert events[-1]["response"]["output"][0]["content"] == item["content"]


async def test_an_event_is_one_line_whatever_its_text_is(server: Server, prompts: PromptMaker) -> None:
    text = "a\u2028b\u0085c\nd"
    await _answers(server, prompts, text)
    body = (await _post(server, stream=True)).body
    assert "".join(event.get("delta", "") for event in named_events(body)) == text
    assert not {"\u2028", "\u0085"} & {*body.decode()}


async def test_log_probabilities_are_those_of_the_text(server: Server, prompts: PromptMaker) -> None:
    await _answers(server, prompts, f"{THOUGHT}Four.{CALL}")
    answer = (await _post(server, top_logprobs=1, tools=[TOOL])).json()
    events = named_events((await _post(server, top_logprobs=1, tools=[TOOL], stream=True)).body)
    streamed = [
        entry for event in events if event["type"].endswith("text.delta") for entry in event.get("logprobs", ())
    ]
    assert "".join(entry["token"] for entry in streamed).startswith("Four.")
    assert answer["output"][1]["content"][0]["logprobs"]


async def test_what_agents_offer_unasked_is_ignored(server: Server, prompts: PromptMaker) -> None:
    await _answers(server, prompts, "Hello.")
    reply = await _post(
        server,
        tools=[
            TOOL,
            {"type": "web_search", "external_web_access": True},
            {"type": "namespace", "name": "multi_agent_v1", "description": "Sub-agents.", "tools": [TOOL]},
        ],
        reasoning={"effort": "medium", "summary": "auto"}, include=["reasoning.encrypted_content"], store=False,
        text={"verbosity": "low"}, client_metadata={"a": "b"}, prompt_cache_key="x", max_tool_calls=3,
    )  # fmt: skip
    assert (reply.status, reply.json()["output"][0]["content"][0]["text"]) == (200, "Hello.")
    assert reply.json()["warnings"] == [
        "client_metadata is ignored: this endpoint knows no such field",
        "max_tool_calls is ignored: it limits tools that the server runs, and there are none",
        "tools[].web_search is ignored: the router runs no tools",
        "tools[].namespace is ignored: the model is told of functions that belong to no group",
        "text.verbosity is ignored: models are told in the conversation how much to say",
        "reasoning.summary is ignored: reasoning is told as it is",
    ]


CALL_ITEM: dict[str, Any] = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(("members", "param"), [
    ({"tools": [{"type": "mcp"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"input": [{"type": "computer_call"}]}, "input[0].type"),
    ({"input": [{"type": ["x"]}]}, "input[0].type"),
    ({"input": [{**CALL_ITEM, "arguments": {}}]}, "input[0].arguments"),
    ({"input": [{**CALL_ITEM, "call_id": ""}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input[0].output"),
    ({"input": [{"type": "reasoning", "summary": "x"}]}, "input[0].summary"),
    ({"tools": [TOOL], "tool_choice": "required", "text": {"format": {"type": "json_object"}}}, "tools"),
])  # fmt: skip
async def test_what_is_wrong_is_named(server: Server, members: dict[str, Any], param: str) -> None:
    reply = await _post(server, **members)
    assert (reply.status, reply.error["param"]) == (400, param)
