"""The table of bad requests, and the parameters that good ones become."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.text.choice_text import TextOptions
from baton.router.http.openai.fields import MAX_TEXT_CHARS
from baton.router.http.openai.request_body import parse_body
from baton.router.http.openai.schemas import ChatCompletionRequest, CompletionRequest
from baton.wire.errors import InvalidRequest, UnsupportedMediaType
from baton.wire.sampling import DecodingParams

JSON = "application/json"
USER = {"role": "user", "content": "hi"}
UNKNOWN, UNSUPPORTED, INVALID = "unknown_parameter", "unsupported_parameter", "invalid_value"
IMAGE_URL = "messages[1].content[1].image_url.url"
ABSENT = "(this member is left out)"


def _body(base: dict[str, Any], changes: dict[str, Any]) -> bytes:
    members = {name: value for name, value in {**base, **changes}.items() if value != ABSENT}
    return json.dumps(members).encode()


def chat(**changes: Any) -> ChatCompletionRequest:
    request = parse_body(_body({"model": "m", "messages": [USER]}, changes), JSON, ChatCompletionRequest)
    request.decoding_params()
    return request


def completion(**changes: Any) -> CompletionRequest:
    request = parse_body(_body({"model": "m", "prompt": "hi"}, changes), JSON, CompletionRequest)
    request.decoding_params()
    return request


def _refusal(endpoint: Any, changes: dict[str, Any]) -> tuple[str | None, str]:
    """Which parameter is wrong, and how."""
    with pytest.raises(InvalidRequest) as caught:
        endpoint(**changes)
    assert len(caught.value.message) < 400
    return caught.value.param, caught.value.code


def _message(**members: Any) -> dict[str, Any]:
    return {"messages": [USER, members]}


def _part(**members: Any) -> dict[str, Any]:
    return _message(role="user", content=[{"type": "text", "text": "x"}, members])


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
FUNCTION = "messages[1].tool_calls[0].function"


def _call(**members: Any) -> dict[str, Any]:
    return {**CALL, "function": {"name": "f", "arguments": "{}", **members}}


def _tool(**members: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **members}}]}


BOTH = [
    # 29, 31: model
    ({"model": ABSENT}, "model", INVALID),
    ({"model": None}, "model", INVALID),
    ({"model": 5}, "model", INVALID),
    ({"model": ""}, "model", INVALID),
    ({"model": "m" * 10_000_000}, "model", INVALID),
    # 40, 67: unknown
    ({"kv_transfer_params": {"remote_host": "10.0.0.1"}}, "kv_transfer_params", UNKNOWN),
    ({"bootstrap_room": 1}, "bootstrap_room", UNKNOWN),
    ({"bootstrap_host": "h"}, "bootstrap_host", UNKNOWN),
    ({"request_id": "x"}, "request_id", UNKNOWN),
    ({"remote_block_ids": [1]}, "remote_block_ids", UNKNOWN),
    # 41, 65, 66: known, unsupported
    ({"response_format": {"type": "json"}}, "response_format.type", INVALID),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type", UNSUPPORTED),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", INVALID),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema", INVALID),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", INVALID),
    ({"structured_outputs": {"regx": "a"}}, "structured_outputs.regx", "unknown_parameter"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", INVALID),
    ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice", INVALID),
    ({"structured_outputs": {"regex": "a" * 2**17 + "a"}}, "structured_outputs.regex", "string_above_max_length"),
    ({"structured_outputs": {"regex": "a", "structural_tag": "x"}}, "structured_outputs.structural_tag", UNSUPPORTED),
    ({"guided_regex": ""}, "guided_regex", INVALID),
    ({"guided_regex": "a", "guided_whitespace_pattern": " ?"}, "guided_whitespace_pattern", INVALID),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", INVALID),
    ({"guided_json": {}, "response_format": {"type": "json_object"}}, "guided_json", INVALID),
    ({"prediction": "text"}, "prediction", INVALID),
    ({"prediction": {"content": "text"}}, "prediction.type", INVALID),
    ({"prediction": {"type": "diff", "content": "text"}}, "prediction.type", INVALID),
    ({"prediction": {"type": "content"}}, "prediction.content", INVALID),
    ({"prediction": {"type": "content", "content": 5}}, "prediction.content", INVALID),
    ({"prediction": {"type": "content", "content": []}}, "prediction.content", INVALID),
    ({"prediction": {"type": "content", "content": ["a"]}}, "prediction.content[0]", INVALID),
    ({"prediction": {"type": "content", "content": [{"type": "image_url"}]}}, "prediction.content[0].type", INVALID),
    ({"prediction": {"type": "content", "content": [{"type": "text"}]}}, "prediction.content[0].text", INVALID),
    ({"use_beam_search": True}, "use_beam_search", UNSUPPORTED),
    ({"length_penalty": 0.5}, "length_penalty", UNSUPPORTED),
    # 65: cache_salt
    *(({"cache_salt": salt}, "cache_salt", INVALID) for salt in ("", "s" * 129, "../", "😀", "s\n")),
    ({"priority": 2**63}, "priority", INVALID),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", INVALID),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", INVALID),
    ({"truncation_side": "middle"}, "truncation_side", INVALID),
    ({"detokenize": False, "stop": "x"}, "stop", INVALID),
    ({"prompt_logprobs": 21}, "prompt_logprobs", INVALID),
    ({"prompt_logprobs": -1}, "prompt_logprobs", INVALID),
    ({"prompt_logprobs": True}, "prompt_logprobs", INVALID),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", INVALID),
    ({"allowed_token_ids": []}, "allowed_token_ids", INVALID),
    ({"allowed_token_ids": [1.0]}, "allowed_token_ids", INVALID),
    ({"allowed_token_ids": [1] * 4097}, "allowed_token_ids", INVALID),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids", INVALID),
    ({"bad_words": "no"}, "bad_words", INVALID),
    ({"bad_words": ["a", ""]}, "bad_words[1]", INVALID),
    ({"bad_words": ["x" * 129]}, "bad_words[0]", INVALID),
    ({"bad_words": ["a"] * 129}, "bad_words", INVALID),
    # 42: strict types
    ({"stream": "true"}, "stream", INVALID),
    ({"stream": 1}, "stream", INVALID),
    ({"return_timings": 1}, "return_timings", INVALID),
    ({"n": "2"}, "n", INVALID),
    ({"n": 1.0}, "n", INVALID),
    ({"n": True}, "n", INVALID),
    ({"temperature": "1"}, "temperature", INVALID),
    ({"temperature": True}, "temperature", INVALID),
    ({"max_tokens": 5.0}, "max_tokens", INVALID),
    # 44 to 49: ranges
    ({"temperature": -0.1}, "temperature", INVALID),
    ({"temperature": 2.1}, "temperature", INVALID),
    ({"top_p": 0}, "top_p", INVALID),
    ({"top_p": 1.1}, "top_p", INVALID),
    ({"top_p": -1}, "top_p", INVALID),
    ({"top_k": -2}, "top_k", INVALID),
    ({"top_k": 1.5}, "top_k", INVALID),
    ({"top_k": 2**31}, "top_k", INVALID),
    ({"min_p": -0.1}, "min_p", INVALID),
    ({"min_p": 1.1}, "min_p", INVALID),
    ({"presence_penalty": 2.1}, "presence_penalty", INVALID),
    ({"frequency_penalty": -2.1}, "frequency_penalty", INVALID),
    ({"repetition_penalty": 0}, "repetition_penalty", INVALID),
    ({"repetition_penalty": -1}, "repetition_penalty", INVALID),
    # 50, 52, 58, 63
    ({"n": 0}, "n", INVALID),
    ({"n": -1}, "n", INVALID),
    ({"n": 129}, "n", INVALID),
    ({"n": 2**31}, "n", INVALID),
    ({"n": 10**18}, "n", INVALID),
    ({"max_tokens": 0}, "max_tokens", INVALID),
    ({"max_tokens": -1}, "max_tokens", INVALID),
    ({"max_tokens": 2**63}, "max_tokens", INVALID),
    ({"seed": 2**63}, "seed", INVALID),
    ({"seed": -(2**63) - 1}, "seed", INVALID),
    ({"seed": 1.5}, "seed", INVALID),
    ({"min_tokens": -1}, "min_tokens", INVALID),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", INVALID),
    # 60: logit_bias
    ({"logit_bias": {"5": 100.1}}, "logit_bias", INVALID),
    ({"logit_bias": {"5": True}}, "logit_bias.5", INVALID),
    ({"logit_bias": {"AI": 1}}, "logit_bias", INVALID),
    ({"logit_bias": {"-1": 1}}, "logit_bias", INVALID),
    ({"logit_bias": {"1.5": 1}}, "logit_bias", INVALID),
    ({"logit_bias": {"01": 1}}, "logit_bias", INVALID),
    ({"logit_bias": {"٣": 1}}, "logit_bias", INVALID),
    ({"logit_bias": {str(2**32): 1}}, "logit_bias", INVALID),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", INVALID),
    ({"logit_bias": [[5, 1]]}, "logit_bias", INVALID),
    # 61, 62: stop
    ({"stop": ["a"] * 17}, "stop", INVALID),
    ({"stop": ""}, "stop", INVALID),
    ({"stop": [""]}, "stop", INVALID),
    ({"stop": ["a", None]}, "stop", INVALID),
    ({"stop": [1]}, "stop", INVALID),
    ({"stop": "x" * 10_000_000}, "stop", INVALID),
    ({"stop_token_ids": [-1]}, "stop_token_ids", INVALID),
    ({"stop_token_ids": [True]}, "stop_token_ids", INVALID),
    ({"stop_token_ids": [2**32]}, "stop_token_ids", INVALID),
    ({"stop_token_ids": [1] * 257}, "stop_token_ids", INVALID),
    # 68: user and metadata
    ({"user": {}}, "user", INVALID),
    ({"user": "u" * 2**20}, "user", INVALID),
    ({"metadata": "x"}, "metadata", INVALID),
    ({"metadata": {"a": 1}}, "metadata", INVALID),
    ({"metadata": {"a": "x" * 2**20}}, "metadata", INVALID),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata", INVALID),
    # 69: stream options
    ({"stream_options": {"include_usage": True}}, "stream_options", INVALID),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", UNKNOWN),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", INVALID),
    ({"stream": True, "stream_options": 5}, "stream_options", INVALID),
]

CHAT = [
    # 32, 33: messages
    ({"messages": ABSENT}, "messages", INVALID),
    ({"messages": []}, "messages", INVALID),
    ({"messages": None}, "messages", INVALID),
    ({"messages": {}}, "messages", INVALID),
    ({"messages": [USER] * 2049}, "messages", INVALID),
    # 34, 35: one message
    ({"messages": ["hi"]}, "messages[0]", INVALID),
    (_message(content="x"), "messages[1].role", INVALID),
    (_message(role="bot", content="x"), "messages[1].role", INVALID),
    (_message(role=["user"], content="x"), "messages[1].role", INVALID),
    (_message(role="user", content=None), "messages[1].content", INVALID),
    (_message(role="user", content=5), "messages[1].content", INVALID),
    (_message(role="user", content=[]), "messages[1].content", INVALID),
    (_message(role="user", content=[5]), "messages[1].content[0]", INVALID),
    (_message(role="tool", content="x"), "messages[1].tool_call_id", INVALID),
    (_message(role="user", content="x", tool_call_id="1"), "messages[1].tool_call_id", INVALID),
    (_message(role="user", content="x", tool_calls=[CALL]), "messages[1].tool_calls", INVALID),
    (_message(role="assistant", content="x", tool_calls={}), "messages[1].tool_calls", INVALID),
    (_message(role="assistant", tool_calls=[CALL, {"id": "1"}]), "messages[1].tool_calls[1].function", INVALID),
    (_message(role="assistant", tool_calls=[{**CALL, "id": 5}]), "messages[1].tool_calls[0].id", INVALID),
    (_message(role="assistant", tool_calls=[{**CALL, "type": "x"}]), "messages[1].tool_calls[0].type", INVALID),
    (_message(role="assistant", tool_calls=[{**CALL, "x": 1}]), "messages[1].tool_calls[0].x", UNKNOWN),
    (_message(role="assistant", tool_calls=[_call(arguments={})]), f"{FUNCTION}.arguments", INVALID),
    (_message(role="assistant", tool_calls=[_call(name=None)]), f"{FUNCTION}.name", INVALID),
    (_message(role="assistant", tool_calls=[]), "messages[1].content", INVALID),
    (_part(type="image_url", image_url={"url": "http://x"}), IMAGE_URL, INVALID),
    (_part(type="image_url", image_url={"url": "http:image/png;base64,eA=="}), IMAGE_URL, INVALID),
    (_part(type="image_url", image_url="data:image/png;base64,eA=="), "messages[1].content[1].image_url", INVALID),
    (_part(type="input_audio"), "messages[1].content[1].type", UNSUPPORTED),
    (_part(type="hologram"), "messages[1].content[1].type", UNSUPPORTED),
    (_part(text="x"), "messages[1].content[1].type", INVALID),
    (_part(type="text"), "messages[1].content[1].text", INVALID),
    # 36: length
    (_message(role="user", content="x" * (MAX_TEXT_CHARS + 1)), "messages[1].content", "string_above_max_length"),
    (_message(role="user", content="x" * MAX_TEXT_CHARS), "messages", "string_above_max_length"),
    # 41: known, unsupported
    # tools
    ({"tools": {}}, "tools", INVALID),
    ({"tools": ["f"]}, "tools[0]", INVALID),
    ({"tools": [{"type": "function"}]}, "tools[0].function", INVALID),
    ({"tools": [{"type": "custom"}]}, "tools[0].type", UNSUPPORTED),
    (_tool(name="a b"), "tools[0].function.name", INVALID),
    (_tool(description=5), "tools[0].function.description", INVALID),
    (_tool(parameters=[]), "tools[0].function.parameters", INVALID),
    (_tool(parameters={"type": "string"}), "tools[0].function.parameters", INVALID),
    (_tool(strict="yes"), "tools[0].function.strict", INVALID),
    (_tool(color="red"), "tools[0].function.color", UNKNOWN),
    ({"tools": _tool()["tools"] * 2}, "tools[1].function.name", INVALID),
    ({"tools": _tool()["tools"] * 513}, "tools", INVALID),
    (_tool(description="x" * MAX_TEXT_CHARS), "tools", "string_above_max_length"),
    ({"tool_choice": "required"}, "tool_choice", INVALID),
    ({**_tool(), "tool_choice": "any"}, "tool_choice", INVALID),
    ({**_tool(), "tool_choice": {"type": "function"}}, "tool_choice.function.name", INVALID),
    ({**_tool(), "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", INVALID),
    ({**_tool(), "parallel_tool_calls": 1}, "parallel_tool_calls", INVALID),
    ({**_tool(), "tool_choice": "required", "guided_json": {}}, "tools", INVALID),
    ({**_tool(parameters={"enum": ["x" * 2**17]}), "tool_choice": "required"}, "tools", "string_above_max_length"),
    ({"include_reasoning": "no"}, "include_reasoning", INVALID),
    ({"functions": [{}]}, "functions", UNSUPPORTED),
    ({"audio": {}}, "audio", UNSUPPORTED),
    ({"modalities": ["text", "audio"]}, "modalities", UNSUPPORTED),
    ({"reasoning_effort": "heroic"}, "reasoning_effort", INVALID),
    ({"documents": [{"text": 5}]}, "documents[0]", INVALID),
    ({"documents": [{}] * 1025}, "documents", INVALID),
    ({"documents": [{"text": "x" * MAX_TEXT_CHARS}, {"text": "x"}]}, "documents", "string_above_max_length"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", INVALID),
    ({"chat_template": ""}, "chat_template", INVALID),
    ({"chat_template": "x" * (2**17 + 1)}, "chat_template", INVALID),
    ({"prompt": "x"}, "prompt", UNSUPPORTED),
    # 53, 59
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens", INVALID),
    ({"max_completion_tokens": 0}, "max_completion_tokens", INVALID),
    ({"logprobs": 5}, "logprobs", INVALID),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", INVALID),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", INVALID),
    ({"top_logprobs": 2}, "top_logprobs", INVALID),
    ({"logprobs": False, "top_logprobs": 2}, "top_logprobs", INVALID),
    # template variables
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template", UNSUPPORTED),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize", UNSUPPORTED),
    ({"chat_template_kwargs": {"tools": "x"}}, "chat_template_kwargs.tools", UNSUPPORTED),
    ({"chat_template_kwargs": {"enable_thinking": [1]}}, "chat_template_kwargs.enable_thinking", INVALID),
    ({"chat_template_kwargs": {"date_string": "x" * 2000}}, "chat_template_kwargs.date_string", INVALID),
    ({"chat_template_kwargs": []}, "chat_template_kwargs", INVALID),
]

COMPLETION = [
    # 32, 37, 38, 39: prompt
    ({"prompt": ABSENT}, "prompt", INVALID),
    ({"prompt": None}, "prompt", INVALID),
    ({"prompt": ""}, "prompt", INVALID),
    ({"prompt": []}, "prompt", INVALID),
    ({"prompt": [""]}, "prompt[0]", INVALID),
    ({"prompt": [[]]}, "prompt[0]", INVALID),
    ({"prompt": {}}, "prompt", INVALID),
    ({"prompt": 5}, "prompt", INVALID),
    ({"prompt": [1, -1]}, "prompt", INVALID),
    ({"prompt": [1, 2.0]}, "prompt", INVALID),
    ({"prompt": [1, True]}, "prompt", INVALID),
    ({"prompt": [True]}, "prompt", INVALID),
    ({"prompt": [1, "a"]}, "prompt", INVALID),
    ({"prompt": ["a", [1]]}, "prompt", INVALID),
    ({"prompt": ["a", None]}, "prompt", INVALID),
    ({"prompt": [[1], [2, -1]]}, "prompt[1]", INVALID),
    ({"prompt": [[1], [2**32]]}, "prompt[1]", INVALID),
    ({"prompt": [[1], [[2]]]}, "prompt[1]", INVALID),
    ({"prompt": ["a"] * 129}, "prompt", INVALID),
    ({"prompt": "x" * (MAX_TEXT_CHARS + 1)}, "prompt", "string_above_max_length"),
    # 51, 59, 64
    *(({"best_of": count, "n": 2}, "best_of", INVALID) for count in (-1, 0, 1, 21, 2**63, "3", 3.0)),
    ({"best_of": 3, "n": 2, "stream": True}, "best_of", INVALID),
    ({"logprobs": 6}, "logprobs", INVALID),
    ({"logprobs": -1}, "logprobs", INVALID),
    ({"logprobs": True}, "logprobs", INVALID),
    ({"max_tokens": 0, "logprobs": 1}, "max_tokens", INVALID),
    ({"echo": 1}, "echo", INVALID),
    ({"echo": True, "suffix": "x"}, "echo", UNSUPPORTED),
    ({"echo": True, "truncate_prompt_tokens": 3}, "echo", UNSUPPORTED),
    ({"messages": [USER]}, "messages", UNSUPPORTED),
    ({"min_tokens": 17}, "min_tokens", INVALID),
]


@pytest.mark.parametrize(("endpoint", "cases"), [(chat, [*BOTH, *CHAT]), (completion, [*BOTH, *COMPLETION])])
def test_wrong_requests_are_refused(endpoint: Any, cases: list[tuple[dict[str, Any], str, str]]) -> None:
    wrong = [
        (str(changes)[:200], found)
        for changes, param, code in cases
        if (found := _refusal(endpoint, changes)) != (param, code)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "changes",
    [
        {"n": 128, "seed": -1},
        {"seed": 2**63 - 1},
        {"top_k": 0, "top_p": 1, "temperature": 0, "min_p": 0},
        {"top_k": -1},
        {"logit_bias": {"0": -100, "4294967295": 100}},
        {"stop": ["x" * 1024] * 16},
        {"user": "u", "metadata": {"k": "v"}, "store": True, "service_tier": "flex"},
        {"response_format": {"type": "text"}, "use_beam_search": False, "length_penalty": 1.0},
        {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
    ],
    ids=lambda changes: str(changes)[:60],
)
@pytest.mark.parametrize("endpoint", [chat, completion])
def test_limits_and_neutral_values_are_accepted(endpoint: Any, changes: dict[str, Any]) -> None:
    assert endpoint(**changes).model == "m"


@pytest.mark.parametrize("schema", [ChatCompletionRequest, CompletionRequest])
def test_null_of_any_optional_field_is_its_default(schema: Any) -> None:
    base = {"model": "m", "messages": [USER]} if schema is ChatCompletionRequest else {"model": "m", "prompt": "hi"}
    optional = [name for name, field in schema.model_fields.items() if not field.is_required()]
    nulls = dict.fromkeys([*optional, *schema.unsupported])
    assert parse_body(_body(base, nulls), JSON, schema) == parse_body(_body(base, {}), JSON, schema)


def test_defaults() -> None:
    params = chat().decoding_params()
    assert (params.temperature, params.top_p) == (1.0, 1.0)
    assert (params.max_tokens, params.seed, params.logprobs) == (None, None, None)
    assert completion().decoding_params().max_tokens == 16
    assert completion(max_tokens=None).decoding_params().max_tokens == 16


def test_every_sampling_field_reaches_the_nodes() -> None:
    sent = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "seed": 11,
        "max_tokens": 9,
        "min_tokens": 2,
        "ignore_eos": True,
        "logprobs": 3,
    }
    params = completion(**sent, logit_bias={"5": 1, "3": -2.5}, stop_token_ids=[4]).decoding_params()
    expected = DecodingParams(
        **sent,  # type: ignore[arg-type]
        logit_bias_ids=(5, 3),
        logit_bias_values=(1.0, -2.5),
        stop_token_ids=(4,),
    )
    assert params == expected


def test_text_options_hold_what_nodes_do_not_see() -> None:
    request = chat(stop="a", include_stop_str_in_output=True, skip_special_tokens=False, min_tokens=3)
    assert request.text_options() == TextOptions(
        stop=("a",), include_stop=True, skip_special_tokens=False, min_tokens=3
    )
    request = chat(detokenize=False, return_tokens_as_token_ids=True)
    assert request.text_options() == TextOptions(detokenize=False, tokens_as_ids=True)
    assert request.with_token_ids


def test_variables_for_the_template() -> None:
    assert chat(reasoning_effort="none").template_variables() == {"reasoning_effort": "none", "enable_thinking": False}
    own: dict[str, Any] = {"enable_thinking": False}
    request = chat(reasoning_effort="low", chat_template_kwargs=own, documents=[{"title": "t", "text": "x"}])
    assert request.template_variables() == {
        "reasoning_effort": "low",
        "enable_thinking": False,
        "documents": ({"title": "t", "text": "x"},),
    }


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 4}, 4), ({"logprobs": False}, None)],
)
def test_chat_logprobs_are_a_switch_and_a_number(changes: dict[str, Any], expected: int | None) -> None:
    assert chat(**changes).decoding_params().logprobs == expected


def test_max_completion_tokens_is_the_limit() -> None:
    assert chat(max_completion_tokens=7).decoding_params().max_tokens == 7
    assert chat(max_completion_tokens=7, max_tokens=7).decoding_params().max_tokens == 7


def test_messages_for_the_template_are_plain_text_with_known_roles() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    answer: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None, "tool_calls": None}
    thought = {**answer, "reasoning_content": "so", "reasoning": None}
    request = chat(messages=[{"role": "developer", "content": parts}, {**USER, "name": "Ada"}, answer, thought])
    assert request.template_messages() == [
        {"role": "system", "content": "a\nb"},
        {"role": "user", "content": "hi", "name": "Ada"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": "", "reasoning_content": "so"},
    ]


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a\u0000", ("a\u0000",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
        (["a"] * 128, ("a",) * 128),
    ],
)
def test_four_kinds_of_prompt_have_one_form(prompt: Any, prompts: Any) -> None:
    assert completion(prompt=prompt).prompt == prompts


def test_prompt_ids_are_checked_against_the_vocabulary() -> None:
    completion(prompt=[[1], [99]]).check_vocabulary(100)
    with pytest.raises(InvalidRequest) as caught:
        completion(prompt=[[1], [100]]).check_vocabulary(100)
    assert caught.value.param == "prompt[1]"


@pytest.mark.parametrize(
    "content_type",
    [
        None,
        "",
        "text/plain",
        "application/jsonl",
        "application/json; charset=bogus",
        "application/json; charset=utf-16",
    ],
)
def test_other_content_types_are_unsupported(content_type: str | None) -> None:
    with pytest.raises(UnsupportedMediaType):
        parse_body(b"{}", content_type, ChatCompletionRequest)


@pytest.mark.parametrize(
    "content_type", ["application/json", "Application/JSON ; Charset=UTF-8", 'application/json;charset="utf-8"']
)
def test_json_in_utf_8_is_read(content_type: str) -> None:
    body = _body({"model": "m", "prompt": "hi"}, {})
    assert parse_body(body, content_type, CompletionRequest).model == "m"


_words = st.sampled_from(["", "a", "auto", "user", "text", "1", "\ud800", "{sentence}", "\u2028"])
_numbers = st.sampled_from([0, 1, -1, 2**31, 2**63, 10**400, 0.0, 1.5, -0.1, 1e308, float("nan"), float("inf")])
_values = st.recursive(
    st.none() | st.booleans() | _numbers | _words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_words, inner, max_size=3),
    max_leaves=6,
)
_messages = st.lists(st.fixed_dictionaries({"role": _words, "content": _values}), max_size=2)
_names = sorted({*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields, "tools", "x"})


@settings(deadline=None)
@given(st.booleans(), st.dictionaries(st.sampled_from(_names), _values | _messages, max_size=6))
def test_any_object_is_a_request_or_the_clients_mistake(is_chat: bool, members: dict[str, Any]) -> None:
    try:
        request = chat(**members) if is_chat else completion(**members)
        request.text_options()
    except InvalidRequest as error:
        json.dumps([error.message, error.param, error.code], ensure_ascii=False).encode()


def test_the_dialect_is_imported_without_torch() -> None:
    modules = "baton.router.http.openai.schemas, baton.router.http.openai.replies"
    script = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    root = Path(__file__).parents[4]
    assert subprocess.run([sys.executable, "-c", script], cwd=root, check=False).returncode == 0
