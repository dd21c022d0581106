"""The items of the input of /v1/responses, and the messages of a conversation that they are.

One turn of the assistant may be several items: its reasoning, a message and calls, which are one message here, as they
were in its answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic_core import PydanticCustomError

from baton.router.http.openai.fields import MAX_TEXT_CHARS, TOO_LONG, UNSUPPORTED, field_error
from baton.router.http.openai.image_parts import DATA_URL, ImagePart, images_of, joined, of_url
from baton.router.http.openai.messages import Message
from baton.router.http.openai.schemas import MAX_MESSAGES
from baton.router.http.openai.tools import Path
from baton.wire.errors import InvalidRequest

INPUT_ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = ("input_text", "output_text", "text")
REFUSAL = "refusal"
_ASSISTANT, _USER = "assistant", "user"
_IMAGE = "input_image"
_Item = Mapping[str, Any]


class Conversation(NamedTuple):
    """`items`: as they were sent with the request. `messages`: of the whole conversation."""

    items: tuple[_Item, ...]
    messages: tuple[Message, ...]

    @property
    def fault(self) -> str:
        """What is wrong with its size, as the rest of a sentence; "": nothing."""
        if sum(message.num_chars for message in self.messages) > MAX_TEXT_CHARS:
            return f"holds more than {MAX_TEXT_CHARS} characters"
        return ""

    def after(self, earlier: Sequence[_Item]) -> Conversation:
        """The conversation with items before its own, of responses that came earlier. Raises `InvalidRequest`."""
        if len(earlier) + len(self.items) > MAX_MESSAGES:
            raise InvalidRequest(f"input and what it follows hold more than {MAX_MESSAGES} items", "input")
        try:
            longer = Conversation(self.items, _messages((*earlier, *self.items)))
        except PydanticCustomError as error:
            raise InvalidRequest(f"an item that input follows {error.message()}", "input") from None
        if longer.fault:
            raise InvalidRequest(f"input, with what it follows, {longer.fault}", "input", TOO_LONG)
        return longer


def read_input(value: Any) -> Conversation:
    """A text, or a list of items. Members of items that only name them or tell their state (`id`, `status`, ...) do
    not matter."""
    if isinstance(value, str):
        value = [{"type": "message", "role": _USER, "content": value}]
    if not isinstance(value, list) or not value:
        raise field_error("must be a string or a non-empty list of items")
    if len(value) > MAX_MESSAGES:
        raise field_error(f"holds more than {MAX_MESSAGES} items")
    return Conversation(tuple(value), _messages(value))


def _messages(items: Sequence[Any]) -> tuple[Message, ...]:
    return tuple(assistant_turns_joined(_read_item(item, index) for index, item in enumerate(items)))


def assistant_turns_joined(messages: Iterable[Message]) -> Iterable[Message]:
    """Messages of the assistant that are parts of one turn become one: reasoning, then content, then calls."""
    open_turn: Message | None = None
    for message in messages:
        if open_turn is not None and message.role == _ASSISTANT and _continues(open_turn, message):
            open_turn = _joined(open_turn, message)
            continue
        if open_turn is not None and _says_something(open_turn):
            yield open_turn
        open_turn = message if message.role == _ASSISTANT else None
        if open_turn is None:
            yield message
    if open_turn is not None and _says_something(open_turn):
        yield open_turn


def _continues(turn: Message, part: Message) -> bool:
    if part.reasoning_content:
        return not _says_something(turn)
    has_content = "content" in part.model_fields_set
    return not (has_content and _says_something(turn))


def _says_something(turn: Message) -> bool:
    return "content" in turn.model_fields_set or bool(turn.tool_calls)


def _joined(turn: Message, part: Message) -> Message:
    members: dict[str, Any] = {name: getattr(turn, name) for name in turn.model_fields_set}
    members |= {name: getattr(part, name) for name in part.model_fields_set}
    if turn.reasoning_content and part.reasoning_content:
        members["reasoning_content"] = f"{turn.reasoning_content}\n{part.reasoning_content}"
    if turn.tool_calls and part.tool_calls:
        members["tool_calls"] = (*turn.tool_calls, *part.tool_calls)
    return Message.model_construct(**members)


def _read_item(item: Any, index: int) -> Message:
    if not isinstance(item, dict):
        raise field_error("must be an object", (index,))
    kind = item.get("type", "message")
    if kind == "item_reference":
        raise field_error("is unsupported with this value: send the item itself", (index, "type"), UNSUPPORTED)
    read = _READERS.get(kind) if isinstance(kind, str) else None
    if read is None:
        known = ", ".join(_READERS)
        raise field_error(f"is unsupported with this value: input may hold {known}", (index, "type"), UNSUPPORTED)
    return read(item, (index,))


def _read_message(item: _Item, path: Path) -> Message:
    role, content = item.get("role"), item.get("content")
    if role not in INPUT_ROLES:
        raise field_error(f"must be one of {', '.join(INPUT_ROLES)}", (*path, "role"))
    found = read_parts(content, (*path, "content"))
    if role != _USER and images_of(found):
        raise field_error("may hold images only in a message of the user", (*path, "content"), UNSUPPORTED)
    return Message.model_construct(role=role, content=found)


def _read_call(item: _Item, path: Path) -> Message:
    for name in ("call_id", "name", "arguments"):
        if not isinstance(item.get(name), str) or (not item[name] and name != "arguments"):
            raise field_error("must be a string that is not empty", (*path, name))
    if len(item["arguments"]) > MAX_TEXT_CHARS:
        raise field_error(f"is longer than {MAX_TEXT_CHARS} characters", (*path, "arguments"), TOO_LONG)
    function = {"name": item["name"], "arguments": item["arguments"]}
    call = {"id": item["call_id"], "type": "function", "function": function}
    return Message.model_construct(role=_ASSISTANT, tool_calls=(call,))


def _read_result(item: _Item, path: Path) -> Message:
    if not isinstance(item.get("call_id"), str) or not item["call_id"]:
        raise field_error("must be a string that is not empty", (*path, "call_id"))
    content = read_parts(item.get("output"), (*path, "output"))
    if images_of(content):
        raise field_error("may hold text only: images are served in messages", (*path, "output"), UNSUPPORTED)
    return Message.model_construct(role="tool", content=content, tool_call_id=item["call_id"])


def _read_reasoning(item: _Item, path: Path) -> Message:
    """Its text, or the summary where that is all there is; none of either when it is encrypted by somebody else."""
    for name in ("content", "summary"):
        parts = item.get(name) or []
        if not isinstance(parts, list):
            raise field_error("must be a list", (*path, name))
        texts = [part.get("text") for part in parts if isinstance(part, dict)]
        if found := "\n".join(text for text in texts if isinstance(text, str)):
            return Message.model_construct(role=_ASSISTANT, reasoning_content=found)
    return Message.model_construct(role=_ASSISTANT)


def read_parts(content: Any, path: Path) -> str:
    """A string, or the texts of a list of parts, joined with newlines; with images a `SeenText`."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise field_error("must be a string or a non-empty list of parts", path)
    return joined([_read_part(part, (*path, at)) for at, part in enumerate(content)])


