"""Requests for answers of a given structure: what reaches the nodes, what is refused, and that bombs hurt nobody."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton.router.http.openai.grammar_checks import GrammarChecks
from baton.router.http.openai.prompts import PromptMaker
from baton.wire.errors import InvalidRequest
from baton.wire.grammar import Grammar
from baton.wire.messages.legs import Decode, Prefill
from tests.router.fake_node import answering
from tests.router.http_client import Reply, fetch
from tests.router.rig import MODEL, Server, serving

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES = "/v1/messages"
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi there"}]},
    COMPLETIONS: {"prompt": "hi there, you"},
    RESPONSES: {"input": "hi there"},
    MESSAGES: {"messages": [{"role": "user", "content": "hi there"}], "max_tokens": 50},
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TEXT = '{"a": 5}'


@pytest.fixture
async def server(prompts: PromptMaker) -> AsyncIterator[Server]:
    async with serving(prompts) as running:
        yield running


async def _post(server: Server, path: str, **members: Any) -> Reply:
    return await fetch(server, "POST", path, json.dumps({"model": MODEL, **BASE[path], **members}).encode())


def _format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


ASKED: list[tuple[str, dict[str, Any], Grammar]] = [
    (CHAT, {"response_format": _format(SCHEMA)}, Grammar.json_schema(SCHEMA)),
    (COMPLETIONS, {"response_format": {"type": "json_object"}}, Grammar.json_object()),
    (CHAT, {"structured_outputs": {"json": json.dumps(SCHEMA)}}, Grammar.json_schema(SCHEMA)),
    (
        CHAT,
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        Grammar.json_schema(SCHEMA, ""),
    ),
    (COMPLETIONS, {"structured_outputs": {"regex": "[0-9]+"}}, Grammar.regex("[0-9]+")),
    (CHAT, {"structured_outputs": {"choice": ["a", "b"]}}, Grammar.choice(["a", "b"])),
    (CHAT, {"guided_grammar": 'root ::= "a"'}, Grammar.ebnf('root ::= "a"')),
    (COMPLETIONS, {"structured_outputs": {"grammar": 'root ::= "a"'}}, Grammar.ebnf('root ::= "a"')),
    (COMPLETIONS, {"guided_json": SCHEMA}, Grammar.json_schema(SCHEMA)),
    (
        CHAT,
        {"guided_json": json.dumps(SCHEMA), "guided_whitespace_pattern": " ?"},
        Grammar.json_schema(SCHEMA, " ?"),
    ),
    (CHAT, {"guided_regex": "[0-9]+"}, Grammar.regex("[0-9]+")),
    (COMPLETIONS, {"guided_choice": ["a", "b"]}, Grammar.choice(["a", "b"])),
    (
        RESPONSES,
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
        Grammar.json_schema(SCHEMA),
    ),
    (RESPONSES, {"text": {"format": {"type": "json_object"}}}, Grammar.json_object()),
]


async def test_both_legs_have_the_grammar_and_its_whole_text_is_the_answer(
    server: Server, prompts: PromptMaker
) -> None:
    tokens = prompts.tokenizer.encode(TEXT)
    prefill, decode = await server.rig.pair(answering(tokens, "complete"))
    for path, members, grammar in ASKED:
        reply = await _post(server, path, **members)
        assert reply.status == 200, reply.body
        assert (await prefill.expect(Prefill)).params.grammar == grammar
        assert (await decode.expect(Decode)).params.grammar == grammar
        if path == RESPONSES:
            answer = reply.json()
            assert (answer["output"][0]["content"][0]["text"], answer["status"]) == (TEXT, "completed")
            assert answer["text"] == members["text"]
            continue
        (choice,) = reply.json()["choices"]
        text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
        assert (text, choice["finish_reason"]) == (TEXT, "stop")


async def test_a_stream_of_a_complete_answer_ends_with_stop(server: Server, prompts: PromptMaker) -> None:
    await server.rig.pair(answering(prompts.tokenizer.encode(TEXT), "complete"))
    reply = await _post(server, CHAT, stream=True, response_format=_format(SCHEMA))
    events = [json.loads(line[6:]) for line in reply.body.decode().split("\n\n") if line.startswith("data: {")]
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == TEXT
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


UNKNOWN_TYPE = {"type": "object", "properties": {"x": {"type": "foo"}}}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"response_format": _format({"type": "foo"})}, "response_format.json_schema.schema.type"),
    (CHAT, {"response_format": _format({"not": {"type": "null"}})}, "response_format.json_schema.schema.not"),
    (COMPLETIONS, {"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    (CHAT, {"guided_grammar": "start: missing"}, "guided_grammar"),
    (
        RESPONSES,
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "foo"}}}},
        "text.format.schema.type",
    ),
    (
        RESPONSES,
        {"tools": [{"type": "function", "name": "f", "parameters": UNKNOWN_TYPE}], "tool_choice": "required"},
        "tools[0].parameters.properties.x.type",
    ),
    (
        MESSAGES,
        {"output_config": {"format": {"type": "json_schema", "schema": UNKNOWN_TYPE}}},
        "output_config.format.schema.properties.x.type",
    ),
    (
        MESSAGES,
        {"tools": [{"name": "f", "input_schema": UNKNOWN_TYPE}], "tool_choice": {"type": "any"}},
        "tools[0].input_schema.properties.x.type",
    ),
    (RESPONSES, {"text": {"format": {"type": "yaml"}}}, "text.format.type"),
    (RESPONSES, {"response_format": {"type": "json_object"}}, "response_format"),
]


async def test_what_cannot_be_compiled_is_refused_with_the_reason_before_a_node_hears_of_it(server: Server) -> None:
    for path, members, param in REFUSED:
        reply = await _post(server, path, **members)
        error = reply.json()["error"]
        assert reply.status == 400, (param, error)
        assert param in (error["message"] if path == MESSAGES else error["param"])
        assert len(error["message"]) > len(param)


def _bombs() -> list[Grammar]:
    twice: dict[str, Any] = {
        f"a{n}": {"allOf": [{"$ref": f"#/$defs/a{n + 1}"}, {"$ref": f"#/$defs/a{n + 1}"}]} for n in range(40)
    }
    twice["a40"] = {"type": "object", "properties": {"x": {"type": "string", "pattern": "a+"}}}
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(200):
        deep = {"type": "array", "items": deep}
    return [
        Grammar.json_schema({"$defs": twice, "$ref": "#/$defs/a0"}),
        Grammar.json_schema({"type": "integer", "multipleOf": 999999937}),
        Grammar("json_schema", json.dumps(deep)),
        Grammar("json_schema", '{"type":"object","properties":{"a":' * 2000 + "{}" + "}}" * 2000),
        Grammar.json_schema({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
        Grammar.json_schema({"enum": ["x" * 100_000]}),
        Grammar.ebnf('start: "a" ' + "(" * 30_000),
    ]


async def test_bombs_are_refused_and_the_next_grammar_is_served(prompts: PromptMaker) -> None:
    checks = prompts.grammars
    large = [
        Grammar.json_schema({"enum": [f"value {number}" for number in range(5000)]}),
        Grammar.json_schema({"type": "array", "items": {"type": "null"}, "minItems": 10**9, "maxItems": 10**18}),
        Grammar.regex("((a?){1000}){1000}(.*b){60}(c+c+)+d"),
    ]
    await checks.require(Grammar.regex("before"), "regex")
    verdicts = await asyncio.gather(
        *(checks.require(bomb, "bomb") for bomb in _bombs()), *(checks.require(each, "large") for each in large),
        return_exceptions=True,
    )  # fmt: skip
    refused, served = verdicts[: -len(large)], verdicts[-len(large) :]
    assert served == [None] * len(large)
    assert [type(verdict) for verdict in refused] == [InvalidRequest] * len(refused)
    assert {verdict.param for verdict in refused if isinstance(verdict, InvalidRequest)} == {
        "bomb",
        "bomb.$ref",
        f"bomb{'.items' * 25}...{'.items' * 25}",
    }
    await checks.require(Grammar.regex("after"), "regex")
    begun_s = time.process_time()
    with pytest.raises(InvalidRequest):
        await checks.require(_bombs()[0], "bomb")  # its verdict is known
    assert time.process_time() - begun_s < 1.0


async def test_checks_of_a_folder_without_a_tokenizer_say_so(tmp_path: Any) -> None:
    checks = GrammarChecks(tmp_path)
    try:
        with pytest.raises(InvalidRequest, match="tokenizer"):
            await checks.require(Grammar.regex("a"), "regex")
    finally:
        checks.close()
