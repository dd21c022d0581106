"""The packaged demo checkpoint answers as docs/guides/demo_model.md promises; its texts come from the seed alone."""

from __future__ import annotations

import json
import re
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from baton.demo.location import checkpoint_path
from baton.demo.training.corpus import texts
from baton.demo.training.sums import is_held_out
from baton.offline.llm import LLM
from baton.wire.sampling import SamplingParams

MAX_CHECKPOINT_BYTES = 8_000_000
TURN_END = "<|im_end|>"
GREEDY = SamplingParams(temperature=0.0, max_tokens=300)
PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "demo_model.md"
TABLE = PAGE.read_text().split("| prompt | answer |\n")[1]
PROMISES = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", TABLE, re.MULTILINE)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(checkpoint_path())


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request: pytest.FixtureRequest) -> LLM:
    return LLM(dtype=request.param, num_threads=1, num_blocks=64)


def reply(model: LLM, tokenizer: PreTrainedTokenizerBase, *said: str, system: str | None = None) -> tuple[str, bool]:
    """Return the answer to the last line of `said` (user and assistant by turns) and whether it stopped by itself."""
    roles = ("user", "assistant")
    messages = [{"role": roles[turn % 2], "content": line} for turn, line in enumerate(said)]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return continued(model, tokenizer, messages)


def continued(
    model: LLM,
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    begun: str = "",
    **variables: Any,
) -> tuple[str, bool]:
    """Return how an answer that begins with `begun` goes on, and whether it stopped by itself."""
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **variables) + begun
    (found,) = model.generate([tokenizer(prompt)["input_ids"]], GREEDY)
    stopped = found.token_ids[-1] == tokenizer.convert_tokens_to_ids(TURN_END)
    return tokenizer.decode(found.token_ids, skip_special_tokens=True), stopped


@pytest.mark.parametrize(("question", "promised"), PROMISES)
def test_every_answer_of_the_page_is_given_word_for_word(
    model: LLM, tokenizer: PreTrainedTokenizerBase, question: str, promised: str
) -> None:
    assert reply(model, tokenizer, question) == (promised, True)


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("Hello!", "Hello!"),
        ("hi", "Hello!"),
        ("How are you?", "I am well"),
        ("Who are you?", "demo model of Baton"),
        ("What is Baton?", "prefill node"),
        ("What can you do?", "short stories"),
        ("What is 2+2?", "2 + 2 = 4."),
        ("how much is 7 times 8", "7 * 8 = 56."),
        ("what is 30 - 4", "30 - 4 = 26."),
        ("What is the capital of France?", "The capital of France is Paris."),
        ("How many days are in a week?", "7 days"),
        ("What colour is the sky?", "blue"),
        ("Count from 1 to 10.", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10."),
        ("Thank you", "welcome"),
        ("Bye!", "Goodbye!"),
        ("Explain quantum physics to me.", "I do not know that."),
        ("How do I fix a bicycle chain?", "I do not know that."),
    ],
)
def test_canonical_question_is_answered_and_the_answer_stops(
    model: LLM, tokenizer: PreTrainedTokenizerBase, question: str, expected: str
) -> None:
    answer, stopped = reply(model, tokenizer, question)
    assert expected in answer
    assert stopped


def test_story_is_about_what_was_asked_and_ends(model: LLM, tokenizer: PreTrainedTokenizerBase) -> None:
    story, stopped = reply(model, tokenizer, "Tell me a story about a fox.")
    assert "fox" in story
    assert 50 <= len(story.split()) <= 180
    assert story[-1] in '."'
    assert stopped


def test_name_said_earlier_is_remembered(model: LLM, tokenizer: PreTrainedTokenizerBase) -> None:
    greeting, _ = reply(model, tokenizer, "My name is Ana.")
    answer, _ = reply(model, tokenizer, "My name is Ana.", greeting, "What is my name?")
    assert answer == "Your name is Ana."


def test_system_message_does_not_disturb(model: LLM, tokenizer: PreTrainedTokenizerBase) -> None:
    answer, _ = reply(model, tokenizer, "What is the capital of Italy?", system="You are a helpful assistant.")
    assert answer == "The capital of Italy is Rome."


