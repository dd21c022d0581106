"""/v1/responses: the official client understands answers and streams, and what is not served is refused by name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from baton.router.http.openai.prompts import PromptMaker
from baton.router.http.openai.responses_api import ResponseWriter
from baton.wire.errors import RequestFailed
from baton.wire.messages.legs import Decode, Prefill
from tests.router.conversations import conversing
from tests.router.fake_node import FakeNode, LegMessage, answering
from tests.router.http_client import Reply, fetch
from tests.router.rig import MODEL, Server, serving

TEXT = "The river goes to the sea."
INPUT = "Where does the river go?"
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,eA==", "detail": "auto"}


@pytest.fixture
async def server(prompts: PromptMaker) -> AsyncIterator[Server]:
    async with serving(prompts) as running:
        yield running


@pytest.fixture
async def client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


async def _post(server: Server, **members: Any) -> Reply:
    body = {"model": MODEL, "input": INPUT} | members
    return await fetch(server, "POST", "/v1/responses", json.dumps(body).encode())


async def _prompt_of(server: Server, prompts: PromptMaker) -> str:
    leg = await server.rig.nodes[1].expect(Decode)
    return prompts.tokenizer.decode(leg.prompt.token_ids, skip_special_tokens=False)


async def test_an_answer(server: Server, client: openai.AsyncOpenAI, prompts: PromptMaker) -> None:
    tokens = prompts.tokenizer.encode(TEXT)
    await server.rig.pair(answering([*tokens, max(prompts.tokenizer.eos_token_ids)]))
    answer = await client.responses.create(
        model=MODEL, input=INPUT, instructions="Be brief.", metadata={"team": "a"}, max_output_tokens=60, store=True
    )
    assert (answer.output_text, answer.status, answer.error) == (TEXT, "completed", None)
    assert answer.output[0].type == "message"
    assert (answer.instructions, answer.metadata, answer.max_output_tokens) == ("Be brief.", {"team": "a"}, 60)
    assert answer.usage is not None
    assert answer.usage.output_tokens == len(tokens) + 1
    assert answer.usage.total_tokens == answer.usage.input_tokens + len(tokens) + 1
    assert answer.usage.input_tokens_details.cached_tokens == 0
    assert answer.usage.output_tokens_details.reasoning_tokens == 0
    assert answer.to_dict()["warnings"] == ["store is ignored: this router stores no responses"]
    assert await _prompt_of(server, prompts) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        f"<|im_start|>user\n{INPUT}<|im_end|>\n<|im_start|>assistant\n"
    )  # fmt: skip


async def test_a_budget_bounds_reasoning(prompts: PromptMaker) -> None:
    async with conversing(prompts) as server:
        prefill, _ = await server.rig.pair(answering(prompts.tokenizer.encode("Hm.</think>Well."), "complete"))
        await _post(server, reasoning={"effort": "high"}, thinking_token_budget=5)
        grammar = (await prefill.expect(Prefill)).params.grammar
        assert grammar is not None
        assert grammar.text.startswith("start: thought SPACE? <[*]>*\n")


async def test_an_answer_that_reached_its_limit_is_incomplete(
    server: Server, client: openai.AsyncOpenAI, prompts: PromptMaker
) -> None:
    await server.rig.pair(answering(prompts.tokenizer.encode(TEXT), "length"))
    answer = await client.responses.create(model=MODEL, input=INPUT)
    assert (answer.output_text, answer.status) == (TEXT, "incomplete")
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert "warnings" not in answer.to_dict()


async def test_a_conversation_with_an_earlier_answer_as_it_came(
    server: Server, client: openai.AsyncOpenAI, prompts: PromptMaker
) -> None:
    await server.rig.pair(answering(prompts.tokenizer.encode(TEXT), "length"))
    earlier = await client.responses.create(model=MODEL, input=INPUT)
    await _prompt_of(server, prompts)
    await client.responses.create(
        model=MODEL,
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "One"}, {"type": "input_text", "text": "two"}]},
            earlier.output[0].to_dict(),  # type: ignore[list-item]
            {"type": "message", "role": "user", "content": "And then?"},
        ],
    )
    assert await _prompt_of(server, prompts) == (
        "<|im_start|>user\nOne\ntwo<|im_end|>\n"
        f"<|im_start|>assistant\n{TEXT}<|im_end|>\n"
        "<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_a_stream(server: Server, client: openai.AsyncOpenAI, prompts: PromptMaker) -> None:
    await server.rig.pair(answering([*prompts.tokenizer.encode(TEXT), max(prompts.tokenizer.eos_token_ids)]))
    stream = await client.responses.create(model=MODEL, input=INPUT, stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [event.type for event in events if event.type != "response.output_text.delta"] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(event.delta for event in deltas) == TEXT
    completed = events[-1]
    assert completed.type == "response.completed"
    assert (completed.response.output_text, completed.response.id) == (TEXT, events[0].response.id)  # type: ignore[union-attr]
    assert {event.item_id for event in deltas} == {completed.response.output[0].id}
    assert completed.response.usage is not None
    assert completed.response.usage.output_tokens == len(prompts.tokenizer.encode(TEXT)) + 1


async def test_the_clients_stream_helper_collects_the_answer(
    server: Server, client: openai.AsyncOpenAI, prompts: PromptMaker
) -> None:
    await server.rig.pair(answering(prompts.tokenizer.encode(TEXT), "length"))
    async with client.responses.stream(model=MODEL, input=INPUT) as stream:
        events = [event async for event in stream]
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == TEXT


async def test_every_event_of_a_stream_has_its_name_and_none_is_done(server: Server, prompts: PromptMaker) -> None:
    await server.rig.pair(answering(prompts.tokenizer.encode(TEXT), "length"))
    reply = await _post(server, stream=True)
    *events, rest = reply.body.decode().split("\n\n")
    assert (rest, reply.is_whole) == ("", True)
    for event in events:
        name, data = event.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"


@pytest.mark.parametrize("asked", [{"top_logprobs": 1}, {"include": ["message.output_text.logprobs"]}])
async def test_log_probabilities(server: Server, prompts: PromptMaker, asked: dict[str, Any]) -> None:
    await server.rig.pair(answering(prompts.tokenizer.encode(TEXT), "length"))
    (part,) = (await _post(server, **asked)).json()["output"][0]["content"]
    assert "".join(entry["token"] for entry in part["logprobs"]) == TEXT
    assert [entry["logprob"] for entry in part["logprobs"]] == [-0.5] * len(part["logprobs"])
    body = (await _post(server, stream=True, **asked)).body.decode()
    payloads = [json.loads(event.split("\ndata: ")[1]) for event in body.split("\n\n")[:-1]]
    streamed = [entry for each in payloads if each["type"].endswith("text.delta") for entry in each["logprobs"]]
    assert streamed == part["logprobs"]


async def test_an_error_is_numbered_behind_what_was_told_and_not_behind_what_was_lost(
    server: Server, prompts: PromptMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[FakeNode, LegMessage]] = []
    make, ids = ResponseWriter.chunk, prompts.tokenizer.encode(TEXT)

    def script(node: FakeNode, leg: LegMessage) -> None:
        if isinstance(leg, Decode):
            begun.append((node, leg))
            node.emit(leg, ids[:1])

    def chunk(writer: ResponseWriter, *arguments: Any) -> bytes:
        made = make(writer, *arguments)
        if not begun:
            raise MemoryError
        node, leg = begun.pop()
        asyncio.get_running_loop().call_soon(node.emit, leg, ids[1:], 1)
        return made

    monkeypatch.setattr(ResponseWriter, "chunk", chunk)
    await server.rig.pair(script)
    reply = await _post(server, stream=True)
    told = [json.loads(event.split("\ndata: ")[1]) for event in reply.body.decode().split("\n\n")[:-1]]
    assert told[-1]["type"] == "response.failed"
    assert [each["sequence_number"] for each in told] == list(range(len(told)))
    await server.rig.settle()


async def test_a_stream_that_fails_ends_with_an_event_and_a_broken_connection(server: Server) -> None:
    def script(node: FakeNode, leg: LegMessage) -> None:
        if leg.attempt == 1:
            node.emit(leg, [70])
        node.fail(leg, RequestFailed.code, "the pool burned")

    await server.rig.pair(script)
    reply = await _post(server, stream=True)
    failed = json.loads(reply.body.decode().split("\n\n")[-2].split("\ndata: ")[1])
    assert not reply.is_whole
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"]["code"] == "server_error"
    await server.rig.settle()


@pytest.mark.parametrize(("members", "param", "code"), [
    ({"input": None}, "input", None),
    ({"input": []}, "input", "invalid_value"),
    ({"input": 3}, "input", "invalid_value"),
    ({"input": ["Hi"]}, "input[0]", "invalid_value"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "invalid_value"),
    ({"input": [{"role": ["user"], "content": "x"}]}, "input[0].role", "invalid_value"),
    ({"input": [{"role": "user"}]}, "input[0].content", "invalid_value"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
     "input[0].content[0].image_url", "invalid_value"),
    ({"input": [{"role": "user", "content": [IMAGE]}]}, "input", "unsupported_parameter"),
    ({"input": [{"role": "system", "content": [IMAGE]}]}, "input[0].content", "unsupported_parameter"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "file-1"}]}]},
     "input[0].content[0].file_id", "unsupported_parameter"),
    ({"input": [{"type": "function_call_output", "call_id": "a", "output": [IMAGE]}]},
     "input[0].output", "unsupported_parameter"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "file-1"}]}]},
     "input[0].content[0].type", "unsupported_parameter"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text", "invalid_value"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type", "unsupported_parameter"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_parameter"),
    ({"conversation": {"id": "conv_1"}}, "conversation", "unsupported_parameter"),
    ({"tools": [{"type": "file_search"}]}, "tools[0].type", "unsupported_parameter"),
    ({"truncation": "auto"}, "truncation", "unsupported_parameter"),
    ({"truncation": "some"}, "truncation", "invalid_value"),
    ({"text": {"format": {"type": "structural_tag"}}}, "text.format.type", "unsupported_parameter"),
    ({"include": ["everything"]}, "include[0]", "invalid_value"),
    ({"include": [["x"]]}, "include[0]", "invalid_value"),
    ({"background": True}, "background", "unsupported_parameter"),
    ({"n": 2}, "n", "unsupported_parameter"),
    ({"max_tokens": 5}, "max_tokens", "unsupported_parameter"),
    ({"max_output_tokens": 0}, "max_output_tokens", None),
    ({"temperature": 3.0}, "temperature", None),
    ({"top_logprobs": 21}, "top_logprobs", None),
])  # fmt: skip
async def test_what_is_not_served_is_refused_by_name(
    server: Server, members: dict[str, Any], param: str, code: str | None
) -> None:
    await server.rig.pair()
    reply = await _post(server, **members)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert code is None or reply.error["code"] == code


async def test_values_that_ask_for_nothing_are_taken(server: Server, prompts: PromptMaker) -> None:
    await server.rig.pair(answering(prompts.tokenizer.encode(TEXT), "length"))
    reply = await _post(
        server,
        background=False, include=["reasoning.encrypted_content"], parallel_tool_calls=True, previous_response_id=None,
        reasoning={"effort": None, "summary": None}, service_tier="auto", store=False, tool_choice="auto", tools=[],
        stream_options={"include_obfuscation": False}, text={"format": {"type": "text"}, "verbosity": "medium"},
        truncation="disabled", n=1, user="someone",
    )  # fmt: skip
    assert reply.status == 200
    assert "warnings" not in reply.json()
