"""The `usage` member of answers: how many tokens there were, where they came from, and what became of drafts.

Owns its names, which are OpenAI's where OpenAI has any. Does not know how tokens were counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from baton.router.requests.figures import DraftedTokens
from baton.router.requests.timings import Timings
from baton.wire.messages.output import HandoffFigures


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one answer: of all its prompts, of all its choices, and prompt tokens found in the prefix cache where
    they would have been computed, or by role in that of each node. `cached_by_place`: where the first of these came
    from. `num_reasoning_tokens`: None where nobody looked. `ended_at`: when the last choice ended, in seconds since
    1970. `is_predicted`: the request had a prediction."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int = 0
    handoffs: Sequence[HandoffFigures] = ()
    timings: Timings | None = None
    cached_by_role: Mapping[str, int] = field(default_factory=dict)
    cached_by_place: Mapping[str, int] = field(default_factory=dict)
    num_reasoning_tokens: int | None = None
    ended_at: int = 0
    drafted: DraftedTokens = field(default_factory=DraftedTokens)
    is_predicted: bool = False


class TokensSoFar(NamedTuple):
    """The tokens of one choice at one event of its stream."""

    num_prompt_tokens: int
    num_completion_tokens: int


def usage_object(usage: Usage) -> dict[str, Any]:
    """The `usage` member of an answer. Five members are Baton's own: `kv_transfer`, there when KV came from a prefill
    node, `timings`, there when asked for and known, `cached_tokens_by_node`, `cached_tokens_by_place`, and `drafts`,
    there when tokens were drafted.
    """
    details: dict[str, Any] = {"cached_tokens": usage.num_cached_tokens}
    if usage.cached_by_role:
        details["cached_tokens_by_node"] = dict(usage.cached_by_role)
    if usage.cached_by_place:
        details["cached_tokens_by_place"] = dict(usage.cached_by_place)
    found: dict[str, Any] = {
        **token_counts(usage),
        "prompt_tokens_details": details,
    }
    if output_details := _output_details(usage):
        found["completion_tokens_details"] = output_details
    if usage.handoffs:
        found["kv_transfer"] = {
            "blocks": sum(handoff.num_blocks for handoff in usage.handoffs),
            "bytes": sum(handoff.num_bytes for handoff in usage.handoffs),
            "transfer_ms": max(handoff.transfer_us for handoff in usage.handoffs) / 1000,
            "exposed_ms": max(handoff.exposed_us for handoff in usage.handoffs) / 1000,
        }
    if usage.timings is not None:
        found["timings"] = usage.timings
    return found


def token_counts(usage: Usage | TokensSoFar) -> dict[str, int]:
    """Under OpenAI's names."""
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_completion_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
    }


def _output_details(usage: Usage) -> dict[str, Any]:
    details: dict[str, Any] = {}
    if usage.num_reasoning_tokens is not None:
        details["reasoning_tokens"] = usage.num_reasoning_tokens
    if usage.is_predicted:
        details["accepted_prediction_tokens"], details["rejected_prediction_tokens"] = usage.drafted.of_prediction
    drafted = usage.drafted
    if drafted.steps:
        details["drafts"] = {
            method: {"steps": count, "tokens": drafted.verified[method], "accepted": drafted.accepted[method]}
            for method, count in drafted.steps.items()
        }
    return details
