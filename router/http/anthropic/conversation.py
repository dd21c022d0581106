"""The conversation of a /v1/messages request, as the messages that chat templates know.

A message of the user may hold images, and results of calls: each result becomes a message of its own, in order. What
an earlier answer held (thinking, text, calls) is one message of the assistant.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import PlainValidator, ValidationInfo, WithJsonSchema

from baton.router.http.openai.fields import (
    MAX_TEXT_CHARS,
    UNSUPPORTED,
    field_error,
    ignored_fields_of,
    refuse_or_ignore,
)
from baton.router.http.openai.ignored import COMMON, Ignored, IgnoredFields, IgnoredTable
from baton.router.http.openai.image_parts import KINDS, ImagePart, joined, of_source
from baton.router.http.openai.messages import Message
from baton.router.http.openai.schemas import MAX_MESSAGES
from baton.router.http.openai.strict_json import shown
from baton.router.http.openai.tools import Path

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
_ROLES = (USER, ASSISTANT, SYSTEM)
_TEXT, _THINKING, _REDACTED, _USE, _RESULT = "text", "thinking", "redacted_thinking", "tool_use", "tool_result"
_IMAGE = "image"
_MEMBERS: Mapping[str, tuple[str, ...]] = {
    _TEXT: ("text",),
    _IMAGE: ("source",),
    _THINKING: ("thinking", "signature"),
    _REDACTED: ("data",),
    _USE: ("id", "name", "input"),
    _RESULT: ("tool_use_id", "content"),
}
"""The members of each kind of block that are read, or mean nothing to anybody else."""
_BLOCKS_OF: Mapping[str, tuple[str, ...]] = {
    SYSTEM: (_TEXT,),
    USER: (_TEXT, _IMAGE, _RESULT),
    ASSISTANT: (_TEXT, _THINKING, _REDACTED, _USE),
}
_BLOCK: IgnoredTable = {
    "cache_control": COMMON["cache_control"],
    "caller": Ignored("functions are called by the model alone"),
    "citations": Ignored("only the text of a message reaches the model", ([],)),
    "is_error": Ignored("the model sees results as they are", (False,)),
}
_BILLING = "x-anthropic-billing-header:"
"""A block that agents put before their system prompt, for Anthropic's accounts. It changes with each request, so no
prefix would ever be found in a cache."""
_Block = Mapping[str, Any]


def _read_system(value: Any, info: ValidationInfo) -> str:
    """A text, or blocks of text, which are joined with newlines."""
    blocks = _blocks(value, SYSTEM, (), ignored_fields_of(info), "system[]")
    return "\n".join(block["text"] for block in blocks if not block["text"].startswith(_BILLING))


def _read_messages(value: Any, info: ValidationInfo) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise field_error("must be a non-empty list of messages")
    if len(value) > MAX_MESSAGES:
        raise field_error(f"holds more than {MAX_MESSAGES} messages")
    notes = ignored_fields_of(info)
    return tuple(found for index, sent in enumerate(value) for found in _read_message(sent, (index,), notes))


def _read_message(sent: Any, path: Path, notes: IgnoredFields) -> Iterable[Message]:
    if not isinstance(sent, dict):
        raise field_error("must be an object", path)
    role = sent.get("role")
    if role not in _ROLES:
        raise field_error(f"must be one of {', '.join(_ROLES)}", (*path, "role"))
    for name, member in sent.items():
        if name not in ("role", "content"):
            refuse_or_ignore(notes, name, member, _BLOCK, "messages[]", (*path, name))
    blocks = _blocks(sent.get("content"), role, (*path, "content"), notes, "messages[].content[]")
    return [_of_assistant(blocks)] if role == ASSISTANT else _of_user(role, blocks)


def _blocks(value: Any, role: str, path: Path, notes: IgnoredFields, place: str) -> list[_Block]:
    """The blocks of some content, checked; a string is one block of text."""
    if isinstance(value, str):
        return [{"type": _TEXT, "text": value}]
    if not isinstance(value, list):
        raise field_error("must be a string or a list of content blocks", path)
    for index, block in enumerate(value):
        _check_block(block, role, (*path, index), notes, place)
    return value


def _check_block(block: Any, role: str, path: Path, notes: IgnoredFields, place: str) -> None:
    if not isinstance(block, dict):
        raise field_error("must be an object", path)
    kind = block.get("type")
    if kind not in _BLOCKS_OF[role]:
        allowed = ", ".join(_BLOCKS_OF[role])
        sentence = f"{shown(kind)} is unsupported here: it must be one of {allowed}"
        raise field_error(sentence, (*path, "type"), UNSUPPORTED)
    for name, member in block.items():
        if name != "type" and name not in _MEMBERS[kind]:
            refuse_or_ignore(notes, name, member, _BLOCK, place, (*path, name))
    strings = {_TEXT: ("text",), _THINKING: ("thinking",), _USE: ("id", "name"), _RESULT: ("tool_use_id",)}
    for name in strings.get(kind, ()):
        if not isinstance(block.get(name), str):
            raise field_error("must be a string", (*path, name))
    if kind == _USE and not isinstance(block.get("input"), dict):
        raise field_error("must be an object", (*path, "input"))
    if kind == _IMAGE:
        _image(block.get("source"), (*path, "source"))
    if kind == _RESULT and block.get("content") is not None:
        _blocks(block["content"], SYSTEM, (*path, "content"), notes, f"{place}.content[]")


def _image(source: Any, path: Path) -> ImagePart:
    if not isinstance(source, dict):
        raise field_error("must be an object", path)
    kind = source.get("type")
    if kind != "base64":
        raise field_error(f"must be 'base64', not {shown(kind)}: images are not fetched", (*path, "type"), UNSUPPORTED)
    try:
        return of_source(source.get("media_type"), source.get("data"))
    except ValueError as error:
        raise field_error(str(error), path) from None


def _of_assistant(blocks: Iterable[_Block]) -> Message:
    members: dict[str, Any] = {"role": ASSISTANT}
    texts = [block["text"] for block in blocks if block["type"] == _TEXT]
    thoughts = [block["thinking"] for block in blocks if block["type"] == _THINKING]
    calls = tuple(_call(block) for block in blocks if block["type"] == _USE)
    if texts or not calls:
        members["content"] = "\n".join(texts)
    if thoughts:
        members["reasoning_content"] = "\n".join(thoughts)
    return Message.model_construct(**members, tool_calls=calls)


def _call(block: _Block) -> Mapping[str, Any]:
    function = {"name": block["name"], "arguments": json.dumps(block["input"], ensure_ascii=False)}
    return {"id": block["id"], "type": "function", "function": function}


def _of_user(role: str, blocks: Iterable[_Block]) -> list[Message]:
    found: list[Message] = []
    parts: list[str | ImagePart] = []
    for block in blocks:
        if block["type"] != _RESULT:
            parts.append(block["text"] if block["type"] == _TEXT else _image(block["source"], ()))
            continue
        found += _said(role, parts)
        parts = []
        content = _blocks_text(block.get("content"))
        found.append(Message.model_construct(role="tool", content=content, tool_call_id=block["tool_use_id"]))
    return found + _said(role, parts) or [Message.model_construct(role=role, content="")]


def _said(role: str, parts: list[str | ImagePart]) -> list[Message]:
    return [Message.model_construct(role=role, content=joined(parts))] if parts else []


def _blocks_text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(block["text"] for block in content)


def _block(kind: str, **required: Any) -> dict[str, Any]:
    properties = {"type": {"const": kind}, **required}
    return {"type": "object", "properties": properties, "required": [*properties]}


_STRING = {"type": "string", "maxLength": MAX_TEXT_CHARS}
_TEXT_BLOCK = _block(_TEXT, text=_STRING)
_TEXTS = {"anyOf": [_STRING, {"type": "array", "items": _TEXT_BLOCK}]}
_RESULT_BLOCK = _block(_RESULT, tool_use_id={"type": "string"})
_RESULT_BLOCK["properties"]["content"] = {"anyOf": [*_TEXTS["anyOf"], {"type": "null"}]}
_SOURCE = {"type": {"const": "base64"}, "media_type": {"enum": [*KINDS]}, "data": {"type": "string", "minLength": 1}}
_CONTENT_BLOCKS = [
    _TEXT_BLOCK,
    _block(_IMAGE, source={"type": "object", "properties": _SOURCE, "required": [*_SOURCE]}),
    _block(_THINKING, thinking=_STRING),
    _block(_REDACTED),
    _block(_USE, id={"type": "string"}, name={"type": "string"}, input={"type": "object"}),
    _RESULT_BLOCK,
]
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": [*_ROLES]},
        "content": {"anyOf": [_STRING, {"type": "array", "items": {"anyOf": _CONTENT_BLOCKS}}]},
    },
    "required": ["role", "content"],
}
SystemText = Annotated[str, PlainValidator(_read_system), WithJsonSchema(_TEXTS)]
Conversation = Annotated[
    tuple[Message, ...],
    PlainValidator(_read_messages),
    WithJsonSchema({"type": "array", "items": _MESSAGE, "minItems": 1, "maxItems": MAX_MESSAGES}),
]
