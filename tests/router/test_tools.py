"""Chats with tools and reasoning: what the template and the nodes get, and how the answer is told apart."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import openai
import pytest
import tokenizers

from baton.engine.text.answers.formats import CALL_FORMATS, AnswerFormat, ParserNames
from baton.engine.text.chat_template import ChatTemplate
from baton.engine.text.tokenizer import Tokenizer
from baton.router.http.openai.answer_shapes import Reasoning, shape_of
from baton.router.http.openai.ignored import IgnoredFields
from baton.router.http.openai.prompts import PromptMaker
from baton.router.http.openai.schemas import ChatCompletionRequest
from baton.router.http.openai.tools import ToolFields
from baton.wire.grammar import LARK, Grammar
from baton.wire.messages.legs import Prefill
from tests.router.fake_node import FakeNode, answering
from tests.router.http_client import Reply, fetch
from tests.router.rig import MODEL, Server, serving

CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{{ tool.function.parameters | tojson }};{% endfor %}"
    "{% for message in messages %}[{{ message.role }}]{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments.x }}{% endfor %}"
    "{{ message.tool_call_id }}{% endfor %}[assistant]{% if enable_thinking %}<think>{% endif %}"
)
THINKS = TEMPLATE.replace("if enable_thinking %}<think>", "if enable_thinking is false %}<think></think>")
SILENT = TEMPLATE.partition("{% if enable_thinking")[0]
PARAMETERS = {"type": "object", "properties": {"x": {"$ref": "#/$defs/N"}}, "$defs": {"N": {"type": "integer"}}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "double", "description": "2x", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
CALL = '<tool_call>\n{"name": "double", "arguments": {"x": 4}}\n</tool_call>'
THOUGHT = "<think>\nA sum.\n</think>\n\n"
BASE: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def server(prompts: PromptMaker) -> AsyncIterator[Server]:
    chat = replace(
        prompts, template=ChatTemplate({"default": TEMPLATE}, {}), answer_format=AnswerFormat("hermes", "qwen3")
    )
    async with serving(chat) as running:
        yield running


async def _answers(server: Server, prompts: PromptMaker, text: str, finish: str = "complete") -> Any:
    return await server.rig.pair(answering(prompts.tokenizer.encode(text), finish))


async def _post(server: Server, **members: Any) -> Reply:
    return await fetch(server, "POST", CHAT, json.dumps({**BASE, **members}).encode())


async def _choice(server: Server, **members: Any) -> dict[str, Any]:
    reply = await _post(server, **members)
    assert reply.status == 200, reply.body
    return reply.json()["choices"][0]  # type: ignore[no-any-return]


async def _events(server: Server, **members: Any) -> list[dict[str, Any]]:
    reply = await _post(server, stream=True, stream_options={"include_usage": True}, **members)
    lines = reply.body.decode().split("\n\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def _calls(message: dict[str, Any]) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]


async def test_a_call_and_its_reasoning_are_members_of_the_message(server: Server, prompts: PromptMaker) -> None:
    await _answers(server, prompts, f"{THOUGHT}Let me see.{CALL}")
    reply = (await _post(server, tools=TOOLS)).json()
    (choice,) = reply["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert (message["content"], message["reasoning_content"], message["reasoning"]) == ("Let me see.", *["A sum."] * 2)
    assert _calls(message) == [("double", '{"x": 4}')]
    assert (message["tool_calls"][0]["type"], len(message["tool_calls"][0]["id"])) == ("function", 9)
    num_thought = reply["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert 0 < num_thought < reply["usage"]["completion_tokens"] - len(prompts.tokenizer.encode(CALL))


async def test_a_stream_joins_to_the_whole_answer(server: Server, prompts: PromptMaker) -> None:
    await _answers(server, prompts, THOUGHT + CALL + CALL)
    *events, last = await _events(server, tools=TOOLS, n=2, logprobs=True)
    whole = await _choice(server, tools=TOOLS)
    for index in range(2):
        deltas = [event["choices"][0]["delta"] for event in events if event["choices"][0]["index"] == index]
        for name in ("reasoning_content", "reasoning"):
            assert "".join(delta.get(name, "") for delta in deltas) == "A sum."
        assert "".join(delta.get("content") or "" for delta in deltas) == ""
        pieces = [call for delta in deltas for call in delta.get("tool_calls", ())]
        begun = {call["index"]: call["function"]["name"] for call in pieces if "id" in call}
        arguments = dict.fromkeys(begun, "")
        for call in pieces:
            arguments[call["index"]] += call["function"]["arguments"]
        assert len({call["id"] for call in pieces if "id" in call}) == 2
        assert list(zip(begun.values(), arguments.values(), strict=True)) == _calls(whole["message"])
        reasons = [event["choices"][0]["finish_reason"] for event in events if event["choices"][0]["index"] == index]
        assert [reason for reason in reasons if reason] == ["tool_calls"]
    assert whole["message"]["content"] is None
    assert last["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


async def test_token_ids_are_those_of_all_parts(server: Server, prompts: PromptMaker) -> None:
    text = THOUGHT + CALL
    await _answers(server, prompts, text)
    *events, _ = await _events(server, tools=TOOLS, return_token_ids=True)
    ids = [token for event in events for token in event["choices"][0].get("token_ids", ())]
    assert ids == prompts.tokenizer.encode(text) == (await _choice(server, return_token_ids=True))["token_ids"]


async def test_reasoning_may_be_left_out(server: Server, prompts: PromptMaker) -> None:
    await _answers(server, prompts, f"{THOUGHT}Four.")
    assert (await _choice(server, include_reasoning=False))["message"] == {
        "role": "assistant",
        "content": "Four.",
        "refusal": None,
    }
    *events, last = await _events(server, include_reasoning=False)
    assert not [event for event in events if "reasoning" in event["choices"][0]["delta"]]
    assert last["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


async def test_reasoning_that_the_prompt_begins(server: Server, prompts: PromptMaker) -> None:
    await _answers(server, prompts, "A sum.</think>Four.")
    thinking = await _choice(server, chat_template_kwargs={"enable_thinking": True})
    assert (thinking["message"]["reasoning_content"], thinking["message"]["content"]) == ("A sum.", "Four.")
    effort = await _choice(server, reasoning_effort="high")
    assert effort["message"] == thinking["message"]
    without = await _choice(server, reasoning_effort="none")
    assert without["message"]["content"] == "A sum.</think>Four."


async def test_without_tools_a_marker_is_content(server: Server, prompts: PromptMaker) -> None:
    await _answers(server, prompts, CALL)
    variants: list[dict[str, Any]] = [{}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}]
    for members in variants:
        choice = await _choice(server, **members)
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")


async def test_what_is_no_call_is_content(server: Server, prompts: PromptMaker) -> None:
    text = '<tool_call>\n{"name": "double", "argum'
    await _answers(server, prompts, text, "length")
    choice = await _choice(server, tools=TOOLS)
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "length")
    *events, _ = await _events(server, tools=TOOLS)
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == text


async def test_the_template_gets_tools_and_earlier_calls(server: Server, prompts: PromptMaker) -> None:
    call = {"id": "a1", "type": "function", "function": {"name": "double", "arguments": '{"x": 4}'}}
    messages = [
        *BASE["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a1", "content": "8"},
    ]

    async def rendered(**members: Any) -> str:
        request = ChatCompletionRequest.model_validate({**BASE, "tools": TOOLS[:1], **members})
        ids, _ = await server.endpoints.served[MODEL].prompts.chat_prompt(request)
        return prompts.tokenizer.decode(ids, skip_special_tokens=False)

    tools = f"double{json.dumps(PARAMETERS)};"
    assert await rendered(messages=messages) == f"{tools}[user]hi[assistant]double4[tool]8a1[assistant]"
    assert await rendered(tool_choice="none") == "[user]hi[assistant]"


def test_a_template_that_joins_texts_gets_arguments_as_text() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    for source, text in (
        ("{{ 'a' + messages[0].tool_calls[0].function.arguments }}", 'a{"x": 1}'),
        ("{{ messages[0].content is none }}{{ 'a' + messages[0].tool_calls[0].function.arguments }}", 'Truea{"x": 1}'),
        ("{{ messages[0].content + 'b' }}", "b"),
        ("{{ messages[0].content + messages[0].tool_calls[0].function.arguments }}", '{"x": 1}'),
        ("{{ messages[0].content is none }}{{ messages[0].tool_calls[0].function.arguments.x }}", "True1"),
    ):
        assert ChatTemplate({"default": source}, {}).render(messages) == text


async def test_a_grammar_makes_calls_where_they_are_required(server: Server, prompts: PromptMaker) -> None:
    prefill, _ = await _answers(server, prompts, '[{"name": "double", "parameters": {"x": 4}}]')
    choice = await _choice(
        server, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, reasoning_effort="none"
    )
    assert (_calls(choice["message"]), choice["finish_reason"]) == ([("double", '{"x": 4}')], "tool_calls")
    grammar = (await prefill.expect(Prefill)).params.grammar
    assert grammar is not None
    schema = json.loads(grammar.text)
    first, second = schema["items"]["anyOf"]
    assert (schema["minItems"], schema["maxItems"]) == (1, 1)
    assert first["properties"]["name"] == {"const": "double"}
    assert first["properties"]["parameters"]["properties"]["x"] == {
        "$ref": "#/items/anyOf/0/properties/parameters/$defs/N"
    }
    assert second["properties"]["parameters"] == {"type": "object", "properties": {}, "additionalProperties": False}


async def test_a_named_function_is_called_with_its_arguments(server: Server, prompts: PromptMaker) -> None:
    prefill, _ = await _answers(server, prompts, '{"x": 4}')
    named = {"type": "function", "function": {"name": "double"}}
    choice = await _choice(server, tools=TOOLS, tool_choice=named, reasoning_effort="none")
    assert (_calls(choice["message"]), choice["finish_reason"]) == ([("double", '{"x": 4}')], "tool_calls")
    closed = {**PARAMETERS, "additionalProperties": False}
    assert (await prefill.expect(Prefill)).params.grammar == Grammar.json_schema(closed)


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({"title": "F", "required": ["x"]}, False),
        ({"additionalProperties": True}, True),
        ({"patternProperties": {"^y": {}}}, None),
    ],
)
def test_enforced_calls_have_the_listed_arguments_unless_the_schema_speaks_of_others(
    said: dict[str, Any], found: bool | None
) -> None:
    function = {"name": "f", "parameters": {**PARAMETERS, **said}}
    fields = ToolFields.model_validate(
        {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    )
    asked = fields.tool_grammar()
    assert asked is not None
    parameters = json.loads(asked.grammar.text)["items"]["anyOf"][0]["properties"]["parameters"]
    assert parameters.get("additionalProperties") is found


async def test_calls_that_are_required_follow_reasoning(server: Server, prompts: PromptMaker) -> None:
    prefill, _ = await _answers(server, prompts, 'A sum.</think>[{"name": "double", "parameters": {"x": 4}}]')
    thinks = {"chat_template_kwargs": {"enable_thinking": True}}
    choice = await _choice(server, tools=TOOLS, tool_choice="required", **thinks)
    assert (choice["message"]["reasoning"], _calls(choice["message"])) == ("A sum.", [("double", '{"x": 4}')])
    assert await _start_of_grammar(prefill) == "start: thought SPACE? structure"


@pytest.mark.parametrize(
    ("template", "members", "start"),
    [
        # a template that begins reasoning where it is asked to
        (TEMPLATE, {}, None),
        (TEMPLATE, {"thinking_token_budget": 9}, None),
        (TEMPLATE, {"reasoning_effort": "low"}, "thought SPACE? structure"),
        (TEMPLATE, {"chat_template_kwargs": {"enable_thinking": True}}, "thought SPACE? structure"),
        (TEMPLATE, {"chat_template_kwargs": {"enable_thinking": False}}, None),
        # a template that lets the model reason unless it is told not to
        (THINKS, {}, '(SPACE? "<think>" thought SPACE?)? structure'),
        (THINKS, {"chat_template_kwargs": {"enable_thinking": False}}, None),
        # a template that says nothing of it
        (SILENT, {}, None),
        (SILENT, {"chat_template_kwargs": {"enable_thinking": True}}, '(SPACE? "<think>" thought SPACE?)? structure'),
    ],
)
async def test_a_structure_begins_at_once_unless_the_model_was_asked_to_reason(
    prompts: PromptMaker, template: str, members: dict[str, Any], start: str | None
) -> None:
    chat = ChatTemplate({"default": template}, {})
    maker = replace(
        prompts,
        template=chat,
        answer_format=AnswerFormat("hermes", "qwen3"),
        thinks_unless_told=chat.thinks_unless_told(),
    )
    async with serving(maker) as server:
        prefill, _ = await _answers(server, prompts, "true" if start is None else "<think>Hm.</think>true")
        asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "boolean"}}}
        message = (await _choice(server, response_format=asked, **members))["message"]
        assert message["content"] == "true"
        if start is None:
            assert (await prefill.expect(Prefill)).params.grammar == Grammar.json_schema({"type": "boolean"})
        else:
            assert await _start_of_grammar(prefill) == f"start: {start}"


@pytest.mark.parametrize(
    ("limits", "budget"),
    [
        ({"max_tokens": 100}, 32),
        ({"max_tokens": 127}, 32),
        ({"max_tokens": 128}, 64),
        ({"max_tokens": 1}, 0),
        ({"max_tokens": 16}, 0),
        ({"max_tokens": 20}, 4),
        ({"max_tokens": 100, "thinking_token_budget": 84}, 84),
        ({"max_tokens": 100, "thinking_token_budget": 85}, 32),
        ({"max_tokens": 18, "thinking_token_budget": 17}, 2),
        ({"max_tokens": 100, "thinking_token_budget": 77}, 77),
        ({"max_tokens": 100, "thinking_token_budget": 0}, 0),
        ({"max_tokens": 100, "thinking_token_budget": 100}, 32),
        ({"max_tokens": 100, "thinking_token_budget": -1}, 32),
    ],
)
def test_reasoning_before_a_structure_has_a_bound(limits: dict[str, int], budget: int) -> None:
    members = {**BASE, "structured_outputs": {"choice": ["true"]}, "reasoning_effort": "high", **limits}
    request = ChatCompletionRequest.model_validate(members, context=IgnoredFields(is_strict=True))
    shape = shape_of(request, AnswerFormat("hermes", "qwen3"), Reasoning(True, False, limits["max_tokens"]))
    assert shape is not None
    assert shape.max_reasoning_tokens == budget


async def test_a_budget_bounds_reasoning_before_free_text_as_well(server: Server, prompts: PromptMaker) -> None:
    prefill, _ = await _answers(server, prompts, "Hm.</think>Well.")
    await _choice(server, thinking_token_budget=5, reasoning_effort="high", tools=TOOLS)
    assert await _start_of_grammar(prefill) == "start: thought SPACE? <[*]>*"
    # what bounds nothing is no grammar
    await _choice(server, thinking_token_budget=10**6, reasoning_effort="high")
    assert (await prefill.expect(Prefill)).params.grammar is None


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_whose_tokens_are_all_hidden_says_so(
    server: Server, prompts: PromptMaker, stream: bool
) -> None:
    await _answers(server, prompts, "One and two and", "length")
    asked = {"reasoning_effort": "high", "include_reasoning": False, "stream": stream}
    told = (await _post(server, **asked)).body.decode()
    assert "the answer is empty because all of its tokens are reasoning" in told
    assert "One and" not in told
    await _answers(server, prompts, "One.</think>Two.")
    assert "warnings" not in (await _post(server, **asked)).body.decode()


async def _start_of_grammar(prefill: FakeNode) -> str:
    grammar = (await prefill.expect(Prefill)).params.grammar
    assert grammar is not None
    assert grammar.kind == LARK
    return grammar.text.partition("\n")[0]


async def test_a_structure_follows_reasoning(server: Server, prompts: PromptMaker) -> None:
    text = '{"x": 4}'
    prefill, _ = await _answers(server, prompts, "A sum.</think>" + text)
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}}
    message = (await _choice(server, response_format=asked, reasoning_effort="high"))["message"]
    assert (message["reasoning"], message["content"]) == ("A sum.", text)
    assert await _start_of_grammar(prefill) == "start: thought SPACE? structure"
    await _choice(server, response_format=asked, reasoning_effort="none")
    assert (await prefill.expect(Prefill)).params.grammar == Grammar.json_schema(PARAMETERS)
    await _choice(server, response_format=asked, tools=TOOLS, reasoning_effort="none")
    assert (await _start_of_grammar(prefill)).startswith("start:  (structure | ")


async def test_a_grammar_that_is_no_part_of_another_has_no_reasoning(server: Server, prompts: PromptMaker) -> None:
    prefill, _ = await _answers(server, prompts, "<think>a")
    message = (await _choice(server, guided_grammar='start: "<think>a"'))["message"]
    assert message["content"] == "<think>a"
    assert (await prefill.expect(Prefill)).params.grammar == Grammar.ebnf('start: "<think>a"')


async def test_a_strict_function_has_a_grammar_though_the_model_need_not_call_it(
    server: Server, prompts: PromptMaker
) -> None:
    prefill, _ = await _answers(server, prompts, f"{THOUGHT}Let me see.{CALL}")
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]
    chat = ChatCompletionRequest.model_validate({**BASE, "tools": strict})
    closed = {**PARAMETERS, "additionalProperties": False}
    assert chat.callable_schemas() == {"double": closed, "now": {"type": "object"}}
    choice = await _choice(server, tools=strict)
    assert (choice["message"]["content"], _calls(choice["message"])) == ("Let me see.", [("double", '{"x": 4}')])
    assert (await _start_of_grammar(prefill)).endswith("(before call)* FREE?")
    await _choice(server, tools=strict, tool_choice="none")
    assert (await prefill.expect(Prefill)).params.grammar is None


async def test_harmony_has_a_grammar_for_strict_and_required_calls_and_behind_thoughts(prompts: PromptMaker) -> None:
    harmony = replace(
        prompts,
        template=ChatTemplate({"default": TEMPLATE}, {}),
        answer_format=AnswerFormat("openai", "openai_gptoss"),
    )
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.double <|constrain|>json<|message|>{"x": 4}'
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]
    named = {"type": "function", "function": {"name": "double"}}
    async with serving(harmony) as server:
        prefill, _ = await _answers(server, prompts, thought + call)
        for members, last in (
            ({"tools": strict}, "final | call_0 | call_1"),
            ({"tools": TOOLS, "tool_choice": "required"}, "call_0 | call_1"),
            ({"tools": TOOLS, "tool_choice": named}, "call_0"),
        ):
            choice = await _choice(server, **members)
            assert (choice["message"]["reasoning"], choice["finish_reason"]) == ("Hm.", "tool_calls")
            assert _calls(choice["message"]) == [("double", '{"x": 4}')]
            repeated = "*" if "tool_choice" not in members else "{0,2}"
            assert await _start_of_grammar(prefill) == f"start: before{repeated} ({last})"
        await _choice(server, tools=TOOLS)
        assert (await prefill.expect(Prefill)).params.grammar is None
    async with serving(harmony) as server:
        prefill, _ = await _answers(server, prompts, f'{thought}<|channel|>final<|message|>{{"x": 4}}')
        asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}}
        message = (await _choice(server, response_format=asked))["message"]
        assert (message["reasoning"], message["content"]) == ("Hm.", '{"x": 4}')
        assert await _start_of_grammar(prefill) == "start: before{0,2} (final)"


async def test_tools_that_the_template_does_not_show_are_told_of(prompts: PromptMaker) -> None:
    plain = replace(prompts, template=ChatTemplate({"default": "{{ messages[0].content }}"}, {}))
    async with serving(plain) as server:
        await _answers(server, prompts, "[]")
        (warning,) = (await _post(server, tools=TOOLS)).json()["warnings"]
        assert warning.startswith("tools is ignored: the chat template")
        for members in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": TOOLS, "tool_choice": "required"}):
            assert "warnings" not in (await _post(server, **members)).json()
        server.endpoints.is_strict = True
        reply = await _post(server, tools=TOOLS)
        assert (reply.status, reply.error["param"]) == (400, "tools")


async def test_a_model_whose_calls_have_no_grammar_is_told_of(prompts: PromptMaker) -> None:
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    glm = replace(prompts, template=ChatTemplate({"default": TEMPLATE}, {}), answer_format=AnswerFormat("glm45"))
    async with serving(glm) as server:
        await _answers(server, prompts, "Hello.")
        reply = await _post(server, tools=strict)
        (warning,) = reply.json()["warnings"]
        assert warning.startswith("tools[].function.strict is ignored: ")
        server.endpoints.is_strict = True
        reply = await _post(server, tools=strict)
        assert (reply.status, reply.error["param"]) == (400, "tools")


async def test_a_schema_that_cannot_be_enforced_is_refused(server: Server) -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "foo"}}}}
    for asked, members in (({}, {"tool_choice": "required"}), ({"strict": True}, {})):
        reply = await _post(server, tools=[{"type": "function", "function": {**function, **asked}}], **members)
        place = "tools[0].function.parameters.properties.x.type"
        assert (reply.status, reply.json()["error"]["param"]) == (400, place)


async def test_a_schema_that_never_ends_is_refused_wherever_it_stands(server: Server) -> None:
    endless = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
    function = {"name": "f", "parameters": endless}
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": endless}}
    for members, place in (
        ({"response_format": asked}, "response_format.json_schema.schema"),
        ({"response_format": asked, "reasoning_effort": "high"}, "response_format.json_schema.schema"),
        (
            {"tools": [{"type": "function", "function": function}], "tool_choice": "required"},
            "tools[0].function.parameters",
        ),
        (
            {"tools": [TOOLS[0], {"type": "function", "function": {**function, "strict": True}}]},
            "tools[1].function.parameters",
        ),
    ):
        for stream in (False, True):
            reply = await _post(server, stream=stream, **members)
            assert (reply.status, reply.json()["error"]["param"]) == (400, f"{place}.properties.next.$ref")
    strict = {"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}
    reply = await _post(server, tools=[strict, {"type": "function", "function": function}])
    assert reply.error["code"] == "no_node", "arguments that no grammar enforces may be anything"


async def test_markers_that_are_special_tokens_are_seen(prompts: PromptMaker) -> None:
    backend = tokenizers.Tokenizer.from_str(prompts.tokenizer.definition())
    backend.add_special_tokens(["<tool_call>", "</tool_call>", "<other>"])
    special = replace(prompts, tokenizer=Tokenizer(backend), answer_format=AnswerFormat("hermes"))
    assert special.tokenizer.decode(special.tokenizer.encode("<tool_call>")) == ""
    async with serving(special) as server:
        await _answers(server, special, f"Well.<other>{CALL}")
        choice = await _choice(server, tools=TOOLS)
        assert (choice["message"]["content"], _calls(choice["message"])) == ("Well.", [("double", '{"x": 4}')])
        assert "tool_call>" not in (await _choice(server))["message"]["content"]


def test_flags_name_parsers_and_auto_looks_at_the_template() -> None:
    assert ParserNames().format_of("<tool_call></think>") == AnswerFormat("hermes", "qwen3")
    assert ParserNames("mistral", "none").format_of("<tool_call>") == AnswerFormat("mistral", "none")


async def test_the_official_client_streams_calls(server: Server, prompts: PromptMaker) -> None:
    await _answers(server, prompts, THOUGHT + CALL)
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        tools: Any = TOOLS
        messages: Any = BASE["messages"]
        async with client.chat.completions.stream(model=MODEL, messages=messages, tools=tools) as stream:
            kinds = {event.type async for event in stream}
            final = await stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls or []
    assert (call.function.name, json.loads(call.function.arguments)) == ("double", {"x": 4})
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds


async def test_a_model_that_may_not_call_cannot_begin_a_call(server: Server, prompts: PromptMaker) -> None:
    prefill, _ = await _answers(server, prompts, "Well.")
    begins = [tuple(prompts.tokenizer.encode(text, False)) for text in ("<tool_call>", " <tool_call>")]
    for members, expected in (
        ({"tools": TOOLS, "tool_choice": "none"}, begins),
        ({"tools": TOOLS, "tool_choice": "none", "bad_words": ["x"]}, begins),
        ({"tools": TOOLS}, []),
        ({}, []),
    ):
        await _choice(server, **members)
        found = (await prefill.expect(Prefill)).params.bad_word_ids
        assert list(found)[-len(expected) or len(found) :] == expected


def test_each_format_of_calls_knows_what_begins_one() -> None:
    by_content = {"pythonic", "openai"}  # a list of calls is text; harmony tells calls from content by itself
    assert {name for name in CALL_FORMATS if not AnswerFormat(name).call_begins} == by_content
