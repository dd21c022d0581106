"""The fields by which a request offers functions and says whether they are to be called.

Owns their shapes, and the grammar that makes an answer a call: an array of calls for `required`, the arguments alone
for a named function. That grammar is the same for every model, whatever its own format of calls is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self, TypeAlias

from pydantic import BaseModel, PlainValidator, WithJsonSchema, model_validator

from baton.engine.text.answers.formats import CallsWanted
from baton.engine.text.answers.grammars import moved_references
from baton.router.http.openai.fields import MAX_TEXT_CHARS, TOO_LONG, UNSUPPORTED, field_error
from baton.router.http.openai.strict_json import shown
from baton.router.http.openai.structured import AskedGrammar
from baton.wire.errors import InvalidRequest
from baton.wire.grammar import Grammar

MAX_TOOLS = 512
NONE, AUTO, REQUIRED = "none", "auto", "required"
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}", re.ASCII)
Path: TypeAlias = tuple[str | int, ...]
_LISTING = {"type", "properties", "required", "title", "description", "$schema", "$defs", "definitions"}
"""Members of a schema that say nothing about properties that it does not list."""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`mode`: none, auto or required. `name`: the one function that has to be called."""

    mode: str
    name: str = ""


def read_tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    """`[{"type": "function", "function": {"name", "description", "parameters", "strict"}}, ...]`, as it came."""
    return read_each_tool(value, _read_tool, ("function", "name"))


def read_each_tool(
    value: Any, read: Callable[[Any, Path], Mapping[str, Any] | None], name_at: Path
) -> tuple[Mapping[str, Any], ...]:
    """A list of tools in the form of /v1/chat/completions. `read` makes each of what is at that path, or None of one
    that is left out; `name_at`: where its name is in what was sent."""
    if not isinstance(value, list):
        raise field_error("must be a list of tools")
    if len(value) > MAX_TOOLS:
        raise field_error(f"holds more than {MAX_TOOLS} tools")
    found: dict[str, Mapping[str, Any]] = {}
    for index, sent in enumerate(value):
        tool = read(sent, (index,))
        if tool is None:
            continue
        name = tool["function"]["name"]
        if name in found:
            raise field_error("is the name of another tool too", (index, *name_at))
        found[name] = tool
    tools = tuple(found.values())
    if len(json.dumps(tools)) > MAX_TEXT_CHARS:
        raise field_error(f"hold more than {MAX_TEXT_CHARS} characters together", (), TOO_LONG)
    return tools


def _read_tool(tool: Any, path: Path) -> Mapping[str, Any]:
    if not isinstance(tool, dict):
        raise field_error("must be an object", path)
    if tool.get("type") != "function":
        raise field_error("must be 'function': no other tools are served", (*path, "type"), UNSUPPORTED)
    for name in tool:
        if name not in ("type", "function"):
            raise field_error("is not a member of a tool", (*path, name), "unknown_parameter")
    path = (*path, "function")
    return {"type": "function", "function": read_function(tool.get("function"), path)}


def read_function(function: Any, path: Path, parameters_name: str = "parameters") -> Mapping[str, Any]:
    """One function, its parameters under the name that they are sent with. Members that are null are left out; one
    without parameters takes none, which templates see."""
    if not isinstance(function, dict):
        raise field_error("must be an object", path)
    members = {name: member for name, member in function.items() if member is not None}
    for name in members:
        if name not in ("name", "description", parameters_name, "strict"):
            raise field_error("is not a member of a function", (*path, name), "unknown_parameter")
    name = members.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise field_error("must be 1 to 128 letters, digits, '_', '-' or '.'", (*path, "name"))
    if not isinstance(members.get("description", ""), str):
        raise field_error("must be a string", (*path, "description"))
    if not isinstance(members.get("strict", False), bool):
        raise field_error("must be true or false", (*path, "strict"))
    parameters = members.get(parameters_name, {})
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise field_error("must be the JSON schema of an object", (*path, parameters_name))
    named = {("parameters" if name == parameters_name else name): member for name, member in members.items()}
    return {**named, "parameters": parameters or {"type": "object", "properties": {}}}


def read_tool_choice(value: Any) -> ToolChoice:
    """`"none"`, `"auto"`, `"required"`, or `{"type": "function", "function": {"name": ...}}`."""
    if isinstance(value, str):
        if value not in (NONE, AUTO, REQUIRED):
            raise field_error(f"must be 'none', 'auto', 'required' or a function, not {shown(value)}")
        return ToolChoice(value)
    if not isinstance(value, dict) or value.get("type") != "function":
        raise field_error("must be 'none', 'auto', 'required' or a function")
    function = value.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise field_error("must be a string", ("function", "name"))
    return ToolChoice(REQUIRED, function["name"])


