"""The texts with tools, JSON and thoughts: right, apart from what the template or a grammar gives, and as served."""

from __future__ import annotations

import json
import random
from itertools import islice

import pytest
from tokenizers import Tokenizer

from baton.demo.location import checkpoint_path
from baton.demo.training import records, thoughts
from baton.demo.training.agents import (
    MARKERS,
    agent_texts,
    calculated_texts,
    system_with_tools,
    tool_message,
    written_call,
)
from baton.demo.training.batches import agent_batches, encode
from baton.demo.training.corpus import Text
from baton.demo.training.skills import skills
from baton.demo.training.sums import is_held_out, result
from baton.demo.training.template import CHAT_TEMPLATE
from baton.demo.training.tools import Call, Tool
from baton.engine.text.answers.formats import AnswerFormat, ParserNames
from baton.engine.text.chat_template import ChatTemplate

INTEGER = {"type": "integer"}
ADD = Tool("add", {"a": "integer", "b?": "integer", "sign": "+|-"}, "Add two numbers.")
ADD_AS_SENT = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.\n\nArgs:\n    a: one of them",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "title": "A"},
                "b": {"anyOf": [INTEGER, {"type": "null"}]},
                "sign": {"enum": ["+", "-"]},
            },
            "required": ["a", "sign"],
        },
    },
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(checkpoint_path() / "tokenizer.json"))


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate({"default": CHAT_TEMPLATE}, {})


@pytest.fixture(scope="module")
def chats() -> list[Text]:
    return list(islice(agent_texts(9), 1500))


def test_the_checkpoint_has_this_template_and_its_parsers_are_found() -> None:
    assert ChatTemplate.from_folder(checkpoint_path()).text == CHAT_TEMPLATE
    assert ParserNames().format_of(CHAT_TEMPLATE) == AnswerFormat("hermes", "qwen3")


def test_training_sees_calls_and_results_as_the_template_writes_them(template: ChatTemplate) -> None:
    call = Call(ADD, {"a": 17, "sign": "+"}, "42")
    learned = [
        system_with_tools([ADD], "Be kind."),
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": f"{written_call(call)}\n{written_call(call)}"},
        tool_message("42"),
        {"role": "assistant", "content": "It is 42."},
    ]
    called = {"type": "function", "function": {"name": "add", "arguments": {"a": 17, "sign": "+"}}}
    sent: list[dict[str, object]] = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [called, called]},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "It is 42."},
    ]
    written = "".join(f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in learned)
    assert template.render(sent, add_generation_prompt=False, tools=[ADD_AS_SENT]) == written


def test_without_tools_and_thinking_a_chat_is_written_as_it_always_was(template: ChatTemplate) -> None:
    chat = [{"role": role, "content": f" {role}\n"} for role in ("system", "user", "assistant", "user")]
    turns = "".join(f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in chat)
    assert template.render(chat) == f"{turns}<|im_start|>assistant\n"


def test_thinking_begins_in_the_prompt_and_earlier_thoughts_are_left_out(template: ChatTemplate) -> None:
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello!"}]
    prompt = template.render([*chat, chat[0]], enable_thinking=True)
    assert prompt.endswith("<|im_start|>assistant\n<think>\n")
    assert "Hello!" in prompt
    assert "hm" not in prompt


def test_tools_of_odd_schemas_are_written_all_the_same(template: ChatTemplate) -> None:
    odd = {"a": True, "b": {"$ref": "#"}, "c": {"type": ["string", "null"]}}
    functions = [{"name": "bare"}, {"name": "odd", "parameters": {"type": "object", "properties": odd}}]
    prompt = template.render([], tools=[{"type": "function", "function": function} for function in functions])
    assert "<tools>\nbare()\nodd(a?: any, b?: any, c?: any)\n</tools>" in prompt


def test_each_marker_is_one_token(tokenizer: Tokenizer) -> None:
    assert [len(tokenizer.encode(marker).ids) for marker in MARKERS] == [1] * len(MARKERS)


def test_what_is_given_does_not_count(tokenizer: Tokenizer) -> None:
    answer = {"role": "assistant", "content": '{"a": 1}', "given": "{"}
    ids, counted = encode(tokenizer, Text(({"role": "user", "content": "Hi"}, answer)))
    predicted = [token for token, counts in zip(ids, counted, strict=True) if counts]
    assert tokenizer.decode(predicted, skip_special_tokens=False) == 'a": 1}<|im_end|>'


def test_what_is_given_begins_its_message(chats: list[Text]) -> None:
    messages = [message for chat in chats for message in chat.messages if "given" in message]
    assert len(messages) > 300
    assert all(message["content"].startswith(message["given"]) for message in messages)


def test_of_what_is_calculated_the_last_value_alone_counts(tokenizer: Tokenizer) -> None:
    for text in islice(calculated_texts(2), 200):
        last = list(json.loads(text.messages[1]["content"]).values())[-1]
        ids, counted = encode(tokenizer, text)
        predicted = [token for token, counts in zip(ids, counted, strict=True) if counts]
        assert tokenizer.decode(predicted, skip_special_tokens=False) == f" {json.dumps(last)}}}<|im_end|>"


def test_chats_depend_on_the_seed_alone(chats: list[Text], tokenizer: Tokenizer) -> None:
    assert list(islice(agent_texts(9), 100)) == chats[:100] != list(islice(agent_texts(8), 100))
    (ids, _), (again, _) = (next(agent_batches(tokenizer, 3)) for _ in range(2))
    assert ids.equal(again)


def test_calls_fit_the_tools_that_are_offered() -> None:
    rng = random.Random(3)
    for skill in (skill for _ in range(150) for skill in skills(rng)):
        for call in (call for calls in skill.task(rng).rounds for call in calls):
            names = {name.rstrip("?") for name in call.tool.parameters}
            required = {name for name in call.tool.parameters if not name.endswith("?")}
            assert call.tool in skill.tools
            assert required <= set(call.arguments) <= names


def test_answers_of_sums_are_right_and_none_is_held_out() -> None:
    rng = random.Random(4)
    for skill in (skill for _ in range(600) for skill in skills(rng)):
        first, _, rest = skill.task(rng).answer.partition(" ")
        sign, _, rest = rest.partition(" ")
        second, equals, found = rest.rstrip(".").partition(" = ")
        if equals and first.isdigit() and second.isdigit():
            assert result(int(first), sign, int(second)) == int(found)
            assert not is_held_out(int(first), sign, int(second))


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((17, "+", 25), "7 + 5 = 12, 2 and 1. 1 + 2 + 1 = 4. So 42."),
        ((123, "+", 9), "3 + 9 = 12, 2 and 1. 2 + 0 + 1 = 3. 1 + 0 = 1. So 132."),
        ((61, "-", 27), "1 - 7 = -6, 4 and 1. 6 - 2 - 1 = 3. So 34."),
        ((3, "-", 8), "8 is more than 3. 8 - 3 = 5. So -5."),
        ((7, "*", 8), "7 * 8 is in the times tables. So 56."),
    ],
)
def test_a_sum_is_worked_out_column_by_column(numbers: tuple[int, str, int], expected: str) -> None:
    assert thoughts.working(*numbers) == expected


def test_records_are_written_as_json() -> None:
    rng = random.Random(5)
    for told in (records.record(rng) for _ in range(300)):
        assert json.loads(told.written(rng)) == told.values
        assert told.values
        assert told.said
