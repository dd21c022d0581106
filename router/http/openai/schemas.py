"""The chat and completions requests of the OpenAI interface, as clients may send them, with the usual extensions.

Owns names, types and defaults of the fields, and which combinations make no sense. Ranges of sampling parameters are
not repeated here: `decoding_params()` builds a `DecodingParams`, whose construction is the one validator. Does not know
tokenizers, nodes or sockets.

Rules for every field. Types are strict: "2", 1.0 and true are not the integer 1. null means the default. A field that
would change the answer and is not supported is refused with code `unsupported_parameter`, unless its value is neutral
(`echo: false`); one that changes nothing is ignored and noted, see `ignored`. Every error is an `InvalidRequest` whose
`param` is the client's spelling, with a path such as `messages[0].role`.
"""

from __future__ import annotations

import json
from typing import Annotated, ClassVar, Literal, Self

from pydantic import (
    FailFast,
    Field,
    model_validator,
)

from baton.engine.text.choice_text import TextOptions
from baton.router.http.openai import ignored
from baton.router.http.openai.fields import (
    MAX_TEXT_CHARS,
    TOO_LONG,
    UNSUPPORTED,
    BadWords,
    CacheSalt,
    Documents,
    Metadata,
    Prompts,
    ReasoningEffort,
    Stops,
    TemplateVariables,
    ThinkingBudget,
    UserName,
    field_error,
)
from baton.router.http.openai.image_parts import images_of
from baton.router.http.openai.latency_goals import MAX_GOAL_MS
from baton.router.http.openai.messages import Message
from baton.router.http.openai.prediction import Prediction
from baton.router.http.openai.prompt_report import PromptOptions
from baton.router.http.openai.sampling_fields import SamplingFields
from baton.router.http.openai.strict_model import Strict
from baton.router.http.openai.structured import AskedGrammar, ResponseFormatField, StructuredFields
from baton.router.http.openai.tools import ToolFields
from baton.router.http.openai.unsupported import CHAT, COMMON, COMPLETION, Table
from baton.wire.errors import InvalidRequest
from baton.wire.grammar import Grammar
from baton.wire.sampling import MAX_TOP_LOGPROBS, DecodingParams, check_stop_strings

MAX_MODEL_NAME = 512
MAX_MESSAGES = 2048
MAX_CHOICES = 128
MAX_BEST_OF = 20
MAX_TEMPLATE_CHARS = 2**17
DEFAULT_COMPLETION_TOKENS = 16


class StreamOptions(Strict):
    """`include_usage`: one more chunk before the end, with the usage and no choices. `continuous_usage_stats`: together
    with it, every other chunk says how many tokens its choice has so far."""

    ignorable = ignored.STREAM_OPTIONS
    place = "stream_options"
    refuses_unknown = True

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(Strict, StructuredFields, SamplingFields):
    """The fields that all endpoints share that generate text."""

    model: Annotated[str, Field(min_length=1, max_length=MAX_MODEL_NAME)]
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stop: Stops = ()
    user: UserName | None = None
    metadata: Metadata | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    return_timings: bool = False
    detokenize: bool = True
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] = "left"
    cache_salt: CacheSalt | None = None
    priority: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    bad_words: BadWords = ()
    prediction: Prediction | None = None
    goal_ttft_ms: Annotated[float, Field(gt=0, le=MAX_GOAL_MS)] | None = None
    goal_tpot_ms: Annotated[float, Field(gt=0, le=MAX_GOAL_MS)] | None = None

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise field_error("is allowed only when stream is true", ("stream_options",))
        if self.prompt_logprobs is not None and self.stream:
            raise field_error("is allowed only when stream is false", ("prompt_logprobs",))
        check_stop_strings(self.stop)
        if self.stop and not self.detokenize:
            raise field_error("needs text to look for: it is not allowed when detokenize is false", ("stop",))
        if self.truncate_prompt_tokens == 0:
            raise field_error("must be -1, or at least 1", ("truncate_prompt_tokens",))
        return self

    @property
    def with_token_ids(self) -> bool:
        """Whether the answer has token ids: without text they are all there is."""
        return self.return_token_ids or not self.detokenize

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def include_continuous_usage(self) -> bool:
        """Whether every chunk of a stream says how many tokens its choice has so far."""
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def num_candidates(self) -> int:
        """How many choices are generated for each prompt. The client gets the best `n` of them."""
        return self.n

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
                **self.sampling(),
                max_tokens=max_tokens,
                # candidates are compared by them
                logprobs=0 if self.num_logprobs is None and self.num_candidates > self.n else self.num_logprobs,
                prompt_logprobs=self.prompt_options.num_wanted,
            )
        except InvalidRequest as error:
            if error.param != "max_tokens":
                raise
            raise InvalidRequest(error.message.replace("max_tokens", limit_name, 1), limit_name, error.code) from None

    def text_options(self) -> TextOptions:
        """The options that concern the text of a choice."""
        return TextOptions(
            self.stop,
            self.include_stop_str_in_output,
            self.skip_special_tokens,
            self.min_tokens,
            self.detokenize,
            self.return_tokens_as_token_ids,
        )


