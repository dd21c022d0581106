"""The request of /v1/responses, and its translation into one of /v1/chat/completions.

Owns the fields of this endpoint; `responses_input` has the items of its input. Parameters of sampling are those of the
other endpoints. Does not know what is stored: a request that follows a response has its own items until somebody puts
the earlier ones before them (`Conversation.after`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, PlainValidator, ValidationInfo, WithJsonSchema, model_validator

from baton.router.http.openai import ignored
from baton.router.http.openai.fields import (
    MAX_TEXT_CHARS,
    TOO_LONG,
    UNSUPPORTED,
    ReasoningEffort,
    ThinkingBudget,
    UserName,
    field_error,
    ignored_fields_of,
    refuse_or_ignore,
)
from baton.router.http.openai.messages import Message
from baton.router.http.openai.responses_input import INPUT, Conversation, read_input
from baton.router.http.openai.responses_tools import ResponsesToolChoice, ResponsesTools
from baton.router.http.openai.schemas import ChatCompletionRequest, GenerationRequest
from baton.router.http.openai.strict_json import shown
from baton.router.http.openai.strict_model import Strict
from baton.router.http.openai.structured import TEXT_FORMAT, AskedGrammar, read_text_format
from baton.router.http.openai.tools import ToolFields
from baton.router.http.openai.translation import TranslatedRequest
from baton.router.http.openai.unsupported import COMMON, Table
from baton.wire.sampling import MAX_TOP_LOGPROBS

MAX_RESPONSE_ID = 128
INCLUDE_LOGPROBS = "message.output_text.logprobs"

INCLUDABLE = (
    INCLUDE_LOGPROBS,
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
)
"""What OpenAI lets a client ask for. All but the first belong to tools, of which there are none, to images, which are
not told back, or to reasoning that is told to nobody; here it is told."""

_OF_OTHER_ENDPOINTS: Table = {
    "max_tokens": (),
    "n": (1,),
    "response_format": (),
    "return_timings": (False,),
    "return_token_ids": (False,),
}
_USED = ("metadata", "prompt_cache_key", "safety_identifier", "store", "user")
"""Fields that other endpoints ignore."""

_IGNORABLE: ignored.IgnoredTable = {
    **{name: rule for name, rule in ignored.COMMON.items() if name not in _USED},
    "access_programs": ignored.Ignored("it concerns OpenAI's own service"),
    "background_options": ignored.Ignored("answers are not made in the background"),
    "max_tool_calls": ignored.Ignored("it limits tools that the server runs, and there are none"),
}
_TEXT_IGNORABLE: ignored.IgnoredTable = {"verbosity": ignored.Ignored(ignored.CHAT["verbosity"].reason, ("medium",))}

RESPONSES: Table = {
    **COMMON,
    **_OF_OTHER_ENDPOINTS,
    "background": (False,),
    "context_management": ([],),
    "image": (),
    "prompt": (),
    "stream_options": ({}, {"include_obfuscation": False}, {"include_obfuscation": None}),
}


def _read_include(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise field_error("must be a list")
    for index, name in enumerate(value):
        if name not in INCLUDABLE:
            raise field_error(f"must be one of {', '.join(INCLUDABLE)}", (index,))
    return tuple(value)


def _read_text_config(value: Any, info: ValidationInfo) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise field_error("must be an object")
    notes = ignored_fields_of(info)
    for name, member in value.items():
        if name == "format" and member is not None:
            read_text_format(member, (name,))
        elif name not in ("format", "verbosity"):
            raise field_error("is not a member of text", (name,), "unknown_parameter")
        elif name == "verbosity":
            refuse_or_ignore(notes, name, member, _TEXT_IGNORABLE, "text", (name,))
    return value


_SUMMARY = ignored.Ignored("reasoning is told as it is")


class Reasoning(Strict):
    """`reasoning`: how much of it there is to be."""

    ignorable: ClassVar[ignored.IgnoredTable] = {
        "context": ignored.Ignored("the chat template decides which earlier reasoning the model sees", ("auto",)),
        "generate_summary": _SUMMARY,
        "mode": ignored.Ignored("there is one mode", ("standard",)),
        "summary": _SUMMARY,
    }
    place: ClassVar[str] = "reasoning"

    effort: ReasoningEffort | None = None


def _read_truncation(value: Any) -> str:
    if value == "auto":
        raise field_error("is supported only as 'disabled': nothing is cut from a conversation", (), UNSUPPORTED)
    if value != "disabled":
        raise field_error(f"must be 'disabled', not {shown(value)}")
    return "disabled"


def _read_conversation(value: Any) -> str:
    """The id of a conversation, which may stand in an object."""
    found = value.get("id") if isinstance(value, dict) and value.keys() == {"id"} else value
    if not isinstance(found, str) or len(found) > MAX_RESPONSE_ID:
        raise field_error(f"must be an id of at most {MAX_RESPONSE_ID} characters, or an object with it as id")
    return found


_ID = {"type": "string", "maxLength": MAX_RESPONSE_ID}
_CONVERSATION = {"anyOf": [_ID, {"type": "object", "properties": {"id": _ID}, "required": ["id"]}]}
_TEXT_CONFIG = {
    "type": "object",
    "properties": {"format": {"anyOf": [TEXT_FORMAT, {"type": "null"}]}, "verbosity": {"type": ["string", "null"]}},
    "additionalProperties": False,
}
_TextConfig = Annotated[Mapping[str, Any], PlainValidator(_read_text_config), WithJsonSchema(_TEXT_CONFIG)]


class _Chat(ChatCompletionRequest):
    """A request of this endpoint as one of chat. Errors about it name this endpoint's fields."""

    parameters_field: ClassVar[str] = "parameters"

    @property
    def include_usage(self) -> bool:
        """The last event of a stream is the whole answer with its usage."""
        return True

    @property
    def output_limit(self) -> tuple[str, int | None]:
        return "max_output_tokens", self.max_tokens

    @property
    def images_field(self) -> str:
        return ResponsesRequest.conversation_field

    def grammar_fields(self) -> list[tuple[str, AskedGrammar]]:
        return [("text" if name == "response_format" else name, asked) for name, asked in super().grammar_fields()]


