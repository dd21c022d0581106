"""The parameters of sampling and stopping. `DecodingParams` is all that nodes see: token ids and numbers, no text.

Owns the ranges of every parameter. Each is written once, with the field's type, where the codec reads it too;
constructing a `DecodingParams` validates it, so all entry points share one validator. Does not know tokenizers; ids are
checked against the vocabulary where its size is known (`check_vocabulary`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Annotated, Any, get_args, get_type_hints

from baton.wire.codec import Bounds, Length, Packed
from baton.wire.errors import InvalidRequest
from baton.wire.grammar import Grammar

MAX_TOP_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 4096
MAX_BAD_WORDS = 128
MAX_BAD_WORD_SEQUENCES = 2 * MAX_BAD_WORDS
MAX_BAD_WORD_TOKENS = 64
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_ABS_LOGIT_BIAS = 100.0
MAX_PREDICTION_TOKENS = 2**17
_ABOVE_ZERO = math.ulp(0.0)
"""The smallest float that is not 0: the low end of a range that 0 is not in."""
_BadWord = Annotated[tuple[int, ...], Packed("I", MAX_BAD_WORD_TOKENS)]


@dataclass(frozen=True, slots=True)
class DecodingParams:
    """Sampling and stopping in terms of token ids. Raises `InvalidRequest` with `param` set when a value is out of
    range.

    `temperature` 0 is greedy. `top_k` 0 or -1 turns it off. `logprobs` is the number of most likely tokens to report
    beside the chosen one (0: only the chosen one, None: nothing). `max_tokens` None means up to the context's end.
    `seed` None lets the router choose one; noise is a function of (seed, choice, position) only. `prompt_logprobs` is
    the same as `logprobs` for the tokens of the prompt.

    `allowed_token_ids`: no other token is sampled; () allows all. `bad_word_ids`: token sequences that the output must
    not contain. The last token of one is withheld while the output ends with those before it. `grammar`: what the
    output must obey, see `Grammar`. It ends where nothing can follow; before that it ends only with an end-of-sequence
    token, where the grammar allows the end.

    `goal_tpot_s`: seconds between two tokens, to which steps keep that compute prompts beside it. `goal_ttft_s`:
    seconds to the first token, for which steps may become longer. 0: the node's own goal. Goals change no token.

    `prediction_ids`: what the output may be like. Drafts are taken from it; it changes no token.
    """

    temperature: Annotated[float, Bounds(0, 2)] = 1.0
    top_k: Annotated[int, Bounds(-1, 2**31 - 1)] = 0
    top_p: Annotated[float, Bounds(_ABOVE_ZERO, 1)] = 1.0
    min_p: Annotated[float, Bounds(0, 1)] = 0.0
    repetition_penalty: Annotated[float, Bounds(_ABOVE_ZERO, 1e6)] = 1.0
    presence_penalty: Annotated[float, Bounds(-2, 2)] = 0.0
    frequency_penalty: Annotated[float, Bounds(-2, 2)] = 0.0
    logit_bias_ids: Annotated[tuple[int, ...], Packed("I", MAX_LOGIT_BIAS)] = ()
    logit_bias_values: Annotated[tuple[float, ...], Packed("d", MAX_LOGIT_BIAS)] = ()
    seed: Annotated[int, Bounds(-(2**63), 2**63 - 1)] | None = None
    choice: Annotated[int, Bounds(0, 2**16)] = 0
    max_tokens: Annotated[int, Bounds(1, 2**31 - 1)] | None = None
    min_tokens: Annotated[int, Bounds(0, 2**31 - 1)] = 0
    stop_token_ids: Annotated[tuple[int, ...], Packed("I", MAX_STOP_TOKEN_IDS)] = ()
    ignore_eos: bool = False
    logprobs: Annotated[int, Bounds(0, MAX_TOP_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Bounds(0, MAX_TOP_LOGPROBS)] | None = None
    allowed_token_ids: Annotated[tuple[int, ...], Packed("I", MAX_ALLOWED_TOKEN_IDS)] = ()
    bad_word_ids: Annotated[tuple[_BadWord, ...], Length(MAX_BAD_WORD_SEQUENCES)] = ()
    grammar: Grammar | None = None
    goal_tpot_s: Annotated[float, Bounds(0, 1e6)] = 0.0
    goal_ttft_s: Annotated[float, Bounds(0, 1e6)] = 0.0
    prediction_ids: Annotated[tuple[int, ...], Packed("I", MAX_PREDICTION_TOKENS)] = ()

    def __post_init__(self) -> None:
        for name, number in _numbers():
            value = getattr(self, name)
            # the usual case without a call: every request comes by here at each program
            if type(value) is not number.kind or not number.bounds.low <= value <= number.bounds.high:
                number.check(name, value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            message = f"min_tokens {self.min_tokens} is larger than max_tokens {self.max_tokens}"
            raise InvalidRequest(message, "min_tokens")
        _require_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        _require_ids("logit_bias", self.logit_bias_ids, MAX_LOGIT_BIAS)
        if len(self.logit_bias_values) != len(self.logit_bias_ids):
            raise InvalidRequest("logit_bias needs one value for each token id", "logit_bias")
        if not all(-MAX_ABS_LOGIT_BIAS <= value <= MAX_ABS_LOGIT_BIAS for value in self.logit_bias_values):
            message = f"logit_bias values must lie between {-MAX_ABS_LOGIT_BIAS:g} and {MAX_ABS_LOGIT_BIAS:g}"
            raise InvalidRequest(message, "logit_bias")
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise InvalidRequest("grammar must be a Grammar", "grammar")
        _require_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
        if self.bad_word_ids:
            _require_bad_words(self.bad_word_ids)
        # it may be as long as a prompt, and parameters are made several times on the way of a request
        if len(self.prediction_ids) > MAX_PREDICTION_TOKENS:
            message = f"prediction allows at most {MAX_PREDICTION_TOKENS} tokens, got {len(self.prediction_ids)}"
            raise InvalidRequest(message, "prediction")

    @property
    def needs_history(self) -> bool:
        """True when sampling needs the ids of the earlier tokens (penalties, bad words), and not the logits alone."""
        return bool(
            self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty or self.bad_word_ids
        )

    @property
    def needs_last_token(self) -> bool:
        """True when a token can be sampled only once the value of the one before it is known on the host."""
        return self.grammar is not None or self.needs_history

    @property
    def takes_largest(self) -> bool:
        """Whether each token is that of the largest logit, and nothing else is asked of it."""
        return self.grammar is None and self.takes_largest_allowed

    @property
    def takes_largest_allowed(self) -> bool:
        """Whether each token is that of the largest logit among those that the grammar allows, if there is one."""
        if self.temperature != 0.0 or self.logprobs is not None or self.min_tokens or self.needs_history:
            return False
        return not (self.logit_bias_ids or self.allowed_token_ids)

    def with_at_most(self, max_tokens: int | None) -> DecodingParams:
        """These parameters with another `max_tokens`. Raises `InvalidRequest` when it is less than `min_tokens`."""
        if max_tokens == self.max_tokens:
            return self
        if max_tokens is not None and self.min_tokens > max_tokens:
            message = f"min_tokens {self.min_tokens} does not fit: there is room for {max_tokens} tokens"
            raise InvalidRequest(message, "min_tokens")
        return replace(self, max_tokens=max_tokens)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `InvalidRequest` when a token id does not exist in a vocabulary of `vocab_size`."""
        for param, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", self.logit_bias_ids),
            ("allowed_token_ids", self.allowed_token_ids),
            *(("bad_words", word) for word in self.bad_word_ids),
        ):
            for token_id in ids:
                if token_id >= vocab_size:
                    message = f"{param}: token id {token_id} is outside the vocabulary of {vocab_size}"
                    raise InvalidRequest(message, param)


