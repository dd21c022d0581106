"""The messages in which a node tells what came of a leg: tokens, what was read of the prompt, or a failure.

Owns their fields, and why an output ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from baton.wire.codec import U64, Bounds, Id128, Length, Packed, TokenIds
from baton.wire.drafts import VerifiedDraft
from baton.wire.messages.fields import Attempt, Count, Name, Text
from baton.wire.sampling import MAX_TOP_LOGPROBS
from baton.wire.tiers import TokensByTier

_TopIds = Annotated[tuple[int, ...], Packed("I", MAX_TOP_LOGPROBS)]
_TopValues = Annotated[tuple[float, ...], Packed("d", MAX_TOP_LOGPROBS)]
MAX_READ_BYTES = 2**16
"""Of values that were read of a prompt, in one message."""
FINISH_STOP, FINISH_LENGTH, FINISH_COMPLETE = "stop", "length", "complete"
"""Why a node ended an output: its last token is one that ends outputs, and no part of the text; it has all the tokens
it may have; its grammar allows no further token. A client is told "stop" in the last case too."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities before temperature: the chosen token's, and the most likely ones'."""

    logprob: float
    top_ids: _TopIds
    top_logprobs: _TopValues


@dataclass(frozen=True, slots=True)
class HandoffFigures:
    """The measurements of one handoff: how much it moved and how long it took, by monotonic clocks.

    `transfer_us`: from the grant to the verified blocks, the computing of the prompt included. `exposed_us`: the part
    of it that came after the prompt was computed.
    """

    num_blocks: Count
    num_bytes: Count
    transfer_us: Count
    exposed_us: Count


@dataclass(frozen=True, slots=True)
class StepTimes:
    """When a token was computed, in microseconds of the node's clock.

    `ready_us`: the KV of a handoff had arrived and was verified; None where the node did not wait for a handoff.
    `begun_us`: the first step that computed anything towards this token was about to run. `sampled_us`: its last step
    was over.
    """

    ready_us: U64 | None
    begun_us: U64
    sampled_us: U64


@dataclass(slots=True)
class TokenEvent:
    """Tokens of one request.

    `index` is the output index of token_ids[0]; logprobs is empty or one per token. `finish_reason` is "" while the
    request goes on. `num_cached_tokens` counts prompt tokens that the reporting node had cached, and did not compute
    for this request. `handoff` comes once, with the token that D repeats. `times` is of token_ids[0], and comes with
    the first two tokens of an attempt at most. `tiers`: how many of the cached tokens came from a KV store, told with
    output 0; None where none did. `draft`: that by which they were found, if there was one.

    An event must not be changed. The class is not frozen because there is one event for each token, at both ends of the
    link. A frozen one takes three times as long to construct.
    """

    handoff_id: Id128
    attempt: Attempt
    index: Count
    token_ids: TokenIds
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: Annotated[str, Length(16)]
    num_cached_tokens: Count
    handoff: HandoffFigures | None = None
    times: StepTimes | None = None
    tiers: TokensByTier | None = None
    draft: VerifiedDraft | None = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """Node -> router, one per step for all requests of the step."""

    epoch: U64
    events: tuple[TokenEvent, ...]


@dataclass(frozen=True, slots=True)
class PromptRead:
    """Node -> router, before the first token: what was read of some rows of a prompt, in order.

    `first_row` is the place of the first of them in the prompt. `values`: in the format of what the request asks for;
    with `prompt_logprobs` that of `baton.wire.prompt_logprobs`.
    """

    epoch: U64
    handoff_id: Id128
    attempt: Attempt
    first_row: Annotated[int, Bounds(0, 2**40)]
    num_rows: Annotated[int, Bounds(1, 2**30)]
    values: Annotated[bytes, Length(MAX_READ_BYTES)]


@dataclass(frozen=True, slots=True)
class Failed:
    """Node -> router: this attempt ended without finishing. `code` is a code of `baton.wire.errors`."""

    handoff_id: Id128
    attempt: Attempt
    code: Name
    message: Text
