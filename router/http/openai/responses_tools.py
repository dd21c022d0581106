"""Tools as /v1/responses has them: a function's members are beside its type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import PlainValidator, ValidationInfo, WithJsonSchema

from baton.router.http.openai.fields import UNSUPPORTED, field_error, ignored_fields_of, refuse_or_ignore
from baton.router.http.openai.ignored import Ignored, IgnoredFields, IgnoredTable
from baton.router.http.openai.tools import (
    AUTO,
    FUNCTION,
    MAX_TOOLS,
    NONE,
    REQUIRED,
    Path,
    ToolChoice,
    read_each_tool,
    read_function,
    read_tool_choice,
)

_MEMBERS = ("type", "name", "description", "parameters", "strict")
_IGNORABLE: IgnoredTable = {
    "allowed_callers": Ignored("functions are called by the model alone"),
    "defer_loading": Ignored("the model is told of all functions at once", (False,)),
    "output_schema": Ignored("the model sees results as they are"),
}
_SERVERS_OWN = ("image_generation", "web_search", "web_search_2025_08_26", "web_search_preview")
"""Tools that a server would run and that models do without: agents offer them unasked."""
_IGNORABLE_KINDS: IgnoredTable = {
    **dict.fromkeys(_SERVERS_OWN, Ignored("the router runs no tools")),
    # Codex groups what it has for sub-agents so; models do without
    "namespace": Ignored("the model is told of functions that belong to no group"),
}


def _read_tools(value: Any, info: ValidationInfo) -> tuple[Mapping[str, Any], ...]:
    notes = ignored_fields_of(info)
    return read_each_tool(value, lambda tool, path: _read_tool(tool, path, notes), ("name",))


def _read_tool(tool: Any, path: Path, notes: IgnoredFields) -> Mapping[str, Any] | None:
    if not isinstance(tool, dict):
        raise field_error("must be an object", path)
    kind = tool.get("type")
    if isinstance(kind, str) and kind in _IGNORABLE_KINDS:
        refuse_or_ignore(notes, kind, tool, _IGNORABLE_KINDS, "tools[]", (*path, "type"))
        return None
    if kind != "function":
        raise field_error("must be 'function': no other tools are served", (*path, "type"), UNSUPPORTED)
    for name, member in tool.items():
        if name not in _MEMBERS:
            refuse_or_ignore(notes, name, member, _IGNORABLE, "tools[]", (*path, name))
    members = {name: member for name, member in tool.items() if name in _MEMBERS[1:]}
    return {"type": "function", "function": read_function(members, path)}


def _read_choice(value: Any) -> ToolChoice:
    if isinstance(value, dict) and value.get("type") == "function":
        if not isinstance(value.get("name"), str):
            raise field_error("must be a string", ("name",))
        return ToolChoice(REQUIRED, value["name"])
    return read_tool_choice(value)


def shown_tools(tools: tuple[Mapping[str, Any], ...]) -> list[dict[str, Any]]:
    """Tools as an answer repeats them."""
    empty = {"description": None, "strict": False}
    return [{"type": "function", **empty, **tool["function"]} for tool in tools]


def shown_choice(choice: ToolChoice | None) -> str | dict[str, str]:
    """What was chosen, as an answer repeats it."""
    if choice is None:
        return AUTO
    return {"type": "function", "name": choice.name} if choice.name else choice.mode


_TOOL = {
    "type": "object",
    "properties": {"type": {"const": "function"}, **FUNCTION["properties"]},
    "required": ["type", "name"],
}
_IGNORED_TOOL = {"type": "object", "properties": {"type": {"enum": [*_IGNORABLE_KINDS]}}, "required": ["type"]}
_NAMED = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "name": {"type": "string"}},
    "required": ["type", "name"],
}
ResponsesTools = Annotated[
    tuple[Mapping[str, Any], ...],
    PlainValidator(_read_tools),
    WithJsonSchema({"type": "array", "items": {"anyOf": [_TOOL, _IGNORED_TOOL]}, "maxItems": MAX_TOOLS}),
]
ResponsesToolChoice = Annotated[
    ToolChoice,
    PlainValidator(_read_choice),
    WithJsonSchema({"anyOf": [{"enum": [NONE, AUTO, REQUIRED]}, _NAMED]}),
]
