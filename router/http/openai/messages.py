"""One message of a conversation, as clients may send it and as chat templates get it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import PlainValidator, WithJsonSchema, model_validator

from baton.router.http.openai import ignored
from baton.router.http.openai.fields import MAX_TEXT_CHARS, TOO_LONG, Content, Text, UserName, field_error
from baton.router.http.openai.image_parts import for_template, images_of
from baton.router.http.openai.strict_json import shown
from baton.router.http.openai.strict_model import Strict
from baton.router.http.openai.unsupported import MESSAGE

MAX_CALLS = 512
_CALL_MEMBERS = ("id", "type", "function", "index")
_FUNCTION_MEMBERS = ("name", "arguments")


def _read_calls(value: Any) -> tuple[Mapping[str, Any], ...]:
    """Calls of an earlier answer, `{"id", "type": "function", "function": {"name", "arguments"}}`."""
    if not isinstance(value, list):
        raise field_error("must be a list of calls")
    if len(value) > MAX_CALLS:
        raise field_error(f"holds more than {MAX_CALLS} calls")
    return tuple(_read_call(call, (index,)) for index, call in enumerate(value))


def _read_call(call: Any, path: tuple[str | int, ...]) -> Mapping[str, Any]:
    if not isinstance(call, dict):
        raise field_error("must be an object", path)
    for name in call:
        if name not in _CALL_MEMBERS:
            raise field_error("is not a member of a call", (*path, name), "unknown_parameter")
    if call.get("type", "function") != "function":
        raise field_error(f"must be 'function', not {shown(call['type'])}", (*path, "type"))
    if not isinstance(call.get("id"), str) or not call["id"]:
        raise field_error("must be a string that is not empty", (*path, "id"))
    function = call.get("function")
    if not isinstance(function, dict):
        raise field_error("must be an object", (*path, "function"))
    for name in _FUNCTION_MEMBERS:
        if not isinstance(function.get(name), str):
            raise field_error("must be a string", (*path, "function", name))
    if len(function["arguments"]) > MAX_TEXT_CHARS:
        raise field_error(f"is longer than {MAX_TEXT_CHARS} characters", (*path, "function", "arguments"), TOO_LONG)
    named = {name: function[name] for name in _FUNCTION_MEMBERS}
    return {"id": call["id"], "type": "function", "function": named}


_CALL = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "minLength": 1},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "arguments": {"type": "string", "maxLength": MAX_TEXT_CHARS}},
            "required": ["name", "arguments"],
        },
    },
    "required": ["id", "function"],
    "additionalProperties": False,
}
ToolCalls = Annotated[
    tuple[Mapping[str, Any], ...],
    PlainValidator(_read_calls),
    WithJsonSchema({"type": "array", "items": _CALL, "maxItems": MAX_CALLS}),
]


class Message(Strict):
    """One turn of a conversation. Text parts are joined with newlines; `developer` is today's name for `system`."""

    unsupported = MESSAGE
    ignorable = ignored.MESSAGE
    place = "messages[]"

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = ""
    name: UserName | None = None
    reasoning: Text | None = None
    reasoning_content: Text | None = None
    tool_calls: ToolCalls = ()
    tool_call_id: UserName | None = None

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if "content" not in self.model_fields_set and not self.tool_calls:
            raise field_error("is required", ("content",))
        if self.tool_calls and self.role != "assistant":
            raise field_error("belongs to a message of the assistant", ("tool_calls",))
        if self.role == "tool" and self.tool_call_id is None:
            raise field_error("is required: it names the call that this is the result of", ("tool_call_id",))
        if self.role != "tool" and self.tool_call_id is not None:
            raise field_error("belongs to a message of a tool", ("tool_call_id",))
        if self.role != "user" and images_of(self.content):
            raise field_error("may hold images only in a message of the user", ("content",))
        return self

    def for_template(self) -> dict[str, object]:
        """The message as a chat template expects it; templates know `system`, hardly any knows `developer`. Arguments
        of calls are objects where they are JSON."""
        found: dict[str, object] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": for_template(self.content) if "content" in self.model_fields_set else None,
        }
        optional = {
            "name": self.name,
            "reasoning_content": self.reasoning or self.reasoning_content,
            "tool_call_id": self.tool_call_id,
            "tool_calls": [_for_template(call) for call in self.tool_calls],
        }
        return found | {name: value for name, value in optional.items() if value}

    @property
    def num_chars(self) -> int:
        """Characters that the chat template gets."""
        arguments = sum(len(call["function"]["arguments"]) for call in self.tool_calls)
        return len(self.content) + len(self.reasoning or self.reasoning_content or "") + arguments


def _for_template(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": _parsed(function["arguments"])}}


def _parsed(arguments: str) -> object:
    """Arguments as an object; as they are where they are none."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
