"""The chat and completions requests of the OpenAI interface, as clients may send them, with the usual extensions.

Owns names, types and defaults of the fields, and which combinations make no sense. Ranges of sampling parameters are
not repeated here: `decoding_params()` builds a `DecodingParams`, whose construction is the one validator. Does not know
tokenizers, nodes or sockets.

Rules for every field. Types are strict: "2", 1.0 and true are not the integer 1. null means the default. An unknown
field is refused with code `unknown_parameter`; one that OpenAI or vLLM know and Baton does not support with code
`unsupported_parameter`, unless its value is neutral (`tools: []`, `store: false`). Nothing is ignored that would change
the answer. Every error is an `InvalidRequest` whose `param` is the client's spelling, with a path such as
`messages[0].role`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from engine.text.choice_text import TextOptions
from router.openai.fields import (
    FIELD_ERROR,
    MAX_TEXT_CHARS,
    TOO_LONG,
    UNSUPPORTED,
    AllowedTokens,
    BadWords,
    Content,
    LogitBias,
    Metadata,
    Prompts,
    Stops,
    TemplateVariables,
    TokenIds,
    UserName,
    field_error,
)
from router.openai.prompt_report import PromptOptions
from router.openai.strict_json import member_path, parse_object, shown
from router.openai.unsupported import CHAT, COMMON, COMPLETION, MESSAGE, STREAM_OPTIONS, Table, is_harmless
from wire.errors import InvalidRequest, UnsupportedMediaType
from wire.sampling import MAX_TOP_LOGPROBS, DecodingParams, check_stop_strings

MAX_MODEL_NAME = 512
MAX_MESSAGES = 2048
MAX_CHOICES = 128
DEFAULT_COMPLETION_TOKENS = 16

_Request = TypeVar("_Request", bound=BaseModel)


class _Strict(BaseModel):
    """Common behaviour: strict types, null is the default, unknown and unsupported fields are told apart."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, hide_input_in_errors=True)

    unsupported: ClassVar[Table] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral_fields(cls, members: Any) -> Any:
        if not isinstance(members, dict):
            raise field_error("must be an object")
        fields = {}
        for name, value in members.items():
            if name not in cls.unsupported:
                if name not in cls.model_fields:
                    raise field_error("is not a parameter of this endpoint", (name,), "unknown_parameter")
                if value is not None:
                    fields[name] = value
            elif not is_harmless(value, cls.unsupported[name]):
                raise field_error("is not supported", (name,), UNSUPPORTED)
        return fields


class StreamOptions(_Strict):
    """`include_usage`: one more chunk before the end, with the usage and no choices."""

    unsupported = STREAM_OPTIONS

    include_usage: bool = False


class Message(_Strict):
    """One turn of a conversation. Text parts are joined with newlines; `developer` is today's name for `system`."""

    unsupported = MESSAGE

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: UserName | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_tool_roles(cls, members: Any) -> Any:
        if isinstance(members, dict) and members.get("role") in ("tool", "function"):
            raise field_error("is unsupported with this value: tools are not served", ("role",), UNSUPPORTED)
        return members

    def for_template(self) -> dict[str, object]:
        """The message as a chat template expects it; templates know `system`, hardly any knows `developer`."""
        role = "system" if self.role == "developer" else self.role
        named: dict[str, object] = {} if self.name is None else {"name": self.name}
        return {"role": role, "content": self.content, **named}


class _GenerationRequest(_Strict):
    """The fields that both endpoints share."""

    model: Annotated[str, Field(min_length=1, max_length=MAX_MODEL_NAME)]
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stop: Stops = ()
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: LogitBias = ()
    user: UserName | None = None
    metadata: Metadata | None = None
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop_token_ids: TokenIds = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    return_timings: bool = False
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    allowed_token_ids: AllowedTokens = ()
    bad_words: BadWords = ()

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise field_error("is allowed only when stream is true", ("stream_options",))
        if self.prompt_logprobs is not None and self.stream:
            raise field_error("is allowed only when stream is false", ("prompt_logprobs",))
        check_stop_strings(self.stop)
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def num_logprobs(self) -> int | None:
        """The number of alternatives to report beside each token; None: no log probabilities at all."""
        raise NotImplementedError

    @property
    def output_limit(self) -> tuple[str, int | None]:
        """The limit of generated tokens, and the name under which the client knows it."""
        return "max_tokens", self.max_tokens

    @property
    def prompt_options(self) -> PromptOptions:
        """What the answer is to tell of the prompt."""
        return PromptOptions(num_listed=self.prompt_logprobs)

    @property
    def generates(self) -> bool:
        """Whether the answer holds generated tokens; otherwise it tells of the prompt alone."""
        return True

    def decoding_params(self) -> DecodingParams:
        """The parameters for nodes, of choice 0. Raises `InvalidRequest` for a value that is out of range.

        `seed` stays None when the client gave none; `max_tokens` None means up to the end of the context.
        """
        limit_name, max_tokens = self.output_limit
        try:
            return DecodingParams(
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                min_p=self.min_p,
                repetition_penalty=self.repetition_penalty,
                presence_penalty=self.presence_penalty,
                frequency_penalty=self.frequency_penalty,
                logit_bias_ids=tuple(token_id for token_id, _ in self.logit_bias),
                logit_bias_values=tuple(value for _, value in self.logit_bias),
                seed=self.seed,
                max_tokens=max_tokens,
                min_tokens=self.min_tokens,
                stop_token_ids=self.stop_token_ids,
                ignore_eos=self.ignore_eos,
                logprobs=self.num_logprobs,
                prompt_logprobs=self.prompt_options.num_wanted,
                allowed_token_ids=self.allowed_token_ids,
            )
        except InvalidRequest as error:
            if error.param != "max_tokens":
                raise
            raise InvalidRequest(error.message.replace("max_tokens", limit_name, 1), limit_name, error.code) from None

    def text_options(self) -> TextOptions:
        """The options that concern the text of a choice."""
        return TextOptions(self.stop, self.include_stop_str_in_output, self.skip_special_tokens, self.min_tokens)