@dataclass(frozen=True, slots=True)
class SamplingParams(DecodingParams):
    """The parameters of the offline `LLM` class: `DecodingParams`, and those that concern text.

    `stop`: up to 16 strings; the text ends before the first of them that appears. `prediction`: a text that the output
    may be like, in place of `prediction_ids`; what is too long is cut.
    """

    stop: Annotated[tuple[str, ...], Length(MAX_STOP_STRINGS)] = ()
    include_stop_str_in_output: bool = False
    prediction: str = ""

    def __post_init__(self) -> None:
        DecodingParams.__post_init__(self)
        _require_ids("prediction", self.prediction_ids, MAX_PREDICTION_TOKENS)
        check_stop_strings(self.stop)

    def decoding(self) -> DecodingParams:
        """The parameters that nodes need, without those of text."""
        return DecodingParams(**{field.name: getattr(self, field.name) for field in fields(DecodingParams)})


def check_stop_strings(stop: tuple[str, ...]) -> None:
    """Raise `InvalidRequest` for too many, empty or overlong stop strings."""
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop allows at most {MAX_STOP_STRINGS} strings, got {len(stop)}", "stop")
    for text in stop:
        if not isinstance(text, str) or not text or len(text) > MAX_STOP_LENGTH:
            raise InvalidRequest(f"each stop must be a string of 1 to {MAX_STOP_LENGTH} characters", "stop")


@dataclass(frozen=True, slots=True)
class _Number:
    """The values that a field with `Bounds` may hold."""

    bounds: Bounds
    kind: type[int] | type[float]
    is_optional: bool

    def check(self, name: str, value: object) -> None:
        """Raise `InvalidRequest`."""
        if value is None and self.is_optional:
            return
        kinds = int if self.kind is int else int | float
        if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value):
            raise InvalidRequest(f"{name} must be {'an integer' if self.kind is int else 'a finite number'}", name)
        low, high = self.bounds.low, self.bounds.high
        if not low <= value <= high:
            ends = f"between {low} and {high}"
            if self.kind is float:
                ends = f"in {'(0' if low == _ABOVE_ZERO else f'[{low:g}'}, {high:g}], got {value:g}"
            raise InvalidRequest(f"{name} must lie {ends}", name)


@cache
def _numbers() -> tuple[tuple[str, _Number], ...]:
    """The fields of `DecodingParams` whose type has `Bounds`, by name."""
    return tuple(
        (name, found)
        for name, hint in get_type_hints(DecodingParams, include_extras=True).items()
        if (found := _number(hint)) is not None
    )


def _number(hint: Any) -> _Number | None:
    for member in (hint, *get_args(hint)):
        bounds = next((extra for extra in getattr(member, "__metadata__", ()) if isinstance(extra, Bounds)), None)
        if bounds is not None:
            return _Number(bounds, int if get_args(member)[0] is int else float, is_optional=member is not hint)
    return None


def _require_bad_words(words: tuple[tuple[int, ...], ...]) -> None:
    if len(words) > MAX_BAD_WORD_SEQUENCES:
        raise InvalidRequest(f"bad_words allows at most {MAX_BAD_WORDS} words", "bad_words")
    for word in words:
        if not word:
            raise InvalidRequest("bad_words needs words of at least one token", "bad_words")
        _require_ids("bad_words", word, MAX_BAD_WORD_TOKENS)


def _require_ids(param: str, ids: tuple[int, ...], max_items: int) -> None:
    if len(ids) > max_items:
        raise InvalidRequest(f"{param} allows at most {max_items} entries, got {len(ids)}", param)
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < 2**32:
            raise InvalidRequest(f"{param} needs token ids, got {token_id!r:.40}", param)