def _read_part(part: Any, path: Path) -> str | ImagePart:
    if not isinstance(part, dict):
        raise field_error("must be an object", path)
    kind = part.get("type")
    if kind == _IMAGE:
        return _read_image(part, path)
    if kind not in (*TEXT_PARTS, REFUSAL):
        raise field_error(f"must be one of {', '.join((*TEXT_PARTS, _IMAGE))}", (*path, "type"), UNSUPPORTED)
    name = REFUSAL if kind == REFUSAL else "text"
    text = part.get(name)
    if not isinstance(text, str):
        raise field_error("must be a string", (*path, name))
    return text


def _read_image(part: _Item, path: Path) -> ImagePart:
    if part.get("file_id") is not None:
        raise field_error("is unsupported: files are not stored here", (*path, "file_id"), UNSUPPORTED)
    try:
        return of_url(part.get("image_url"))
    except ValueError as error:
        raise field_error(str(error), (*path, "image_url")) from None


_READERS: Mapping[str, Callable[[_Item, Path], Message]] = {
    "message": _read_message,
    "function_call": _read_call,
    "function_call_output": _read_result,
    "reasoning": _read_reasoning,
}

_TEXT = {"type": "string", "maxLength": MAX_TEXT_CHARS}
_NAME = {"type": "string", "minLength": 1}
_PART = {
    "type": "object",
    "properties": {"type": {"enum": [*TEXT_PARTS]}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_IMAGE_PART = {
    "type": "object",
    "properties": {"type": {"const": _IMAGE}, "image_url": {"type": "string", "pattern": DATA_URL}},
    "required": ["type", "image_url"],
}
_CONTENT = {"anyOf": [_TEXT, {"type": "array", "items": _PART, "minItems": 1}]}
_SEEN = {"anyOf": [_TEXT, {"type": "array", "items": {"anyOf": [_PART, _IMAGE_PART]}, "minItems": 1}]}


def _item(kind: str, required: Mapping[str, Any], **optional: Any) -> dict[str, Any]:
    properties = {"type": {"const": kind}, **required, **optional}
    return {"type": "object", "properties": properties, "required": ["type", *required]}


_MESSAGE = {
    **_item("message", {"role": {"enum": [*INPUT_ROLES]}, "content": _SEEN}),
    "required": ["role", "content"],
}
_PARTS = {"type": ["array", "null"], "items": {"type": "object"}}
_ITEMS = [
    _MESSAGE,
    _item("function_call", {"call_id": _NAME, "name": _NAME, "arguments": _TEXT}),
    _item("function_call_output", {"call_id": _NAME, "output": _CONTENT}),
    _item("reasoning", {}, content=_PARTS, summary=_PARTS),
]
INPUT_ITEMS = {"type": "array", "items": {"anyOf": _ITEMS}, "minItems": 1, "maxItems": MAX_MESSAGES}
"""The JSON schema of a list of items."""
INPUT = {"anyOf": [_TEXT, INPUT_ITEMS]}
"""The JSON schema of `input`."""