class ChatCompletionRequest(_GenerationRequest):
    """The body of `POST /v1/chat/completions`."""

    unsupported = {**COMMON, **CHAT}

    messages: Annotated[list[Message], FailFast(), Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    add_generation_prompt: bool = True
    safety_identifier: UserName | None = None
    prompt_cache_key: UserName | None = None
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise field_error("is allowed only when logprobs is true", ("top_logprobs",))
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise field_error("differs from max_tokens; send one of them", ("max_completion_tokens",))
        if sum(len(message.content) for message in self.messages) > MAX_TEXT_CHARS:
            raise field_error(f"hold more than {MAX_TEXT_CHARS} characters together", ("messages",), TOO_LONG)
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def output_limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    def template_messages(self) -> list[dict[str, object]]:
        """The conversation as `ChatTemplate.render` takes it."""
        return [message.for_template() for message in self.messages]


class CompletionRequest(_GenerationRequest):
    """The body of `POST /v1/completions`. `prompt` is always a tuple: of texts, or of tuples of token ids."""

    unsupported = {**COMMON, **COMPLETION}

    prompt: Prompts
    max_tokens: int | None = DEFAULT_COMPLETION_TOKENS
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    best_of: int | None = None
    echo: bool = False

    @model_validator(mode="after")
    def _check_completion(self) -> Self:
        if self.best_of is not None and self.best_of != self.n:
            raise field_error("is supported only when it equals n", ("best_of",), UNSUPPORTED)
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompt_options(self) -> PromptOptions:
        return PromptOptions(self.echo, self.logprobs if self.echo else None, self.prompt_logprobs)

    @property
    def generates(self) -> bool:
        return not (self.echo and self.max_tokens == 0)

    @property
    def output_limit(self) -> tuple[str, int | None]:
        # a node samples one token at least, which `NoText` drops
        return "max_tokens", self.max_tokens if self.generates else 1

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `InvalidRequest` when a prompt of token ids names one outside a vocabulary of `vocab_size`."""
        for index, prompt in enumerate(self.prompt):
            if not isinstance(prompt, str) and max(prompt) >= vocab_size:
                raise InvalidRequest(
                    f"prompt: token id {max(prompt)} is outside the vocabulary of {vocab_size}",
                    "prompt" if len(self.prompt) == 1 else f"prompt[{index}]",
                )


def parse_body(body: bytes, content_type: str | None, schema: type[_Request]) -> _Request:
    """The request in an HTTP body.

    Raises `UnsupportedMediaType` for anything but JSON in UTF-8, `InvalidRequest` for whatever else is wrong, and no
    other error, whatever the bytes are. Ranges of sampling parameters are checked by `decoding_params()`.
    """
    _check_content_type(content_type)
    try:
        return schema.model_validate(parse_object(body))
    except ValidationError as error:
        raise _invalid_request(error.errors(include_url=False, include_input=False)[0]) from None


def _check_content_type(content_type: str | None) -> None:
    if content_type is None:
        raise UnsupportedMediaType("the Content-Type header is missing: send application/json")
    media_type, *parameters = (part.strip().lower() for part in content_type.split(";"))
    if media_type != "application/json":
        raise UnsupportedMediaType(f"content type {shown(media_type)} is not supported: send application/json")
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "charset" and value.strip().strip('"') not in ("utf-8", "utf8"):
            raise UnsupportedMediaType(f"charset {shown(value)} is not supported: send utf-8")


def _invalid_request(details: ErrorDetails) -> InvalidRequest:
    """Turns pydantic's first error into an `InvalidRequest` with the client's spelling of the field."""
    context: dict[str, Any] = details.get("ctx", {})
    param = ""
    for part in (*details["loc"], *context.get("path", ())):
        param = f"{param}[{part}]" if isinstance(part, int) else member_path(param, part)
    message = "is required" if details["type"] == "missing" else details["msg"]
    separator = " " if details["type"] in ("missing", FIELD_ERROR) else ": "
    return InvalidRequest(f"{param or 'the request'}{separator}{message}", param or None, context.get("code"))
