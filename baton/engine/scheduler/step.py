"""What one step computes, and what comes of it: the values that scheduler and runner hand each other.

Values that a step has once for each request are named tuples: a frozen dataclass takes four times as long to construct.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

from baton.engine.scheduler.first_tokens import FirstTokens
from baton.engine.scheduler.reading import ReadSpan, RowsRead
from baton.engine.scheduler.request import ScheduledRequest
from baton.wire.drafts import VerifiedDraft
from baton.wire.messages.output import TokenLogprobs
from baton.wire.request_key import RequestKey
from baton.wire.tiers import TierTokens


@dataclass(frozen=True)
class Step:
    """Everything the runner needs for one iteration. `spans`: the rows that are to be read.

    The steps of one `series` have the same `shares`, each `number` tokens further, and `context` tokens before all of
    them together (see `baton.engine.scheduler.step_series`); others have no series."""

    shares: tuple[ScheduledRequest, ...]
    spans: tuple[ReadSpan, ...] = ()
    series: object | None = None
    number: int = 0
    context: int = 0

    @cached_property
    def requests(self) -> tuple[ScheduledRequest, ...]:
        """The share of each request."""
        if not self.number:
            return self.shares
        return tuple([share._replace(start=share.start + self.number) for share in self.shares])

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step, over all requests."""
        return sum(share.num_tokens for share in self.shares)


def as_known(step: Step) -> Step:
    """`step` for a runner that plans it later than it launches it: the tokens of its requests are those of now."""
    shares = [share._replace(token_ids=FirstTokens(share.token_ids, len(share.token_ids))) for share in step.requests]
    return Step(tuple(shares), step.spans)


class SampledToken(NamedTuple):
    """A token chosen by the sampler. `logprobs` is None unless the request asked for them."""

    token_id: int
    logprobs: TokenLogprobs | None


SampledTokens: TypeAlias = tuple[SampledToken, ...]
"""Neighbouring tokens of one request."""


class RequestOutput(NamedTuple):
    """The output of a step for one request.

    `tokens` are new, if any: the first is the `output_index`-th of the output, and the last `num_forced` of them were
    not sampled, but forced by its grammar. `finish_reason` is "" unless the last of them ended the request; `has_left`
    also when it leaves because only its first token was wanted, or no token, or because it `has_failed`: a token was
    due and the model computed NaN, or `failure` says what else went wrong. `read`: what the step read of its prompt.
    Its KV reaches over `num_computed_tokens`; `num_step_tokens` were computed in this step, drafts that were wrong
    among them. The first output of a fork counts no token of the prompt as computed or cached: the request it was
    forked from has counted them. `tiers`: which of the cached tokens came from a KV store. `draft`: that which `tokens`
    were found by."""

    key: RequestKey
    num_step_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    output_index: int
    tokens: SampledTokens
    finish_reason: str
    has_left: bool
    has_failed: bool
    failure: str = ""
    num_forced: int = 0
    read: RowsRead | None = None
    tiers: tuple[TierTokens, ...] = ()
    draft: VerifiedDraft | None = None

    @property
    def token_ids(self) -> list[int]:
        """Those of `tokens`."""
        return [token.token_id for token in self.tokens]
