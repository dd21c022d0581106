"""Coding agents, unmodified: what Claude Code, Codex CLI and Qwen Code send for a task and for the result of a call is
answered by a call and by a text, streamed. The fields are those seen on the wire; texts and tools are short ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from baton.router.http.openai.prompts import PromptMaker
from tests.router.conversations import PARAMETERS, choosing, conversing, doubling
from tests.router.http_client import fetch
from tests.router.rig import MODEL, Server

TASK = "What is twice 4?"
CACHED = {"cache_control": {"type": "ephemeral"}}
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def _function(name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "name": name, "description": "d", "strict": False, "parameters": parameters}


CLAUDE_CODE: dict[str, Any] = {
    "model": MODEL, "max_tokens": 32000, "stream": True, "metadata": {"user_id": "u"},
    "system": [{"type": "text", "text": "a"}, {"type": "text", "text": "b", **CACHED}],
    "thinking": {"type": "adaptive", "display": "omitted"}, "output_config": {"effort": "high"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "tools": [
        {"name": "double", "description": "2x", "input_schema": PARAMETERS},
        {"name": "Later", "description": "d", "input_schema": NO_ARGUMENTS, "defer_loading": True},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Be brief."}, {"type": "text", "text": TASK}]},
        {"role": "system", "content": [{"type": "text", "text": "The folder is empty.", **CACHED}]},
    ],
}  # fmt: skip
CODEX: dict[str, Any] = {
    "model": MODEL, "stream": True, "store": False, "tool_choice": "auto", "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k",
    "client_metadata": {"thread_id": "t", "turn_id": "n"},
    "tools": [
        _function("double", PARAMETERS),
        {"type": "namespace", "name": "agents", "description": "d", "tools": [_function("wait", NO_ARGUMENTS)]},
        {"type": "web_search", "external_web_access": True},
    ],
    "input": [
        {"type": "message", "id": "a", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "id": "b", "role": "user", "content": [{"type": "input_text", "text": TASK}]},
    ],
}  # fmt: skip
QWEN_CODE: dict[str, Any] = {
    "model": MODEL, "max_tokens": 32000, "stream": True, "stream_options": {"include_usage": True},
    "tools": [
        {"type": "function", "function": {"name": "double", "description": "2x", "parameters": PARAMETERS}},
        {"type": "function", "function": {"name": "list_agents", "description": "without parameters"}},
    ],
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "The folder is empty."}, {"type": "text", "text": TASK}]},
    ],
}  # fmt: skip


async def _events(server: Server, path: str, body: Mapping[str, Any]) -> list[Any]:
    reply = await fetch(server, "POST", path, json.dumps(body).encode())
    assert reply.status == 200, reply.body
    lines = reply.body.decode().splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


@pytest.mark.parametrize("beta", ["", "?beta=true"])
async def test_claude_code(prompts: PromptMaker, beta: str) -> None:
    async with conversing(prompts) as server:
        await server.rig.pair(choosing(prompts, doubling))
        events = await _events(server, f"/v1/messages{beta}", CLAUDE_CODE)
        (use,) = [each["content_block"] for each in events if each.get("content_block", {}).get("type") == "tool_use"]
        assert use["name"] == "double"
        assert events[-2]["delta"]["stop_reason"] == "tool_use"
        messages = [
            *CLAUDE_CODE["messages"],
            {"role": "assistant", "content": [{**use, "input": {"x": 4}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": use["id"], "content": "8", "is_error": False, **CACHED},
            ]},
        ]  # fmt: skip
        events = await _events(server, f"/v1/messages{beta}", {**CLAUDE_CODE, "messages": messages})
        assert "".join(each.get("delta", {}).get("text", "") for each in events) == "It is 8."


async def test_codex(prompts: PromptMaker) -> None:
    async with conversing(prompts) as server:
        await server.rig.pair(choosing(prompts, doubling))
        answer = (await _events(server, "/v1/responses", CODEX))[-1]["response"]
        (call,) = [item for item in answer["output"] if item["type"] == "function_call"]
        assert (call["name"], call["arguments"]) == ("double", '{"x": 4}')
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "8"}
        turn = {**CODEX, "input": [*CODEX["input"], *answer["output"], result]}
        events = await _events(server, "/v1/responses", turn)
        texts = [each["delta"] for each in events if each["type"] == "response.output_text.delta"]
        assert "".join(texts) == "It is 8."


async def test_qwen_code(prompts: PromptMaker) -> None:
    async with conversing(prompts) as server:
        await server.rig.pair(choosing(prompts, doubling))
        chunks = await _events(server, "/v1/chat/completions", QWEN_CODE)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
        calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
        assert "".join(call["function"].get("arguments") or "" for call in calls) == '{"x": 4}'
        assert chunks[-1]["usage"]["completion_tokens"] > 0
        call = {"id": calls[0]["id"], "type": "function", "function": {"name": "double", "arguments": '{"x": 4}'}}
        messages = [
            *QWEN_CODE["messages"],
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": "8"},
        ]
        chunks = await _events(server, "/v1/chat/completions", {**QWEN_CODE, "messages": messages})
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
        assert "".join(delta.get("content") or "" for delta in deltas) == "It is 8."
