"""The formats of answers by the names that vLLM gives their parsers, and which of them a chat template speaks of.

Owns the two tables. A format of calls is written by one family of models; one of reasoning is a pair of tags, or
harmony, which does both. A parser of an answer is put together here from what its request needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from baton.engine.text.answers import harmony as harmony_format
from baton.engine.text.answers import json_calls as json_format
from baton.engine.text.answers import pythonic as pythonic_format
from baton.engine.text.answers import tagged_calls as tagged_format
from baton.engine.text.answers.reader import AnswerParser, Reader, Steps
from baton.engine.text.answers.thinking import Tags, thinking
from baton.engine.text.answers.typed_values import Schemas

AUTO, NONE = "auto", "none"
_HARMONY = "openai"
_HARMONY_REASONING = "openai_gptoss"

_CallParser = Callable[[Reader, Schemas], Steps[None]]


def _alone(parse: Callable[[Reader], Steps[None]]) -> _CallParser:
    return lambda reader, _: parse(reader)


_HERMES = _alone(json_format.hermes)
_DEEPSEEK = _alone(json_format.deepseek)
CALL_FORMATS: Mapping[str, _CallParser] = {
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "glm45": tagged_format.glm,
    "glm47": tagged_format.glm,
    "hermes": _HERMES,
    "llama3_json": json_format.llama3_json,
    "llama4_json": json_format.llama3_json,
    "llama4_pythonic": pythonic_format.pythonic,
    "mistral": _alone(json_format.mistral),
    _HARMONY: _alone(harmony_format.harmony),
    "pythonic": pythonic_format.pythonic,
    "qwen3_coder": tagged_format.qwen3_coder,
    "qwen3_xml": tagged_format.qwen3_coder,
}
"""What finds calls among content. The schemas are those of the functions that the request offers."""

_TOOL_CALL = (json_format.TOOL_CALL,)
_DEEPSEEK_CALL = (json_format.DEEPSEEK_CALLS, json_format.DEEPSEEK_CALL)
_CALL_BEGINS: Mapping[str, tuple[str, ...]] = {
    "deepseek_v3": _DEEPSEEK_CALL,
    "deepseek_v31": _DEEPSEEK_CALL,
    "glm45": _TOOL_CALL,
    "glm47": _TOOL_CALL,
    "hermes": _TOOL_CALL,
    "llama3_json": (json_format.PYTHON_TAG,),
    "llama4_json": (json_format.PYTHON_TAG,),
    "llama4_pythonic": (pythonic_format.START,),
    "mistral": (json_format.MISTRAL_CALLS,),
    "qwen3_coder": (*_TOOL_CALL, tagged_format.FUNCTION),
    "qwen3_xml": (*_TOOL_CALL, tagged_format.FUNCTION),
}
"""What begins a call, of formats where that cannot be meant as text."""

_THINK = Tags("<think>", "</think>")
REASONING_FORMATS: Mapping[str, Tags | None] = {
    "deepseek_r1": _THINK,
    "deepseek_v3": _THINK,
    "glm45": _THINK,
    "mistral": Tags("[THINK]", "[/THINK]"),
    _HARMONY_REASONING: None,
    "qwen3": _THINK,
    "seed_oss": Tags("<seed:think>", "</seed:think>"),
}
"""The tags around reasoning; None: harmony's channels."""

_ALWAYS_REASONS = ("deepseek_r1",)
"""Answers that begin with reasoning although neither prompt nor answer has the tag that begins it."""

MARKERS = (
    *(tag for tags in REASONING_FORMATS.values() if tags is not None for tag in tags),
    json_format.TOOL_CALL,
    json_format.TOOL_CALL_END,
    json_format.PYTHON_TAG,
    json_format.MISTRAL_CALLS,
    json_format.MISTRAL_ARGUMENTS,
    json_format.MISTRAL_ID,
    json_format.DEEPSEEK_CALLS,
    json_format.DEEPSEEK_CALLS_END,
    json_format.DEEPSEEK_CALL,
    json_format.DEEPSEEK_CALL_END,
    json_format.DEEPSEEK_SEPARATOR,
    tagged_format.KEY,
    tagged_format.KEY_END,
    tagged_format.VALUE,
    tagged_format.VALUE_END,
    pythonic_format.START,
    pythonic_format.END,
    harmony_format.START,
    harmony_format.CHANNEL,
    harmony_format.MESSAGE,
    harmony_format.CONSTRAIN,
    *harmony_format.ENDS,
)
"""Texts that some tokenizers have special tokens for. A parser has to see them."""

