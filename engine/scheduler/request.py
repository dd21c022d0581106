"""One request inside the engine, and the values that scheduler and runner hand each other each step.

Values that a step has once for each request are named tuples: a frozen dataclass takes four times as long to construct.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from engine.cache.block_pool import BlockTable, pack_blocks
from wire.messages import TokenLogprobs
from wire.request_key import RequestKey
from wire.sampling import DecodingParams

PENDING_TOKEN = -1
"""In `token_ids`: a token that the step in flight is going to sample."""


@dataclass(slots=True)
class Request:
    """Mutable state of one request; only the scheduler changes it.

    `token_ids` is the prompt and everything generated; `num_computed_tokens` of them have their KV in `block_table`.
    `first_token_only`: the request leaves after one token, and its blocks are held for a handoff. `num_cached_tokens`
    is set at the first admission: prompt tokens that were found in the prefix cache or by a reservation.

    While steps are in flight, their tokens count as computed, and the last `num_pending_tokens` of `token_ids` are
    `PENDING_TOKEN`. `num_steps_in_flight` of them write into `block_table`.

    `num_scored_tokens` of the prompt need no log probability any more: the first has none, and those of the others are
    known. It matters with `prompt_logprobs` only, and never falls, so that nothing is reported twice.
    """

    key: RequestKey
    token_ids: list[int]
    num_prompt_tokens: int
    params: DecodingParams
    hash_root: bytes
    max_total_tokens: int
    first_token_only: bool = False
    arrival: int = 0
    block_table: BlockTable = field(default_factory=partial(pack_blocks, ()))
    block_hashes: list[bytes] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None
    num_published_blocks: int = 0
    num_pending_tokens: int = 0
    num_steps_in_flight: int = 0
    num_scored_tokens: int = 1

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose KV is still missing; 1 for a request in the middle of decoding."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_reusable_tokens(self) -> int:
        """The tokens at the beginning whose KV may come from elsewhere, because nothing is read from their rows."""
        if self.params.prompt_logprobs is not None and self.num_scored_tokens < self.num_prompt_tokens:
            return self.num_scored_tokens - 1
        return len(self.token_ids) - 1

    @property
    def num_known_tokens(self) -> int:
        """Tokens whose values are known."""
        return len(self.token_ids) - self.num_pending_tokens

    @property
    def awaits_last_token(self) -> bool:
        """Whether the token that a step in flight samples for it is its last, whichever token that is."""
        if not self.num_pending_tokens:
            return False
        return self.first_token_only or self.is_full(len(self.token_ids))

    def is_full(self, num_tokens: int) -> bool:
        """Whether `num_tokens` tokens are the most that the request may have."""
        max_tokens = self.params.max_tokens
        if max_tokens is not None and num_tokens - self.num_prompt_tokens >= max_tokens:
            return True
        return num_tokens >= self.max_total_tokens


class ScheduledRequest(NamedTuple):
    """One request's share of a step. Written by the scheduler, read by the runner while it launches the step.

    Tokens start .. start + num_tokens - 1 of `token_ids` are computed and stored in the slots of `block_table`. Both
    lists are the request's own: they must not be changed, and they grow once the step was launched.
    `needs_sample`: this reaches the last token there is, so that the next one can be sampled. `arrival`: which of the
    requests that ever had this key.
    """

    key: RequestKey
    start: int
    num_tokens: int
    token_ids: Sequence[int]
    num_prompt_tokens: int
    block_table: Sequence[int]
    params: DecodingParams
    needs_sample: bool
    arrival: int = 0


class PromptSpan(NamedTuple):
    """The tokens of one request's share whose rows tell the log probability of the next prompt token: `num_rows` tokens
    from `first_row` on, counted in the request's tokens. `num_top`: alternatives to report beside each."""

    key: RequestKey
    arrival: int
    first_row: int
    num_rows: int
    num_top: int


@dataclass(frozen=True, slots=True)
class Step:
    """Everything the runner needs for one iteration. `spans`: of the requests that want log probabilities of their
    prompt."""

    requests: tuple[ScheduledRequest, ...]
    spans: tuple[PromptSpan, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step, over all requests."""
        return sum(request.num_tokens for request in self.requests)


class SampledToken(NamedTuple):
    """A token chosen by the sampler. `logprobs` is None unless the request asked for them."""

    token_id: int
    logprobs: TokenLogprobs | None


class PromptScores(NamedTuple):
    """Log probabilities of prompt tokens from place `first` on, as rows of `wire.prompt_logprobs`.

    `is_valid`: the model computed numbers for all of them.
    """

    key: RequestKey
    first: int
    num_top: int
    rows: bytes
    is_valid: bool


class RequestOutput(NamedTuple):
    """The output of a step for one request.

    `token` is the token sampled, if any, the `output_index`-th of the output. `finish_reason` is "" unless it ended the
    request; `has_left` also when it leaves because only its first token was wanted, or because it `has_failed`: a token
    was due and the model computed NaN. Its KV reaches over `num_computed_tokens`, `num_step_tokens` of them computed in
    this step.
    """

    key: RequestKey
    num_step_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    output_index: int
    token: SampledToken | None
    finish_reason: str
    has_left: bool
    has_failed: bool
