"""Grammars of whole answers: free text up to a marker, behind which everything is valid, whether markers are tokens or
text; and the parser finds in such answers what the grammar has enforced."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tokenizers
from llguidance import LLTokenizer

from baton.engine.structured.vocabulary import Vocabulary
from baton.engine.text.answers import harmony, json_calls
from baton.engine.text.answers.deltas import join_answer
from baton.engine.text.answers.formats import AnswerFormat, CallsWanted
from baton.engine.text.answers.grammars import AnswerShape
from baton.engine.text.answers.harmony_grammar import HarmonyShape
from baton.engine.text.answers.thinking import Tags
from baton.engine.text.tokenizer import Tokenizer
from baton.wire.errors import InvalidRequest
from baton.wire.grammar import MAX_GRAMMAR_CHARS, Grammar

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"$ref": "#/$defs/N"}, "on": {"type": "boolean"}},
    "required": ["x"],
    "additionalProperties": False,
    "$defs": {"N": {"type": "integer", "minimum": 0, "maximum": 99}},
}
FUNCTIONS = {"double": SCHEMA, "log": {"type": "object"}}
THINK = Tags("<think>", "</think>")
STRUCTURE = Grammar.json_schema(SCHEMA)
SEPARATOR = json_calls.DEEPSEEK_SEPARATOR
DEEPSEEK_BEGIN = json_calls.DEEPSEEK_CALLS + json_calls.DEEPSEEK_CALL
DEEPSEEK_END = json_calls.DEEPSEEK_CALL_END + json_calls.DEEPSEEK_CALLS_END
MARKERS = (
    *THINK,
    json_calls.TOOL_CALL,
    json_calls.TOOL_CALL_END,
    json_calls.MISTRAL_CALLS,
    json_calls.MISTRAL_ARGUMENTS,
    json_calls.DEEPSEEK_CALLS,
    json_calls.DEEPSEEK_CALL,
    SEPARATOR,
    json_calls.DEEPSEEK_CALL_END,
    json_calls.DEEPSEEK_CALLS_END,
    harmony.START,
    harmony.CHANNEL,
    harmony.CONSTRAIN,
    harmony.MESSAGE,
    harmony.END,
)
HERMES = '<tool_call>\n{"name": "double", "arguments": {"x": 4}}\n</tool_call>'
DEEPSEEK = f'{DEEPSEEK_BEGIN}function{SEPARATOR}double\n```json\n{{"x": 4}}\n```{DEEPSEEK_END}'
DEEPSEEK_31 = f'{DEEPSEEK_BEGIN}double{SEPARATOR}{{"x": 4}}{DEEPSEEK_END}'
HARMONY_THOUGHT = '<|channel|>analysis<|message|>A {sum}, "4".<|end|><|start|>assistant'
HARMONY_CALL = '<|channel|>commentary to=functions.double <|constrain|>json<|message|>{"x": 4}'
HARMONY_FINAL = "<|channel|>final<|message|>"
HARMONY = HarmonyShape(functions=FUNCTIONS)
MISTRAL = '[TOOL_CALLS][{"name": "double", "arguments": {"x": 4}}]'
MISTRAL_11 = '[TOOL_CALLS]double[ARGS]{"x": 4}'


class Model:
    """A vocabulary, and what it makes of texts. `kind`: whether markers are text, tokens, or special tokens."""

    def __init__(self, tokenizer: Tokenizer, kind: str) -> None:
        self.kind = kind
        backend = tokenizers.Tokenizer.from_str(tokenizer.definition())
        if kind == "special":
            backend.add_special_tokens(list(MARKERS))
        elif kind == "tokens":
            backend.add_tokens(list(MARKERS))
        self.tokenizer = Tokenizer(backend)
        tokens = LLTokenizer(backend.to_str(), eos_token=sorted(tokenizer.eos_token_ids))
        self.vocabulary = Vocabulary(tokens, -(-tokens.vocab_size // 32) * 4)
        self.eos = max(tokenizer.eos_token_ids)

    def accepts(self, shape: AnswerShape | HarmonyShape, text: str) -> bool:
        """Whether the answer may be `text` and end there."""
        matcher = self.vocabulary.compile(shape.grammar(self.tokenizer.added_token_id))
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return bool(matcher.consume_tokens(ids)) and matcher.is_accepting()

    def walk(self, shape: AnswerShape | HarmonyShape, text: str, chance: random.Random) -> str:
        """An answer that begins with `text` and goes on with random tokens, to its end or for a while."""
        matcher = self.vocabulary.compile(shape.grammar(self.tokenizer.added_token_id))
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        assert matcher.consume_tokens(ids)
        while len(ids) < 400 and not matcher.is_stopped():
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            ids.append(self.eos if bits[self.eos] else chance.choice(np.flatnonzero(bits).tolist()))
            matcher.consume_token(ids[-1])
        return self.tokenizer.decode([token_id for token_id in ids if token_id != self.eos], skip_special_tokens=False)


@pytest.fixture(params=["text", "tokens", "special"], scope="module")
def model(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> Model:
    return Model(tokenizer, request.param)


def _shape(**members: Any) -> AnswerShape:
    return replace(AnswerShape(functions=FUNCTIONS, call_format="hermes"), **members)


def test_reasoning_is_free_and_a_structure_follows(model: Model) -> None:
    optional = AnswerShape(THINK, structure=STRUCTURE)
    begun = replace(optional, is_reasoning_begun=True)
    for shape, text, is_good in (
        (optional, '{"x": 4}', True),
        (optional, '<think>\nA {sum}, <b>"4"</think>\n\n{"x": 4}', True),
        (optional, '<think></think>{"x": 4}', True),
        (optional, 'A sum.</think>{"x": 4}', False),
        (optional, '<think>A sum.</think>{"x": "4"}', False),
        (optional, "<think>A sum.", False),
        (optional, "<think>A sum.</think>", False),
        (begun, 'A sum.</think>\n{"x": 4}', True),
        (begun, '</think>{"x": 4}', True),
        (begun, '{"x": 4}', False),
    ):
        assert model.accepts(shape, text) is is_good, text


@pytest.mark.parametrize("budget", [0, 1, 7])
@pytest.mark.parametrize("structure", [None, STRUCTURE])
def test_reasoning_ends_where_its_budget_does(model: Model, budget: int, structure: Grammar | None) -> None:
    shape = AnswerShape(THINK, is_reasoning_begun=True, max_reasoning_tokens=budget, structure=structure)
    end = model.tokenizer.encode(THINK.end, add_special_tokens=False)
    thought = model.tokenizer.encode("one two three four five", add_special_tokens=False)
    assert len(thought) > budget
    matcher = model.vocabulary.compile(shape.grammar(model.tokenizer.added_token_id))
    if model.kind == "text":  # nothing ends it
        assert matcher.consume_tokens(thought)
        return
    assert matcher.try_consume_tokens(thought) == budget
    assert matcher.compute_ff_tokens() == end
    assert matcher.consume_tokens([*end, *model.tokenizer.encode('{"x": 4}', add_special_tokens=False)])
    assert matcher.is_accepting()
    # another node goes on from any place
    for place in range(budget):
        resumed = model.vocabulary.compile(shape.grammar(model.tokenizer.added_token_id))
        assert resumed.consume_tokens(thought[:place])
        assert resumed.try_consume_tokens(thought[place:]) == budget - place


def test_a_budget_of_reasoning_leaves_the_rest_of_an_answer_free(model: Model) -> None:
    optional = AnswerShape(THINK, max_reasoning_tokens=9)
    for text in ("", "Just text.", f"A call: {HERMES}", "<think>Hm.</think>So: <think> is a tag.", HARMONY_CALL):
        assert model.accepts(optional, text), text
    assert model.accepts(replace(optional, is_reasoning_begun=True), f"Hm.</think>{HERMES}")
    assert model.accepts(optional, f"<think>{'very ' * 10}</think>4") is (model.kind == "text")


def test_thoughts_of_harmony_have_a_budget_too(model: Model) -> None:
    shape = replace(HARMONY, structure=STRUCTURE, max_reasoning_tokens=60)
    final = f'{HARMONY_FINAL}{{"x": 4}}'
    assert model.accepts(shape, HARMONY_THOUGHT + final)
    assert model.accepts(shape, HARMONY_THOUGHT * 2 + final)
    assert not model.accepts(shape, HARMONY_THOUGHT * 3 + final)
    at_once = replace(shape, max_reasoning_tokens=1)
    assert model.accepts(at_once, final)
    assert not model.accepts(at_once, HARMONY_THOUGHT + final)
    assert model.accepts(shape, HARMONY_THOUGHT.replace("A", "A" * 200) + final) is (model.kind == "text")


@pytest.mark.parametrize(
    ("structure", "good", "bad"),
    [
        (Grammar.regex("[0-9]+/[ab]\\/\n?"), "12/a/", "x"),
        (Grammar.choice(["yes", 'say "no"\n']), 'say "no"\n', "no"),
        (Grammar.json_object(), '{"a": [1, {"b": "/*//"}]}', "[]"),
    ],
)
def test_structures_of_other_kinds_follow_too(model: Model, structure: Grammar, good: str, bad: str) -> None:
    shape = AnswerShape(THINK, structure=structure)
    assert model.accepts(shape, f"<think>Well.</think>{good}")
    assert model.accepts(shape, good)
    assert not model.accepts(shape, f"<think>Well.</think>{bad}")
    assert not AnswerShape(THINK, structure=Grammar.ebnf('start: "a"')).can_be_grammar


@pytest.mark.parametrize(("call_format", "call"), [
    ("hermes", HERMES), ("mistral", MISTRAL), ("mistral", MISTRAL_11), ("deepseek_v3", DEEPSEEK),
    ("deepseek_v31", DEEPSEEK_31),
])  # fmt: skip
def test_a_call_that_has_begun_is_valid(model: Model, call_format: str, call: str) -> None:
    shape = _shape(call_format=call_format)
    for text in ("", "Just text, {} and <b>.", call, f"Let me see. {call}"):
        assert model.accepts(shape, text), text
    assert model.accepts(replace(shape, reasoning=THINK), f"<think>A {MARKERS[0][1:]} {{x}}</think>\nSo: {call}")
    for old, new in (("double", "triple"), ('"x"', '"y"'), ("4", '"4"'), ("4", "100")):
        assert not model.accepts(shape, f"Let me see. {call.replace(old, new)}"), new
    assert not model.accepts(shape, call[: len(call) // 2])
    assert model.accepts(replace(shape, is_one_call=True), call)
    structured = replace(shape, structure=STRUCTURE)
    assert model.accepts(structured, call)
    assert model.accepts(structured, '{"x": 4}')
    assert not model.accepts(structured, "Let me see.")


def test_there_are_several_calls_unless_only_one_is_wanted(model: Model) -> None:
    for structure in (None, STRUCTURE):
        shape = _shape(structure=structure, reasoning=THINK)
        assert model.accepts(shape, f"<think>Hm.</think>{HERMES}\n{HERMES}")
        assert not model.accepts(replace(shape, is_one_call=True), f"{HERMES}\n{HERMES}")


def test_a_function_that_is_not_strict_takes_any_object(model: Model) -> None:
    assert model.accepts(_shape(), '<tool_call>{"name": "log", "arguments": {"a": [1, "b"]}}</tool_call>')
    assert not model.accepts(_shape(), '<tool_call>{"name": "log", "arguments": []}</tool_call>')


@pytest.mark.parametrize(("call_format", "begun"), [
    ("hermes", "Well. <tool_call>"), ("mistral", "[TOOL_CALLS]"), ("deepseek_v3", json_calls.DEEPSEEK_CALL),
])  # fmt: skip
def test_the_parser_finds_valid_calls_in_whatever_a_model_writes(model: Model, call_format: str, begun: str) -> None:
    chance = random.Random(5)
    functions = {"double": SCHEMA, "other": SCHEMA}
    shape = _shape(call_format=call_format, functions=functions, is_one_call=True)
    num_whole = 0
    for _ in range(8):
        text = model.walk(shape, begun, chance)
        parser = AnswerFormat(call_format).parser(CallsWanted(functions), is_reasoning_begun=False)
        answer = join_answer([*parser.push(text), *parser.finish()])
        for call in answer.calls.values():
            assert call.name in functions
            found = json.loads(call.arguments)
            assert 0 <= found.pop("x") <= 99
            assert found in ({}, {"on": True}, {"on": False})
            num_whole += 1
    assert num_whole >= 4


def test_a_call_in_harmony_is_valid_and_anything_may_be_said_before(model: Model) -> None:
    remark = HARMONY_THOUGHT.replace("analysis", "commentary")
    by_template = ' to=functions.double<|channel|>commentary json<|message|>{"x": 4}'
    for call in (HARMONY_CALL, by_template, HARMONY_CALL.replace(" <|constrain|>json", "")):
        for before in ("", HARMONY_THOUGHT, f"{HARMONY_THOUGHT}{remark}"):
            assert model.accepts(HARMONY, before + call), before + call
        for old, new in (("double", "triple"), ('"x"', '"y"'), ("4", '"4"'), ("4", "100")):
            assert not model.accepts(HARMONY, call.replace(old, new)), new
    assert model.accepts(HARMONY, HARMONY_CALL.replace("double", "log").replace("x", "any"))
    assert model.accepts(HARMONY, f"{HARMONY_THOUGHT}{HARMONY_FINAL}Just text, {{}}.")
    assert not model.accepts(HARMONY, HARMONY_THOUGHT)
    assert not model.accepts(replace(HARMONY, may_reason=False), HARMONY_THOUGHT + HARMONY_CALL)
    must_call = replace(HARMONY, must_call=True)
    assert model.accepts(must_call, HARMONY_THOUGHT + HARMONY_CALL)
    assert not model.accepts(must_call, f"{HARMONY_FINAL}Just text.")


def test_a_structure_in_harmony_is_the_final_message(model: Model) -> None:
    shape = HarmonyShape(STRUCTURE)
    for begun in (HARMONY_FINAL, HARMONY_THOUGHT + HARMONY_FINAL, "<|channel|>final <|constrain|>json<|message|>"):
        assert model.accepts(shape, f'{begun}{{"x": 4}}')
        assert not model.accepts(shape, f'{begun}{{"x": "4"}}')
    assert not model.accepts(shape, '{"x": 4}')
    assert not model.accepts(shape, HARMONY_CALL)
    assert model.accepts(replace(shape, functions=FUNCTIONS), HARMONY_CALL)


def test_the_parser_finds_in_harmony_what_the_grammar_has_enforced(model: Model) -> None:
    chance = random.Random(6)
    shape = HarmonyShape(functions={"double": SCHEMA}, must_call=True)
    num_whole = 0
    for _ in range(8):
        text = model.walk(shape, HARMONY_THOUGHT + "<|channel|>commentary to=", chance)
        parser = AnswerFormat("openai", "openai_gptoss").parser(
            CallsWanted({"double": SCHEMA}, is_enforced=True), is_reasoning_begun=False
        )
        answer = join_answer([*parser.push(text), *parser.finish()])
        (call,) = answer.calls.values()
        assert (call.name, answer.reasoning, answer.content) == ("double", 'A {sum}, "4".', "")
        num_whole += 0 <= json.loads(call.arguments)["x"] <= 99
    assert num_whole == 8


def test_what_is_too_long_is_an_error(model: Model) -> None:
    schema = {"enum": ["x" * (MAX_GRAMMAR_CHARS // 2)]}
    with pytest.raises(InvalidRequest):
        _shape(functions={"a": schema, "b": schema, "c": schema}).grammar(model.tokenizer.added_token_id)