class ChatCompletionRequest(GenerationRequest, ResponseFormatField, ToolFields):
    """The body of `POST /v1/chat/completions`."""

    unsupported: ClassVar[Table] = {**COMMON, **CHAT}
    ignorable: ClassVar[ignored.IgnoredTable] = {**ignored.COMMON, **ignored.CHAT}

    messages: Annotated[list[Message], FailFast(), Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: Documents = ()
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool = True
    thinking_token_budget: ThinkingBudget | None = None
    chat_template: Annotated[str, Field(min_length=1, max_length=MAX_TEMPLATE_CHARS)] | None = None
    safety_identifier: UserName | None = None
    prompt_cache_key: UserName | None = None
    chat_template_kwargs: TemplateVariables = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise field_error("is allowed only when logprobs is true", ("top_logprobs",))
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise field_error("differs from max_tokens; send one of them", ("max_completion_tokens",))
        if sum(message.num_chars for message in self.messages) > MAX_TEXT_CHARS:
            raise field_error(f"hold more than {MAX_TEXT_CHARS} characters together", ("messages",), TOO_LONG)
        adds_prompt = self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set
        if self.continue_final_message and adds_prompt:
            raise field_error("contradicts add_generation_prompt; send one of them", ("continue_final_message",))
        if self.continue_final_message and images_of(self.messages[-1].content):
            raise field_error("cannot continue a message with images", ("continue_final_message",))
        return self

    @property
    def num_chars(self) -> int:
        """Characters that the chat template gets."""
        documents = sum(len(text) for document in self.documents for text in document.values())
        tools = len(json.dumps(self.offered_tools)) if self.offered_tools else 0
        return documents + tools + sum(message.num_chars for message in self.messages)

    def grammar_fields(self) -> list[tuple[str, AskedGrammar]]:
        """What enforces a call too."""
        found, tools = super().grammar_fields(), self.tool_grammar()
        return found if tools is None else [*found, ("tools", tools)]

    def grammar_parts(self) -> list[tuple[str, Grammar]]:
        """What the client wrote of the grammar of the answer, by the field that it came with."""
        asked = [(value.param(name), value.grammar) for name, value in self.grammar_fields() if name != "tools"]
        return [*asked, *self.parameter_grammars()]

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def output_limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    def images(self) -> list[str]:
        """The files of all images of the conversation, in base64."""
        return [image for message in self.messages for image in images_of(message.content)]

    @property
    def images_field(self) -> str:
        """What an error about the images names: the content of the first message with one."""
        number = next((at for at, message in enumerate(self.messages) if images_of(message.content)), 0)
        return f"messages[{number}].content"

    def template_messages(self) -> list[dict[str, object]]:
        """The conversation as `ChatTemplate.render` takes it."""
        return [message.for_template() for message in self.messages]

    @property
    def thinking_wanted(self) -> bool | None:
        """Whether the model is to reason before it answers; None: the request does not say."""
        variables = self.template_variables()
        told = variables.get("enable_thinking", variables.get("thinking"))
        return told if isinstance(told, bool) else None

    @property
    def max_reasoning_tokens(self) -> int | None:
        """How many tokens reasoning may have; None: the request does not say."""
        budget = self.thinking_token_budget
        return None if budget is None or budget < 0 else budget

    def template_variables(self) -> dict[str, object]:
        """The variables that the request sets for the chat template."""
        variables: dict[str, object] = {}
        if self.reasoning_effort is not None:
            variables = {"reasoning_effort": self.reasoning_effort, "enable_thinking": self.reasoning_effort != "none"}
        if self.offered_tools:
            variables["tools"] = self.offered_tools
        if self.documents:
            variables["documents"] = self.documents
        return variables | dict(self.chat_template_kwargs)


class CompletionRequest(GenerationRequest, ResponseFormatField):
    """The body of `POST /v1/completions`. `prompt` is always a tuple: of texts, or of tuples of token ids."""

    unsupported: ClassVar[Table] = {**COMMON, **COMPLETION}
    ignorable: ClassVar[ignored.IgnoredTable] = {**ignored.COMMON, **ignored.COMPLETION}

    prompt: Prompts
    add_special_tokens: bool = True
    max_tokens: int | None = DEFAULT_COMPLETION_TOKENS
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    best_of: int | None = None
    suffix: Annotated[str, Field(max_length=MAX_TEXT_CHARS)] | None = None
    echo: bool = False

    @model_validator(mode="after")
    def _check_completion(self) -> Self:
        if not self.n <= self.num_candidates <= max(self.n, MAX_BEST_OF):
            raise field_error(f"must be at least n, and at most {MAX_BEST_OF}", ("best_of",))
        if self.num_candidates > self.n and self.stream:
            raise field_error("may be more than n only when stream is false", ("best_of",))
        if self.echo and (self.suffix or self.truncate_prompt_tokens is not None):
            raise field_error("is not supported with suffix or truncate_prompt_tokens", ("echo",), UNSUPPORTED)
        if self.suffix and not all(isinstance(prompt, str) for prompt in self.prompt):
            raise field_error("needs a prompt of text", ("suffix",))
        if len(self.suffix or "") * len(self.prompt) > MAX_TEXT_CHARS:
            raise field_error(f"is longer than {MAX_TEXT_CHARS} characters over all prompts", ("suffix",), TOO_LONG)
        return self

    @property
    def num_candidates(self) -> int:
        return self.n if self.best_of is None else self.best_of

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
