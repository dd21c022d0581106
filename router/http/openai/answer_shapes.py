"""What a chat request makes of the grammar of its answer: the structure that it asks for is a part of it only where the
model may reason before, or call functions instead.

Owns which requests these are. How such a grammar is written is known to `baton.engine.text.answers.grammars`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from baton.engine.text.answers.formats import AnswerFormat
from baton.engine.text.answers.grammars import CALL_FORMS, AnswerShape
from baton.engine.text.answers.harmony_grammar import HarmonyShape
from baton.router.http.openai.fields import REFUSED, TOO_LONG
from baton.router.http.openai.ignored import Ignored, IgnoredFields, IgnoredTable
from baton.router.http.openai.schemas import ChatCompletionRequest, GenerationRequest
from baton.wire.errors import InvalidRequest
from baton.wire.grammar import Grammar

_UNENFORCED: IgnoredTable = {
    "strict": Ignored("calls in this model's format have no grammar; those of tool_choice required have one")
}

_TOOLS = "tools"
_UNSHOWN: IgnoredTable = {
    _TOOLS: Ignored("the chat template of this model does not tell it of tools; tool_choice required makes it call one")
}

_LEAST_STRUCTURE = 16
"""Tokens that reasoning leaves to a structure behind it."""


class Reasoning(NamedTuple):
    """What is known of the reasoning of an answer, beside what its request says. `is_begun`: by the prompt.
    `is_usual`: the template has the model reason unless it is told not to. `room`: tokens that the answer may have."""

    is_begun: bool
    is_usual: bool
    room: int


def shape_of(
    request: ChatCompletionRequest, answer_format: AnswerFormat, reasoning: Reasoning
) -> AnswerShape | HarmonyShape | None:
    """What stands before and beside a structure, or around calls that have to be valid. None: the whole answer is the
    structure, or nothing is asked of it.

    A structure begins with the first token, unless the model was asked to reason before it: by the prompt, which begins
    it, by the request, or by a template that has it reason unless it is told not to. Reasoning before a structure has a
    bound, so that the structure comes: what the request says, or half of what the answer may have, and less where that
    leaves too little.
    """
    structure = None if request.asked_grammar is None else request.asked_grammar[0]
    budget = _budget(request.max_reasoning_tokens, reasoning.room, is_before_structure=structure is not None)
    if answer_format.is_harmony:
        return _harmony_shape(request, structure, budget)
    functions: Mapping[str, Mapping[str, Any]] = {}
    if _knows_calls(request, answer_format) and (request.has_strict_function or structure is not None):
        functions = request.callable_schemas()
    if structure is None and not functions and budget is None:
        return None
    wanted = request.thinking_wanted
    is_asked = reasoning.is_usual if wanted is None else wanted
    may_reason = reasoning.is_begun or is_asked or (structure is None and wanted is not False)
    shape = AnswerShape(
        reasoning=answer_format.tags if may_reason else None,
        is_reasoning_begun=reasoning.is_begun,
        max_reasoning_tokens=budget,
        structure=structure,
        functions=functions,
        call_format=answer_format.calls,
        is_one_call=not request.parallel_tool_calls,
    )
    return shape if shape.can_be_grammar and (functions or shape.may_reason) else None


def _budget(asked: int | None, room: int, *, is_before_structure: bool) -> int | None:
    """How many tokens reasoning may have; None: any number. Before a structure that is a power of two where the request
    says too much or nothing: answers with a little more or less room have the same grammar, which is compiled once."""
    if not is_before_structure:
        return asked if asked is not None and asked < room else None
    most = max(0, room - _LEAST_STRUCTURE)
    if asked is not None and asked <= most:
        return asked
    return min(most, 1 << max(0, (room // 2).bit_length() - 1))


def _harmony_shape(
    request: ChatCompletionRequest, structure: Grammar | None, budget: int | None
) -> HarmonyShape | None:
    if structure is None and not request.has_strict_function and budget is None:
        return None
    must_call = request.calls_wanted.is_enforced
    shape = HarmonyShape(
        structure=None if must_call else structure,
        functions=request.callable_schemas(),
        may_reason=request.thinking_wanted is not False,
        must_call=must_call,
        max_reasoning_tokens=budget,
    )
    return shape if shape.can_be_grammar else None


def whole_grammar(
    shape: AnswerShape | HarmonyShape, request: GenerationRequest, token_of: Callable[[str], int | None]
) -> tuple[Grammar, str]:
    """The grammar of the answer, and what an error about it names. Raises `InvalidRequest` when it is too long."""
    param = "tools" if request.asked_grammar is None else request.asked_grammar[1]
    try:
        return shape.grammar(token_of), param
    except InvalidRequest:
        raise InvalidRequest(f"{param} is too long together with everything else", param, TOO_LONG) from None


def note_unshown(request: ChatCompletionRequest, template: str, notes: IgnoredFields) -> None:
    """Note tools of which this chat template says nothing, so that the model cannot know them. Raises `InvalidRequest`
    when the router is strict."""
    if not request.offered_tools or request.calls_wanted.is_enforced or _TOOLS in template:
        return
    code = notes.ignore(_TOOLS, request.offered_tools, _UNSHOWN)
    if code is not None:
        raise InvalidRequest(f"{_TOOLS} {REFUSED[code]}", _TOOLS, code)


def note_unenforced(request: ChatCompletionRequest, answer_format: AnswerFormat, notes: IgnoredFields) -> None:
    """Note a strict function whose calls this model is free to write as it likes. Raises `InvalidRequest` when the
    router is strict."""
    is_enforced = request.calls_wanted.is_enforced or _knows_calls(request, answer_format)
    if not request.has_strict_function or is_enforced:
        return
    code = notes.ignore("strict", True, _UNENFORCED, "tools[].function")
    if code is not None:
        raise InvalidRequest(f"tools[].function.strict {REFUSED[code]}", "tools", code)


def _knows_calls(request: ChatCompletionRequest, answer_format: AnswerFormat) -> bool:
    return not request.calls_wanted.is_enforced and (answer_format.is_harmony or answer_format.calls in CALL_FORMS)
