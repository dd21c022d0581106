"""What a chat request makes of the grammar of its answer: the structure that it asks for is a part of it only where the
model may reason before, or call functions instead.

Owns which requests these are. How such a grammar is written is known to `engine.text.answers.grammars`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine.text.answers.formats import AnswerFormat
from engine.text.answers.grammars import CALL_FORMS, AnswerShape
from engine.text.answers.harmony_grammar import HarmonyShape
from router.openai.fields import REFUSED, TOO_LONG
from router.openai.ignored import Ignored, IgnoredFields, IgnoredTable
from router.openai.schemas import ChatCompletionRequest, GenerationRequest
from wire.errors import InvalidRequest
from wire.grammar import Grammar

_UNENFORCED: IgnoredTable = {
    "strict": Ignored("calls in this model's format have no grammar; those of tool_choice required have one")
}

_TOOLS = "tools"
_UNSHOWN: IgnoredTable = {
    _TOOLS: Ignored("the chat template of this model does not tell it of tools; tool_choice required makes it call one")
}


def shape_of(
    request: ChatCompletionRequest, answer_format: AnswerFormat, *, is_reasoning_begun: bool
) -> AnswerShape | HarmonyShape | None:
    """What stands before and beside a structure, or around calls that have to be valid. None: the whole answer is the
    structure, or nothing is asked of it."""
    structure = None if request.asked_grammar is None else request.asked_grammar[0]
    if answer_format.is_harmony:
        return _harmony_shape(request, structure)
    functions: Mapping[str, Mapping[str, Any]] = {}
    if _knows_calls(request, answer_format) and (request.has_strict_function or structure is not None):
        functions = request.callable_schemas()
    if structure is None and not functions:
        return None
    may_reason = is_reasoning_begun or request.template_variables().get("enable_thinking") is not False
    tags = answer_format.tags if may_reason else None
    is_one_call = not request.parallel_tool_calls
    shape = AnswerShape(tags, is_reasoning_begun, structure, functions, answer_format.calls, is_one_call)
    return shape if shape.can_be_grammar and (functions or tags is not None) else None


def _harmony_shape(request: ChatCompletionRequest, structure: Grammar | None) -> HarmonyShape | None:
    if structure is None and not request.has_strict_function:
        return None
    must_call = request.calls_wanted.is_enforced
    may_reason = request.template_variables().get("enable_thinking") is not False
    shape = HarmonyShape(None if must_call else structure, request.callable_schemas(), may_reason, must_call)
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