FUNCTION: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": f"^{_NAME.pattern}$"},
        "description": {"type": ["string", "null"]},
        "parameters": {"type": ["object", "null"]},
        "strict": {"type": ["boolean", "null"]},
    },
    "required": ["name"],
    "additionalProperties": False,
}
_TOOL = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "function": FUNCTION},
    "required": ["type", "function"],
    "additionalProperties": False,
}
_NAMED = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
    "required": ["type", "function"],
}
Tools = Annotated[
    tuple[Mapping[str, Any], ...],
    PlainValidator(read_tools),
    WithJsonSchema({"type": "array", "items": _TOOL, "maxItems": MAX_TOOLS}),
]
ToolChoiceField = Annotated[
    ToolChoice,
    PlainValidator(read_tool_choice),
    WithJsonSchema({"anyOf": [{"enum": [NONE, AUTO, REQUIRED]}, _NAMED]}),
]


def check_choice(tools: Sequence[Mapping[str, Any]], choice: ToolChoice | None) -> None:
    """Raise a `field_error` when what has to be called is not there."""
    if choice is None or choice.mode != REQUIRED:
        return
    if not tools:
        raise field_error("needs tools that could be called", ("tool_choice",))
    if choice.name and all(choice.name != tool["function"]["name"] for tool in tools):
        raise field_error(f"names no function of tools: {shown(choice.name)}", ("tool_choice",))


class ToolFields(BaseModel):
    """The fields of a request that concern tools. Without `tool_choice` the model may call what is offered.
    `parameters_field`: where the schema of arguments stands in a tool of the endpoint that was asked."""

    parameters_field: ClassVar[str] = "function.parameters"
    tools: Tools = ()
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def _check_choice(self) -> Self:
        check_choice(self.tools, self.tool_choice)
        return self

    @property
    def offered_tools(self) -> tuple[Mapping[str, Any], ...]:
        """The tools that the model is told of."""
        return () if self.tool_choice is not None and self.tool_choice.mode == NONE else self.tools

    @property
    def calls_wanted(self) -> CallsWanted:
        """What is to be found in the answer."""
        choice = self.tool_choice
        if not self.offered_tools:
            return CallsWanted()
        is_enforced = choice is not None and choice.mode == REQUIRED
        return CallsWanted(self._schemas(), is_enforced, "" if choice is None else choice.name)

    def tool_grammar(self) -> AskedGrammar | None:
        """What makes the answer a call; None: it need not be one. Raises a `field_error` when it is too long."""
        wanted = self.calls_wanted
        if not wanted.is_enforced:
            return None
        if wanted.function:
            schema = _parameters(wanted.schemas.get(wanted.function, {}))
        else:
            schema = _array_of_calls(wanted.schemas, is_one=not self.parallel_tool_calls)
        try:
            return AskedGrammar(Grammar.json_schema(schema))
        except InvalidRequest:
            raise field_error("hold too long a schema", ("tools",), TOO_LONG) from None

    @property
    def has_strict_function(self) -> bool:
        """Whether the arguments of a call have to be valid though the model need not call."""
        return any(tool["function"].get("strict") for tool in self.offered_tools)

    def parameter_grammars(self) -> list[tuple[str, Grammar]]:
        """The schemas of arguments that a grammar enforces, by the field that they came with. Raises `InvalidRequest`
        for one that is too long."""
        wanted = self.calls_wanted
        return [
            (f"tools[{number}].{self.parameters_field}", Grammar.json_schema(tool["function"]["parameters"]))
            for number, tool in enumerate(self.tools)
            if tool["function"]["parameters"] and self._is_enforced(tool["function"], wanted)
        ]

    def callable_schemas(self) -> dict[str, Mapping[str, Any]]:
        """The schemas of arguments in calls that a grammar knows: those of functions that are strict or have to be
        called, and any object for others."""
        wanted = self.calls_wanted
        functions = [tool["function"] for tool in self.offered_tools]
        anything = {"type": "object"}
        return {
            function["name"]: _parameters(function["parameters"]) if self._is_enforced(function, wanted) else anything
            for function in functions
            if wanted.function in ("", function["name"])
        }

    def _is_enforced(self, function: Mapping[str, Any], wanted: CallsWanted) -> bool:
        """Whether a grammar knows the arguments of `function`: it is strict, or one that has to be called."""
        if not self.offered_tools or wanted.function not in ("", function["name"]):
            return False
        return wanted.is_enforced or bool(function.get("strict"))

    def _schemas(self) -> dict[str, Mapping[str, Any]]:
        functions = [tool["function"] for tool in self.tools]
        return {function["name"]: function["parameters"] for function in functions}


def _parameters(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of arguments. Where it only lists them there are no others: no function takes those, and a model that
    may invent some goes on and on."""
    found = {"type": "object", **schema}
    return {**found, "additionalProperties": False} if found.keys() <= _LISTING else found


def _array_of_calls(schemas: Mapping[str, Mapping[str, Any]], *, is_one: bool) -> dict[str, Any]:
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": name},
                "parameters": moved_references(_parameters(schema), f"#/items/anyOf/{number}/properties/parameters"),
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for number, (name, schema) in enumerate(schemas.items())
    ]
    return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **({"maxItems": 1} if is_one else {})}
