"""Answers told apart into content, reasoning and calls: every format, and every split of an answer into pieces."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.text.answers.deltas import JoinedAnswer, join_answer
from baton.engine.text.answers.formats import (
    CALL_FORMATS,
    REASONING_FORMATS,
    AnswerFormat,
    CallsWanted,
    find_call_format,
    find_reasoning_format,
)

SCHEMAS: dict[str, dict[str, Any]] = {
    "add": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": ["number", "null"]}}},
    "write": {"type": "object", "properties": {"text": {"type": "string"}, "lines": {"type": "array"}}},
    "now": {},
    "note": {
        "type": "object",
        "properties": {"a": {"type": ["string", "null"]}, "b": {"anyOf": [{"type": "integer"}]}},
    },
}
WANTED = CallsWanted(SCHEMAS)
THINK = "<think>\nA cat, a hat.\n</think>\n\n"

Expected = tuple[str, str, list[tuple[str, dict[str, Any]]]]


def parse(format: AnswerFormat, pieces: Sequence[str], wanted: CallsWanted = WANTED, begun: bool = False) -> Any:
    parser = format.parser(wanted, is_reasoning_begun=begun)
    return join_answer([delta for piece in pieces for delta in parser.push(piece)] + parser.finish())


def shown(answer: JoinedAnswer) -> Expected:
    calls = [(call.name, json.loads(call.arguments)) for call in answer.calls.values()]
    return answer.content, answer.reasoning, calls


ADD = ("add", {"a": 1, "b": 2.5})
WRITE = ("write", {"text": 'x = "<y>"\n', "lines": [1, {"k": None}]})
ADD_JSON, WRITE_JSON = json.dumps(ADD[1]), json.dumps(WRITE[1])
EXAMPLES: list[tuple[str, str, Expected]] = [
    ("hermes", "Only text, 1 < 2.\n", ("Only text, 1 < 2.\n", "", [])),
    (
        "hermes",
        f'Let me see.\n<tool_call>\n{{"name": "add", "arguments": {ADD_JSON}}}\n</tool_call>\n<tool_call>\n'
        f'{{"arguments": {WRITE_JSON}, "name": "write"}}\n</tool_call> Done.',
        ("Let me see.Done.", "", [ADD, WRITE]),
    ),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', ("", "", [("now", {})])),
    ("hermes", '<tool_call>{"name": 5}</tool_call> yes', ('<tool_call>{"name": 5}</tool_call> yes', "", [])),
    ("hermes", '<tool_call>{"name": "add", "arg', ('<tool_call>{"name": "add", "arg', "", [])),
    (
        "llama3_json",
        f'{{"name": "add", "parameters": {ADD_JSON}}}; {{"name": "write", "parameters": {WRITE_JSON}}}',
        ("", "", [ADD, WRITE]),
    ),
    ("llama3_json", f'<|python_tag|>{{"name": "add", "parameters": {ADD_JSON}}}', ("", "", [ADD])),
    ("llama3_json", '{"name": "Bob", "parameters": {}}', ('{"name": "Bob", "parameters": {}}', "", [])),
    ("llama3_json", '{"answer": {"a": 1}}', ('{"answer": {"a": 1}}', "", [])),
    (
        "pythonic",
        "[add(a=1, b=2.5), write(text='x = \"<y>\"\\n', lines=[1, {'k': None}])]",
        ("", "", [ADD, WRITE]),
    ),
    ("pythonic", "[now()] and more", ("and more", "", [("now", {})])),
    ("pythonic", "[foo()]", ("[foo()]", "", [])),
    ("pythonic", "[1, 2] is a list", ("[1, 2] is a list", "", [])),
    ("pythonic", "[add(a=__import__('os'))]", ("[add(a=__import__('os'))]", "", [])),
    (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "add", "arguments": {ADD_JSON}}}, {{"name": "write", "arguments": {WRITE_JSON}, '
        '"id": "abcdefghi"}]',
        ("", "", [ADD, WRITE]),
    ),
    (
        "mistral",
        f"So: [TOOL_CALLS]add[ARGS]{ADD_JSON}[TOOL_CALLS]write[CALL_ID]abcdefghi[ARGS]{WRITE_JSON}",
        ("So:", "", [ADD, WRITE]),
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2.5\n</parameter>\n</function>\n"
        '</tool_call>\n<tool_call>\n<function=write>\n<parameter=text>\nx = "<y>"\n\n</parameter>\n<parameter=lines>\n'
        '[1, {"k": null}]\n</parameter>\n</function>\n</tool_call>',
        ("", "", [ADD, WRITE]),
    ),
    (
        "qwen3_coder",
        "<function=note>\n<parameter=a>5</parameter>\n<parameter=b>5</parameter>\n</function>"
        "<function=note><parameter=a>null</parameter><parameter=b>x</parameter><parameter=c>1</parameter></function>",
        ("", "", [("note", {"a": "5", "b": 5}), ("note", {"a": None, "b": "x", "c": "1"})]),
    ),
    ("qwen3_coder", "ok <function=now>\n</function>", ("ok", "", [("now", {})])),
    (
        "glm45",
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>2.5"
        '</arg_value>\n</tool_call>\n<tool_call>write<arg_key>text</arg_key><arg_value>x = "<y>"\n</arg_value>'
        '<arg_key>lines</arg_key><arg_value>[1, {"k": null}]</arg_value></tool_call>',
        ("", "", [ADD, WRITE]),
    ),
    (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"  # noqa: RUF001
        f"{ADD_JSON}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>write\n```json\n{WRITE_JSON}\n"  # noqa: RUF001
        "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",  # noqa: RUF001
        ("", "", [ADD, WRITE]),
    ),
    (
        "deepseek_v31",
        f"Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{ADD_JSON}<｜tool▁call▁end｜>"  # noqa: RUF001
        "<｜tool▁calls▁end｜>",  # noqa: RUF001
        ("Hm.", "", [ADD]),
    ),
    (
        "openai",
        "<|channel|>analysis<|message|>A cat.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{ADD_JSON}<|call|>",
        ("I look.", "A cat.", [ADD]),
    ),
    (
        "openai",
        f" to=functions.write<|channel|>commentary json<|message|>{WRITE_JSON}<|call|>",
        ("", "", [WRITE]),
    ),
    ("openai", "<|channel|>final<|message|>42\n", ("42\n", "", [])),
]


@pytest.mark.parametrize(("calls", "text", "expected"), EXAMPLES)
def test_each_format_is_understood_whole_letter_by_letter_and_cut_at_any_place(
    calls: str, text: str, expected: Expected
) -> None:
    for pieces in ([text], list(text), *([text[:cut], text[cut:]] for cut in range(1, len(text)))):
        assert shown(parse(AnswerFormat(calls), pieces)) == expected


@pytest.mark.parametrize("calls", sorted({calls for calls, _, _ in EXAMPLES} - {"openai"}))
def test_reasoning_comes_before_calls(calls: str) -> None:
    text, expected = next((text, expected) for name, text, expected in EXAMPLES if name == calls and expected[2])
    format = AnswerFormat(calls, "qwen3")
    for pieces in ([THINK + text], list(THINK + text)):
        assert shown(parse(format, pieces)) == (expected[0], "A cat, a hat.", expected[2])


def test_reasoning_may_begin_in_the_prompt_and_may_not_end() -> None:
    format = AnswerFormat(reasoning="qwen3")
    assert shown(parse(format, ["so</th", "ink>Yes"], begun=True)) == ("Yes", "so", [])
    assert shown(parse(format, ["so</thin"], begun=True)) == ("", "so</thin", [])
    assert shown(parse(format, ["so</think>Yes"])) == ("so</think>Yes", "", [])
    assert shown(parse(AnswerFormat(reasoning="mistral"), ["[THINK]so[/THINK]Yes"])) == ("Yes", "so", [])
    assert format.begins_reasoning("user</think><assistant><think>\n")
    assert not format.begins_reasoning("<assistant><think>\n\n</think>\n\n")
    assert AnswerFormat(reasoning="deepseek_r1").begins_reasoning("<assistant>")
    assert not AnswerFormat(reasoning="deepseek_r1").begins_reasoning("<think></think>")


def test_the_places_of_reasoning_are_told() -> None:
    text = "<think>ab</think>cd"
    parser = AnswerFormat(reasoning="qwen3").parser(CallsWanted(), is_reasoning_begun=False)
    parser.push(text)
    parser.finish()
    assert [text[start:end] for start, end in parser.reasoning_spans] == ["ab"]


def test_what_a_grammar_enforces_is_calls_in_every_format() -> None:
    array = CallsWanted(SCHEMAS, is_enforced=True, may_reason=False)
    text = f'[{{"name": "add", "parameters": {ADD_JSON}}},{{"name":"now","parameters":{{}}}}]'
    named = replace(array, function="write")
    for calls in CALL_FORMATS:
        format = AnswerFormat(calls, "deepseek_r1")
        assert shown(parse(format, list(text), array, begun=True)) == ("", "", [ADD, ("now", {})])
        assert shown(parse(format, list(WRITE_JSON), named, begun=True)) == ("", "", [WRITE])
        thinking = replace(named, may_reason=True)
        assert shown(parse(format, list(f"Hm.</think>{WRITE_JSON}"), thinking, begun=True)) == ("", "Hm.", [WRITE])


def test_an_answer_that_is_cut_inside_of_arguments_keeps_them() -> None:
    answer = parse(AnswerFormat("hermes"), ['<tool_call>{"name": "write", "arguments": {"text": "ab'])
    assert (answer.content, answer.calls[0].arguments) == ("", '{"text": "ab')
    broken = parse(AnswerFormat("hermes"), ['<tool_call>{"name": "write", "arguments": {"text": ]}</tool_call>'])
    assert (broken.calls[0].arguments, broken.content) == ('{"text": ', "]}</tool_call>")
    number = parse(AnswerFormat("hermes"), ['<tool_call>{"name": "add", "arguments": {"a": 01}}'])
    assert (number.calls[0].arguments, number.content) == ('{"a": 01', "}}")
    escape = parse(AnswerFormat("hermes"), ['<tool_call>{"name": "write", "arguments": {"text": "\\u00e9\\u00eg"}}'])
    assert (escape.calls[0].arguments, escape.content) == ('{"text": "\\u00e9\\u00e', 'g"}}')


_BEGINS = re.compile("<think>|\\[THINK]|<seed:think>")
FRAGMENTS = [
    *{part for _, text, _ in EXAMPLES for part in text.replace(">", ">\0").replace("{", "\0{").split("\0") if part},
    *(text for _, text, _ in EXAMPLES),
    *(
        "[THINK]",
        "[/THINK]",
        "<seed:think>",
        "</seed:think>",
        "<",
        "</",
        "[",
        "]",
        "{",
        "}",
        '"',
        "\\",
        "\n",
        " ",
        ",",
        ";",
        "(",
        ")",
        "'",
        "1e",
        "é",
        "<think>",
        "</think>",
    ),
    *('{"name": "add", "arguments": {', '"\\u00', '{"name": "add", "name": "now", "arguments": "{}"}', "<tool_call"),
]
FORMATS = [
    *(AnswerFormat(calls, "qwen3") for calls in sorted(CALL_FORMATS)),
    *(AnswerFormat("hermes", reasoning) for reasoning in sorted(REASONING_FORMATS)),
    AnswerFormat("openai", "openai_gptoss"),
]


@given(
    st.sampled_from(FORMATS),
    st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=6).map("".join),
    st.lists(st.integers(0, 400), max_size=12),
    st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_how_an_answer_is_split_changes_nothing_and_nothing_is_lost(
    format: AnswerFormat, text: str, cuts: list[int], is_begun: bool
) -> None:
    ends = [*sorted({cut for cut in cuts if cut < len(text)}), len(text)]
    pieces = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    whole = parse(format, [text], begun=is_begun)
    assert parse(format, pieces, begun=is_begun) == parse(format, list(text), begun=is_begun) == whole
    if not whole.calls and not whole.reasoning and "<|" not in text and not is_begun and not _BEGINS.search(text):
        assert whole.content == text


def test_a_template_tells_the_format() -> None:
    assert find_call_format("{% if tools %}<tool_call>{% endif %}") == "hermes"
    assert find_call_format("<tool_call><function=f><parameter=a>") == "qwen3_coder"
    assert find_call_format("[TOOL_CALLS]") == "mistral"
    assert find_call_format("{{ messages }}") == find_reasoning_format("{{ messages }}") == "none"
    assert find_reasoning_format("content.split('</think>')") == "qwen3"
    assert find_reasoning_format("<|channel|>final") == "openai_gptoss"


def test_the_work_is_linear_in_the_answer() -> None:
    """Each of these took minutes if text were read again after each failure."""
    for calls, text in (
        ("hermes", '<tool_call>{"a":"' * 6000),
        ("llama3_json", "{" + '"a":[[' * 3000),
        ("pythonic", "[add(" + "a=(" * 3000),
        ("qwen3_coder", "<tool_call><function=write><parameter=lines>" * 2000),
        ("glm45", "<tool_call>write<arg_key>" * 2000),
    ):
        parse(AnswerFormat(calls), [text])
