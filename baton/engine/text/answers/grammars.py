"""The grammar of a whole answer: reasoning, then text, a structure or calls.

A structure or the arguments of a call obey a grammar; what stands before them is free. Owns how such an answer is
written down, for the formats of calls that have a marker of their own before JSON. Does not know whether it can be
compiled, nor which tokens there are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from baton.engine.text.answers import json_calls as json_format
from baton.engine.text.answers.lark import (
    SPACE,
    MarkerForm,
    any_tokens,
    form_of,
    free_text,
    has_form,
    json_by,
    marker_form,
    quoted,
    until,
)
from baton.engine.text.answers.thinking import Tags
from baton.wire.grammar import Grammar

_REFERENCE = "$ref"
_DATA = ("const", "enum", "default", "examples")
Functions = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """The form that an answer may have.

    `reasoning`: the tags around thoughts, which may stand first, and have to where it `is_reasoning_begun` by the
    prompt. They have `max_reasoning_tokens` at most, if the tag that ends them is a token; None: any number.
    `structure`: the form of the text behind them; None: any text. `functions`: the schemas of the arguments of
    functions that may be called, instead of a structure or among any text. `call_format` says how, and `is_one_call`
    how often.
    """

    reasoning: Tags | None = None
    is_reasoning_begun: bool = False
    max_reasoning_tokens: int | None = None
    structure: Grammar | None = None
    functions: Functions = field(default_factory=dict)
    call_format: str = ""
    is_one_call: bool = False

    @property
    def may_reason(self) -> bool:
        """Whether reasoning may stand first."""
        return self.reasoning is not None

    @property
    def can_be_grammar(self) -> bool:
        """Whether the structure can stand behind something else."""
        return self.structure is None or has_form(self.structure)

    def grammar(self, token_of: Callable[[str], int | None]) -> Grammar:
        """The grammar of all of it. Raises `InvalidRequest` when it is too long."""
        marker = marker_form(token_of)
        first, more = self._before(marker)
        body, rules = self._body(marker) if self.structure or self.functions else (self._anything(marker), [])
        return Grammar.lark("\n".join((f"start: {first} {body}", *rules, *more, SPACE)) + "\n")

    def _before(self, marker: MarkerForm) -> tuple[str, list[str]]:
        if self.reasoning is None:
            return "", []
        thought = until("thought", self.reasoning.end, marker, max_tokens=self.max_reasoning_tokens)
        begun = "thought SPACE?"
        return (begun if self.is_reasoning_begun else f"(SPACE? {marker(self.reasoning.begin)} {begun})?"), thought

    def _anything(self, marker: MarkerForm) -> str:
        """What stands behind reasoning, or in its place, in an answer of which nothing else is asked."""
        may_begin = self.reasoning is not None and not self.is_reasoning_begun
        return any_tokens(marker(self.reasoning.begin)) if self.reasoning is not None and may_begin else any_tokens()

    def _body(self, marker: MarkerForm) -> tuple[str, list[str]]:
        structure = None if self.structure is None else f"structure: {form_of(self.structure)}"
        if structure and not self.functions:
            return "structure", [structure]
        form = CALL_FORMS[self.call_format]
        repeated = "" if self.is_one_call else "+"
        end = f" SPACE? {marker(form.end)}" if form.end else ""
        call = f"call: SPACE? ({form.call(self.functions, marker)}){end}"
        if structure:
            around = " | ".join(("SPACE", *map(marker, form.around)))
            begun = f"(({around})* {marker(form.begin)} call){repeated} ({around})*"
            return f"(structure | {begun})", [structure, call]
        repeated = "?" if self.is_one_call else "*"
        tokens = [marker(text) for text in form.around if not marker(text).startswith('"')]
        free = f"(FREE | {' | '.join(tokens)})*" if tokens else "FREE?"
        return f"(before call){repeated} {free}", [
            *until("before", form.begin, marker, tokens), call, free_text("FREE", form.begin)
        ]  # fmt: skip


class CallForm(NamedTuple):
    """A format of calls: `begin`, what `call` makes of functions, and `end`. `around`: markers between calls."""

    begin: str
    call: Callable[[Functions, MarkerForm], str]
    end: str = ""
    around: Sequence[str] = ()


def moved_references(schema: Any, place: str) -> Any:
    """`schema` with its references to itself as they are when it stands at `place` of another schema."""
    if isinstance(schema, list):
        return [moved_references(item, place) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        name: place + member[1:]
        if name == _REFERENCE and isinstance(member, str) and member.startswith("#")
        else member
        if name in _DATA
        else moved_references(member, place)
        for name, member in schema.items()
    }


def _object(functions: Functions) -> dict[str, Any]:
    return {
        "anyOf": [
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": moved_references(schema, place)},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for number, (name, schema) in enumerate(functions.items())
            for place in [f"#/anyOf/{number}/properties/arguments"]
        ]
    }


def _hermes(functions: Functions, marker: MarkerForm) -> str:
    return json_by(_object(functions))


def _mistral(functions: Functions, marker: MarkerForm) -> str:
    arguments = marker(json_format.MISTRAL_ARGUMENTS)
    named = [f"{quoted(name)} {arguments} {json_by(schema)}" for name, schema in functions.items()]
    calls = {"type": "array", "items": moved_references(_object(functions), "#/items"), "minItems": 1}
    return " | ".join((json_by(calls), *named))


def _deepseek(functions: Functions, marker: MarkerForm) -> str:
    separator, fence, end = marker(json_format.DEEPSEEK_SEPARATOR), quoted("```json"), quoted("```")
    calls: list[str] = []
    for name, schema in functions.items():
        calls.append(f'"function" {separator} {quoted(name)} SPACE {fence} SPACE {json_by(schema)} SPACE {end}')
        calls.append(f"{quoted(name)} {separator} {json_by(schema)}")
    return " | ".join(calls)


_DEEPSEEK = CallForm(
    json_format.DEEPSEEK_CALL,
    _deepseek,
    json_format.DEEPSEEK_CALL_END,
    (json_format.DEEPSEEK_CALLS, json_format.DEEPSEEK_CALLS_END),
)
CALL_FORMS: Mapping[str, CallForm] = {
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "hermes": CallForm(json_format.TOOL_CALL, _hermes, json_format.TOOL_CALL_END),
    "mistral": CallForm(json_format.MISTRAL_CALLS, _mistral),
}
"""Formats in which a grammar can enforce the arguments of a call that the model has begun."""
