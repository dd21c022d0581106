"""Tools as /v1/messages has them: a function's parameters are its `input_schema`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import PlainValidator, ValidationInfo, WithJsonSchema

from baton.router.http.openai.fields import UNSUPPORTED, field_error, ignored_fields_of, refuse_or_ignore
from baton.router.http.openai.ignored import COMMON, Ignored, IgnoredFields, IgnoredTable
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
)

_SCHEMA = "input_schema"
_MEMBERS = ("name", "description", _SCHEMA, "strict")
_TOOL: IgnoredTable = {
    "allowed_callers": Ignored("functions are called by the model alone"),
    "cache_control": COMMON["cache_control"],
    "defer_loading": Ignored("the model is told of all functions at once", (False,)),
    "eager_input_streaming": Ignored("arguments are streamed as they come", (True,)),
    "input_examples": Ignored("chat templates know no examples", ([],)),
}
_MODES: Mapping[str, str] = {"auto": AUTO, "any": REQUIRED, "tool": REQUIRED, "none": NONE}
_PARALLEL = "disable_parallel_tool_use"


@dataclass(frozen=True, slots=True)
class Choice:
    """`tool_choice`. `is_parallel`: an answer may hold several calls."""

    choice: ToolChoice
    is_parallel: bool = True


def _read_functions(value: Any, info: ValidationInfo) -> tuple[Mapping[str, Any], ...]:
    notes = ignored_fields_of(info)
    return read_each_tool(value, lambda tool, path: _read_tool(tool, path, notes), ("name",))


def _read_tool(tool: Any, path: Path, notes: IgnoredFields) -> Mapping[str, Any]:
    if not isinstance(tool, dict):
        raise field_error("must be an object", path)
    if tool.get("type") not in (None, "custom"):
        raise field_error("must be 'custom': no other tools are served", (*path, "type"), UNSUPPORTED)
    for name, member in tool.items():
        if name != "type" and name not in _MEMBERS:
            refuse_or_ignore(notes, name, member, _TOOL, "tools[]", (*path, name))
    members = {name: member for name, member in tool.items() if name in _MEMBERS}
    return {"type": "function", "function": read_function(members, path, _SCHEMA)}


def _read_choice(value: Any) -> Choice:
    """`{"type": "auto" | "any" | "tool" | "none", "name", "disable_parallel_tool_use"}`."""
    if not isinstance(value, dict):
        raise field_error("must be an object")
    kind, name, is_single = value.get("type"), value.get("name"), value.get(_PARALLEL) or False
    if not isinstance(kind, str) or kind not in _MODES:
        raise field_error(f"must be one of {', '.join(_MODES)}", ("type",))
    if kind == "tool" and not (isinstance(name, str) and name):
        raise field_error("must be a string that is not empty", ("name",))
    if not isinstance(is_single, bool):
        raise field_error("must be true or false", (_PARALLEL,))
    return Choice(ToolChoice(_MODES[kind], str(name) if kind == "tool" else ""), not is_single)


_PROPERTIES = {name: schema for name, schema in FUNCTION["properties"].items() if name != "parameters"}
_TOOL_SCHEMA = {
    "type": "object",
    "properties": {
        "type": {"enum": ["custom", None]},
        **_PROPERTIES,
        _SCHEMA: FUNCTION["properties"]["parameters"],
    },
    "required": ["name"],
}
_CHOICE_SCHEMA = {
    "type": "object",
    "properties": {
        "type": {"enum": [*_MODES]},
        "name": {"type": "string"},
        _PARALLEL: {"type": ["boolean", "null"]},
    },
    "required": ["type"],
}
Functions = Annotated[
    tuple[Mapping[str, Any], ...],
    PlainValidator(_read_functions),
    WithJsonSchema({"type": "array", "items": _TOOL_SCHEMA, "maxItems": MAX_TOOLS}),
]
FunctionChoice = Annotated[Choice, PlainValidator(_read_choice), WithJsonSchema(_CHOICE_SCHEMA)]