class ResponsesRequest(GenerationRequest, ToolFields, TranslatedRequest):
    """The body of `POST /v1/responses`. `input` is a conversation, whatever form it came in."""

    unsupported: ClassVar[Table] = RESPONSES
    ignorable: ClassVar[ignored.IgnoredTable] = _IGNORABLE
    conversation_field: ClassVar[str] = "input"

    input: Annotated[Conversation, PlainValidator(read_input), WithJsonSchema(INPUT)]
    previous_response_id: Annotated[str, Field(max_length=MAX_RESPONSE_ID)] | None = None
    conversation: Annotated[str, PlainValidator(_read_conversation), WithJsonSchema(_CONVERSATION)] | None = None
    store: bool = True
    instructions: Annotated[str, Field(max_length=MAX_TEXT_CHARS)] | None = None
    tools: ResponsesTools = ()
    tool_choice: ResponsesToolChoice | None = None
    max_output_tokens: int | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    include: Annotated[
        tuple[str, ...],
        PlainValidator(_read_include),
        WithJsonSchema({"type": "array", "items": {"enum": [*INCLUDABLE]}}),
    ] = ()
    text: _TextConfig = Field(default_factory=dict)
    reasoning: Reasoning | None = None
    thinking_token_budget: ThinkingBudget | None = None
    truncation: Annotated[str, PlainValidator(_read_truncation), WithJsonSchema({"enum": ["disabled"]})] = "disabled"
    safety_identifier: UserName | None = None
    prompt_cache_key: UserName | None = None

    @model_validator(mode="after")
    def _check_size(self) -> ResponsesRequest:
        if self.input.fault:
            raise field_error(self.input.fault, ("input",), TOO_LONG)
        return self

    @model_validator(mode="after")
    def _check_what_it_follows(self) -> ResponsesRequest:
        if self.conversation is not None and self.previous_response_id is not None:
            raise field_error("may not be sent together with previous_response_id", ("conversation",))
        return self

    def grammar_fields(self) -> list[tuple[str, AskedGrammar]]:
        """`text.format` too, and what enforces a call."""
        found, text, tools = super().grammar_fields(), self._asked_format, self.tool_grammar()
        asked = [] if text is None else [("text", text)]
        return [*asked, *found, *([] if tools is None else [("tools", tools)])]

    @property
    def _asked_format(self) -> AskedGrammar | None:
        return read_text_format(self.text_format, ("format",))

    @property
    def text_format(self) -> Mapping[str, Any]:
        """`text.format` as it was sent."""
        return self.text.get("format") or {"type": "text"}

    def as_chat(self) -> ChatCompletionRequest:
        """The instructions are its first message."""
        instructions = [] if self.instructions is None else [_system(self.instructions)]
        shared = {name: getattr(self, name) for name in (*GenerationRequest.model_fields, *ToolFields.model_fields)}
        return _Chat.model_construct(
            self.model_fields_set,
            **shared
            | {
                "messages": [*instructions, *self.input.messages],
                "max_tokens": self.max_output_tokens,
                "logprobs": self.top_logprobs is not None or INCLUDE_LOGPROBS in self.include,
                "top_logprobs": self.top_logprobs,
                "response_format": self._asked_format,
                "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
                "thinking_token_budget": self.thinking_token_budget,
            },
        )


def _system(text: str) -> Message:
    return Message.model_construct(role="system", content=text)
