"""The requests of Anthropic's /v1/messages, and their translation into those of /v1/chat/completions.

Owns the fields; `conversation` and `functions` have the shapes of messages and tools. What only tunes Anthropic's own
service is ignored with a warning, as everywhere: agents send a lot of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from baton.router.http.anthropic.conversation import ASSISTANT, SYSTEM, Conversation, SystemText
from baton.router.http.anthropic.functions import FunctionChoice, Functions
from baton.router.http.openai import ignored
from baton.router.http.openai.fields import MAX_TEXT_CHARS, TOO_LONG, ReasoningEffort, Stops, field_error
from baton.router.http.openai.messages import Message
from baton.router.http.openai.schemas import MAX_MODEL_NAME, ChatCompletionRequest
from baton.router.http.openai.strict_model import Strict
from baton.router.http.openai.structured import AskedGrammar, read_text_format
from baton.router.http.openai.tools import check_choice
from baton.router.http.openai.translation import TranslatedRequest
from baton.router.http.openai.unsupported import Table
from baton.wire.errors import InvalidRequest
from baton.wire.sampling import check_stop_strings

_NOT_ANTHROPICS = ignored.Ignored("it concerns Anthropic's own service")
IGNORABLE: ignored.IgnoredTable = {
    "cache_control": ignored.COMMON["cache_control"],
    "context_management": ignored.Ignored("nothing is cut from a conversation"),
    "diagnostics": _NOT_ANTHROPICS,
    "inference_geo": _NOT_ANTHROPICS,
    "metadata": ignored.COMMON["metadata"],
    "service_tier": ignored.Ignored("there is one tier of service", ("auto", "standard_only")),
    "speed": ignored.Ignored("there is one speed", ("standard",)),
}
_UNSUPPORTED: Table = {"compaction": (), "container": (), "mcp_servers": ([],), "thread": ()}


class Thinking(Strict):
    """`thinking`: whether the model reasons before it answers. Without it the model does as it is used to."""

    place: ClassVar[str] = "thinking"

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    display: Literal["summarized", "omitted"] | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether the model is to reason."""
        return self.type != "disabled"

    @property
    def is_shown(self) -> bool:
        """Whether the answer is to tell it."""
        return self.is_wanted and self.display != "omitted"


def _read_format(value: Any) -> AskedGrammar | None:
    if not isinstance(value, dict) or value.get("type") != "json_schema":
        raise field_error("must be 'json_schema'", ("type",))
    return read_text_format(value)


_FORMAT = {
    "type": "object",
    "properties": {"type": {"const": "json_schema"}, "schema": {"type": "object"}},
    "required": ["type", "schema"],
    "additionalProperties": False,
}
Format = Annotated[AskedGrammar | None, PlainValidator(_read_format), WithJsonSchema(_FORMAT)]


class OutputConfig(Strict):
    """`output_config`: how much reasoning there is to be, and the schema that the answer is valid by."""

    place: ClassVar[str] = "output_config"

    effort: ReasoningEffort | None = None
    format: Format = None


class _Chat(ChatCompletionRequest):
    """A request of this endpoint as one of chat. Errors about it name this endpoint's fields."""

    parameters_field: ClassVar[str] = "input_schema"

    @property
    def include_usage(self) -> bool:
        """The last event but one of a stream has it."""
        return True

    @property
    def include_continuous_usage(self) -> bool:
        """The first event of a stream has the number of tokens of the prompt."""
        return True

    @property
    def images_field(self) -> str:
        return CountTokensRequest.conversation_field

    def grammar_fields(self) -> list[tuple[str, AskedGrammar]]:
        names = {"response_format": "output_config.format"}
        return [(names.get(name, name), asked) for name, asked in super().grammar_fields()]


class CountTokensRequest(TranslatedRequest):
    """The body of `POST /v1/messages/count_tokens`: the fields of /v1/messages that make the prompt."""

    unsupported: ClassVar[Table] = _UNSUPPORTED
    ignorable: ClassVar[ignored.IgnoredTable] = IGNORABLE
    conversation_field: ClassVar[str] = "messages"

    model: Annotated[str, Field(min_length=1, max_length=MAX_MODEL_NAME)]
    messages: Conversation
    system: SystemText = ""
    tools: Functions = ()
    tool_choice: FunctionChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: Format = None

    @model_validator(mode="after")
    def _check(self) -> CountTokensRequest:
        if sum(message.num_chars for message in self.messages) + len(self.system) > MAX_TEXT_CHARS:
            raise field_error(f"hold more than {MAX_TEXT_CHARS} characters together", ("messages",), TOO_LONG)
        check_choice(self.tools, None if self.tool_choice is None else self.tool_choice.choice)
        if len(self.as_chat().grammar_fields()) > 1:
            raise field_error("contradicts a format of the output; send one of them", ("tool_choice",))
        return self

    def as_chat(self) -> ChatCompletionRequest:
        """The system prompt is its first message. A last message of the assistant is continued."""
        return _Chat.model_construct(self.model_fields_set, **self._members())

    def _members(self) -> dict[str, Any]:
        system = [Message.model_construct(role=SYSTEM, content=self.system)] if self.system else []
        last, config, choice, thinking = self.messages[-1], self.output_config, self.tool_choice, self.thinking
        is_continued = last.role == ASSISTANT and bool(last.content) and not last.tool_calls
        variables: Mapping[str, Any] = {} if thinking is None else {"enable_thinking": thinking.is_wanted}
        return {
            "model": self.model,
            "messages": [*system, *self.messages],
            "tools": self.tools,
            "tool_choice": None if choice is None else choice.choice,
            "parallel_tool_calls": choice is None or choice.is_parallel,
            "response_format": (None if config is None else config.format) or self.output_format,
            "reasoning_effort": None if config is None else config.effort,
            "chat_template_kwargs": variables,
            "include_reasoning": thinking is None or thinking.is_shown,
            "thinking_token_budget": None if thinking is None else thinking.budget_tokens,
            "continue_final_message": is_continued,
        }


class MessagesRequest(CountTokensRequest):
    """The body of `POST /v1/messages`."""

    max_tokens: int
    stream: bool = False
    stop_sequences: Stops = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    @model_validator(mode="after")
    def _check_stops(self) -> MessagesRequest:
        try:
            check_stop_strings(self.stop_sequences)
        except InvalidRequest as error:
            raise field_error(f"cannot be served: {error.message}", ("stop_sequences",)) from None
        return self

    def _members(self) -> dict[str, Any]:
        names = ("max_tokens", "stream", "temperature", "top_p", "top_k")
        sampling = {name: getattr(self, name) for name in names}
        return {**super()._members(), **sampling, "stop": self.stop_sequences}
