"""The request of /v1/responses: text in, text out.

Owns the fields of this endpoint and how its input becomes a conversation. Parameters of sampling are those of the other
endpoints. Answers are not stored: `store: true` is ignored with a warning, as everywhere; what would need a stored
answer is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from router.openai import ignored
from router.openai.fields import MAX_TEXT_CHARS, TOO_LONG, UNSUPPORTED, UserName, field_error
from router.openai.messages import Message
from router.openai.schemas import MAX_MESSAGES, ChatCompletionRequest, GenerationRequest
from router.openai.strict_json import shown
from router.openai.structured import TEXT_FORMAT, AskedGrammar, read_text_format
from router.openai.unsupported import COMMON, Table, is_harmless
from wire.sampling import MAX_TOP_LOGPROBS

INCLUDE_LOGPROBS = "message.output_text.logprobs"
INPUT_ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = ("input_text", "output_text", "text")
NOT_STORED = "answers are not stored here, so send the whole conversation as input"

_INCLUDABLE = (
    INCLUDE_LOGPROBS,
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
)
"""What OpenAI lets a client ask for. All but the first belong to tools, images and reasoning, of which there are none
in an answer of text."""

_VERBOSITY = ("medium",)
_OF_OTHER_ENDPOINTS: Table = {
    "max_tokens": (),
    "n": (1,),
    "response_format": (),
    "return_timings": (False,),
    "return_token_ids": (False,),
}
_ECHOED = ("metadata", "prompt_cache_key", "safety_identifier", "user")
"""Fields that other endpoints ignore and that an answer of this one repeats."""

_IGNORABLE = {name: rule for name, rule in ignored.COMMON.items() if name not in _ECHOED}

RESPONSES: Table = {
    **COMMON,
    **_OF_OTHER_ENDPOINTS,
    "background": (False,),
    "context_management": ([],),
    "conversation": (),
    "max_tool_calls": (),
    "parallel_tool_calls": (True, False),
    "previous_response_id": (),
    "prompt": (),
    "prompt_cache_retention": ("in_memory",),
    "stream_options": ({}, {"include_obfuscation": False}, {"include_obfuscation": None}),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}


def _read_input(value: Any) -> tuple[Message, ...]:
    if isinstance(value, str):
        return (_message("user", value),)
    if not isinstance(value, list) or not value:
        raise field_error("must be a string or a non-empty list of messages")
    if len(value) > MAX_MESSAGES:
        raise field_error(f"holds more than {MAX_MESSAGES} items")
    return tuple(_read_item(item, index) for index, item in enumerate(value))


def _read_item(item: Any, index: int) -> Message:
    """One message. Members that only name it or tell its state (`id`, `status`, ...) do not matter here."""
    if not isinstance(item, dict):
        raise field_error("must be an object", (index,))
    kind = item.get("type", "message")
    if kind == "item_reference":
        raise field_error(f"is unsupported with this value: {NOT_STORED}", (index, "type"), UNSUPPORTED)
    if kind != "message":
        raise field_error("is unsupported with this value: input may hold messages only", (index, "type"), UNSUPPORTED)
    role, content = item.get("role"), item.get("content")
    if role not in INPUT_ROLES:
        raise field_error(f"must be one of {', '.join(INPUT_ROLES)}", (index, "role"))
    if isinstance(content, str):
        return _message(role, content)
    if not isinstance(content, list) or not content:
        raise field_error("must be a string or a non-empty list of text parts", (index, "content"))
    return _message(role, "\n".join(_read_part(part, (index, "content", at)) for at, part in enumerate(content)))


def _read_part(part: Any, path: tuple[str | int, ...]) -> str:
    if not isinstance(part, dict):
        raise field_error("must be an object", path)
    kind, text = part.get("type"), part.get("text")
    if kind not in TEXT_PARTS:
        raise field_error(f"must be one of {', '.join(TEXT_PARTS)}: text only", (*path, "type"), UNSUPPORTED)
    if not isinstance(text, str):
        raise field_error("must be a string", (*path, "text"))
    return text


def _message(role: str, text: str) -> Message:
    return Message.model_construct(role=role, content=text)


def _read_include(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise field_error("must be a list")
    for index, name in enumerate(value):
        if name not in _INCLUDABLE:
            raise field_error(f"must be one of {', '.join(_INCLUDABLE)}", (index,))
    return tuple(value)


def _read_text_config(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise field_error("must be an object")
    for name, member in value.items():
        if name not in ("format", "verbosity"):
            raise field_error("is not a member of text", (name,), "unknown_parameter")
        if name == "format" and member is not None:
            read_text_format(member, (name,))
        if name == "verbosity" and not is_harmless(member, _VERBOSITY):
            raise field_error("is supported only as 'medium'", (name,), UNSUPPORTED)
    return value


def _read_reasoning(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise field_error("must be an object")
    for name, member in value.items():
        if not is_harmless(member, ("none",) if name == "effort" else ()):
            raise field_error("is not supported: the model answers without reasoning", (name,), UNSUPPORTED)
    return value


def _read_truncation(value: Any) -> str:
    if value == "auto":
        raise field_error("is supported only as 'disabled': nothing is cut from a conversation", (), UNSUPPORTED)
    if value != "disabled":
        raise field_error(f"must be 'disabled', not {shown(value)}")
    return "disabled"


_TEXT = {"type": "string", "maxLength": MAX_TEXT_CHARS}
_PART = {
    "type": "object",
    "properties": {"type": {"enum": [*TEXT_PARTS]}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_ITEM = {
    "type": "object",
    "properties": {
        "type": {"const": "message"},
        "role": {"enum": [*INPUT_ROLES]},
        "content": {"anyOf": [_TEXT, {"type": "array", "items": _PART, "minItems": 1}]},
    },
    "required": ["role", "content"],
}
_INPUT = {"anyOf": [_TEXT, {"type": "array", "items": _ITEM, "minItems": 1, "maxItems": MAX_MESSAGES}]}
_TEXT_CONFIG = {
    "type": "object",
    "properties": {"format": {"anyOf": [TEXT_FORMAT, {"type": "null"}]}, "verbosity": {"enum": [*_VERBOSITY, None]}},
    "additionalProperties": False,
}
_REASONING = {
    "type": "object",
    "properties": {"effort": {"enum": ["none", None]}},
    "additionalProperties": {"type": "null"},
}


_TextConfig = Annotated[Mapping[str, Any], PlainValidator(_read_text_config), WithJsonSchema(_TEXT_CONFIG)]
_Reasoning = Annotated[Mapping[str, Any], PlainValidator(_read_reasoning), WithJsonSchema(_REASONING)]


class ResponsesRequest(GenerationRequest):
    """The body of `POST /v1/responses`. `input` is a conversation, whatever form it came in."""

    unsupported = RESPONSES
    ignorable = _IGNORABLE

    input: Annotated[tuple[Message, ...], PlainValidator(_read_input), WithJsonSchema(_INPUT)]
    instructions: Annotated[str, Field(max_length=MAX_TEXT_CHARS)] | None = None
    max_output_tokens: int | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    include: Annotated[
        tuple[str, ...],
        PlainValidator(_read_include),
        WithJsonSchema({"type": "array", "items": {"enum": [*_INCLUDABLE]}}),
    ] = ()
    text: _TextConfig = Field(default_factory=dict)
    reasoning: _Reasoning = Field(default_factory=dict)
    truncation: Annotated[str, PlainValidator(_read_truncation), WithJsonSchema({"enum": ["disabled"]})] = "disabled"
    safety_identifier: UserName | None = None
    prompt_cache_key: UserName | None = None

    @model_validator(mode="before")
    @classmethod
    def _explain_what_needs_storage(cls, members: Any) -> Any:
        for name in ("previous_response_id", "conversation"):
            if isinstance(members, dict) and members.get(name) is not None:
                raise field_error(f"is not supported: {NOT_STORED}", (name,), UNSUPPORTED)
        return members

    @model_validator(mode="after")
    def _check_size(self) -> ResponsesRequest:
        if sum(len(message.content) for message in self.input) > MAX_TEXT_CHARS:
            raise field_error(f"holds more than {MAX_TEXT_CHARS} characters", ("input",), TOO_LONG)
        return self

    def grammar_fields(self) -> list[tuple[str, AskedGrammar]]:
        """`text.format` too."""
        found = super().grammar_fields()
        asked = read_text_format(self.text_format, ("format",))
        return found if asked is None else [("text", asked), *found]

    @property
    def text_format(self) -> Mapping[str, Any]:
        """`text.format` as it was sent."""
        return self.text.get("format") or {"type": "text"}

    @property
    def include_usage(self) -> bool:
        """The last event of a stream is the whole answer with its usage."""
        return True

    @property
    def num_logprobs(self) -> int | None:
        if self.top_logprobs is None and INCLUDE_LOGPROBS not in self.include:
            return None
        return self.top_logprobs or 0

    @property
    def output_limit(self) -> tuple[str, int | None]:
        return "max_output_tokens", self.max_output_tokens

    def as_chat(self) -> ChatCompletionRequest:
        """The same conversation for /v1/chat/completions, the instructions as its first message."""
        instructions = [] if self.instructions is None else [_message("system", self.instructions)]
        return ChatCompletionRequest.model_construct(model=self.model, messages=[*instructions, *self.input])