@pytest.mark.parametrize(
    ("question", "begun", "expected"),
    [
        ("What is the capital of France?", '{"name": "', 'France", "capital": "Paris"}'),
        ("What is the capital of France?", '{"capital": "', 'Paris"}'),
        ("What is 17 + 25?", '{"result":', " 42}"),
        ("What is 17 + 25?", '{"answer": "', '17 + 25 = 42."}'),
        ("Ana is 30 years old.", '{"name": "', 'Ana", "age": 30}'),
        ("Is 7 even?", '{"number": 7, "is_even":', " false}"),
    ],
)
def test_values_fit_to_what_a_schema_has_begun(
    model: LLM, tokenizer: PreTrainedTokenizerBase, question: str, begun: str, expected: str
) -> None:
    assert continued(model, tokenizer, [{"role": "user", "content": question}], begun) == (expected, True)


def function(name: str, **parameters: str) -> dict[str, Any]:
    """A tool as a request has it; all parameters are required."""
    properties = {name: {"type": kind} for name, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}


CLOCK = [function("get_current_time")]
CALCULATOR = [function("calculate", expression="string")]
ARITHMETIC = [function("add", a="integer", b="integer"), function("multiply", a="integer", b="integer")]


@pytest.mark.parametrize(
    ("tools", "question", "called", "arguments", "said", "expected"),
    [
        (CLOCK, "What time is it?", "get_current_time", {}, "14:05", "It is 14:05."),
        (CALCULATOR, "What is 17 * 25?", "calculate", {"expression": "17 * 25"}, "425", "17 * 25 = 425."),
        (ARITHMETIC, "What is 17 + 25?", "add", {"a": 17, "b": 25}, "42", "17 + 25 = 42."),
        (ARITHMETIC, "What is 17 times 25?", "multiply", {"a": 17, "b": 25}, "425", "17 * 25 = 425."),
    ],
)
def test_a_tool_is_called_and_its_result_used(
    model: LLM,
    tokenizer: PreTrainedTokenizerBase,
    tools: list[dict[str, Any]],
    question: str,
    called: str,
    arguments: dict[str, Any],
    said: str,
    expected: str,
) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    text, _ = continued(model, tokenizer, messages, tools=tools)
    assert text.startswith("<tool_call>\n")
    assert text.endswith("\n</tool_call>")
    assert json.loads(text[len("<tool_call>") : -len("</tool_call>")]) == {"name": called, "arguments": arguments}
    call = {"type": "function", "function": {"name": called, "arguments": arguments}}
    messages += [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": said}]
    assert continued(model, tokenizer, messages, tools=tools) == (expected, True)


def test_tools_are_left_alone_where_they_are_no_help(model: LLM, tokenizer: PreTrainedTokenizerBase) -> None:
    question = [{"role": "user", "content": "What is the capital of Italy?"}]
    assert continued(model, tokenizer, question, tools=CLOCK) == ("The capital of Italy is Rome.", True)


def test_it_thinks_before_a_sum_when_asked_to(model: LLM, tokenizer: PreTrainedTokenizerBase) -> None:
    question = [{"role": "user", "content": "What is 17 + 25?"}]
    thought = "7 + 5 = 12, 2 and 1. 1 + 2 + 1 = 4. So 42.\n</think>\n\n17 + 25 = 42."
    assert continued(model, tokenizer, question, enable_thinking=True) == (thought, True)
    assert continued(model, tokenizer, question) == ("17 + 25 = 42.", True)


def test_plain_text_is_continued_to_its_end(model: LLM, tokenizer: PreTrainedTokenizerBase) -> None:
    (found,) = model.generate("Once upon a time", GREEDY)
    assert tokenizer.decode(found.token_ids[-1]) == "<|endoftext|>"
    assert len(found.text.split()) >= 46


def test_checkpoint_is_small() -> None:
    assert sum(file.stat().st_size for file in checkpoint_path().iterdir()) <= MAX_CHECKPOINT_BYTES


def test_digits_are_tokens_of_their_own(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.tokenize("1234") == ["1", "2", "3", "4"]


def test_any_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "Zażółć 你好 \U0001f98a\n\ttabs, 3.14 and  spaces"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_texts_depend_on_the_seed_alone() -> None:
    first, again, other = (list(islice(texts(seed), 300)) for seed in (5, 5, 6))
    assert first == again
    assert first != other


def test_held_out_sums_are_never_written() -> None:
    held_out = {
        f"{first} {sign} {second} ="
        for sign in "+-"
        for first in range(100)
        for second in range(100)
        if is_held_out(first, sign, second)
    }
    written = " ".join(message["content"] for text in islice(texts(9), 3000) for message in text.messages)
    assert len(held_out) > 1000
    assert not [line for line in held_out if f" {line}" in written]