_CALLS_IN_TEMPLATE = (
    (harmony_format.CHANNEL, _HARMONY),
    (json_format.DEEPSEEK_CALL, "deepseek_v3"),
    (json_format.MISTRAL_CALLS, "mistral"),
    (tagged_format.KEY, "glm45"),
    (tagged_format.PARAMETER, "qwen3_coder"),
    (json_format.TOOL_CALL, "hermes"),
    ("[func_name1(", "pythonic"),
    (json_format.PYTHON_TAG, "llama3_json"),
    ('"parameters": dictionary', "llama3_json"),
)
_REASONING_IN_TEMPLATE = (
    (harmony_format.CHANNEL, _HARMONY_REASONING),
    ("[THINK]", "mistral"),
    ("</seed:think>", "seed_oss"),
    (_THINK.end, "qwen3"),
)


def find_call_format(template: str) -> str:
    """The format of calls that a chat template speaks of; "none"."""
    return next((name for marker, name in _CALLS_IN_TEMPLATE if marker in template), NONE)


def find_reasoning_format(template: str) -> str:
    """The format of reasoning that a chat template speaks of; "none"."""
    return next((name for marker, name in _REASONING_IN_TEMPLATE if marker in template), NONE)


CALL_PARSERS = (AUTO, NONE, *CALL_FORMATS)
REASONING_PARSERS = (AUTO, NONE, *REASONING_FORMATS)


@dataclass(frozen=True, slots=True)
class ParserNames:
    """Names of formats as a router is started with them; "auto": what the chat template speaks of."""

    calls: str = AUTO
    reasoning: str = AUTO

    def format_of(self, template: str) -> AnswerFormat:
        """The format of the answers of a model with this chat template."""
        return AnswerFormat(
            find_call_format(template) if self.calls == AUTO else self.calls,
            find_reasoning_format(template) if self.reasoning == AUTO else self.reasoning,
        )


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model writes calls and reasoning: names of the tables, or "none"."""

    calls: str = NONE
    reasoning: str = NONE

    @property
    def has_reasoning(self) -> bool:
        """Whether answers may hold reasoning."""
        return self.reasoning != NONE

    @property
    def is_harmony(self) -> bool:
        """Whether all of an answer is harmony, calls and reasoning."""
        return self.calls == _HARMONY and self.reasoning == _HARMONY_REASONING

    @property
    def call_begins(self) -> tuple[str, ...]:
        """Texts that begin a call, and nothing else."""
        return _CALL_BEGINS.get(self.calls, ())

    @property
    def tags(self) -> Tags | None:
        """The tags around reasoning; None: there is none, or it has other marks."""
        return REASONING_FORMATS.get(self.reasoning)

    def begins_reasoning(self, prompt_end: str) -> bool:
        """Whether the answer to a prompt that ends so begins inside of reasoning."""
        if self.tags is None:
            return False
        begun = prompt_end.rfind(self.tags.begin)
        ended = prompt_end.rfind(self.tags.end)
        return begun > ended or (self.reasoning in _ALWAYS_REASONS and ended < 0)

    def parser(self, request: CallsWanted, *, is_reasoning_begun: bool) -> AnswerParser:
        """A parser that tells the parts of one answer apart. `is_reasoning_begun`: see `begins_reasoning`."""
        return AnswerParser(partial(self._parse, request=request, is_reasoning_begun=is_reasoning_begun))

    def _parse(self, reader: Reader, request: CallsWanted, is_reasoning_begun: bool) -> Steps[None]:
        if self.is_harmony:
            yield from harmony_format.harmony(reader)
        elif request.is_enforced:
            if self.tags is not None and request.may_reason:
                yield from thinking(reader, self.tags, is_begun=is_reasoning_begun)
            if request.function:
                yield from json_format.enforced_arguments(reader, request.function)
            else:
                yield from json_format.enforced_calls(reader)
        elif self.reasoning == _HARMONY_REASONING or (request.schemas and self.calls == _HARMONY):
            yield from harmony_format.harmony(reader)
        else:
            if self.tags is not None and request.may_reason:
                yield from thinking(reader, self.tags, is_begun=is_reasoning_begun)
            if request.schemas and self.calls in CALL_FORMATS:
                yield from CALL_FORMATS[self.calls](reader, request.schemas)


@dataclass(frozen=True, slots=True)
class CallsWanted:
    """The calls that a request wants. `schemas`: those of the parameters of the functions that may be called, by name.

    `is_enforced`: a grammar makes the answer a call. With `function` the answer is the arguments of that function
    alone; without, it is an array of calls; in harmony it is a message like any other call. `may_reason` False: a
    grammar leaves no room for reasoning.
    """

    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    is_enforced: bool = False
    function: str = ""
    may_reason: bool = True
