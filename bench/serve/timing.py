"""The times of one answered request, with the definitions of `vllm bench serve`. All of them in seconds.

Owns what TTFT, TPOT, gap, TTST and E2E of a request are. Knows no other request and no statistics.
TTFT is from sending to the first chunk that carries a token, whatever its text; E2E to the last one. A chunk of several
tokens is one arrival: its gap counts once. Events that carry none (a chat's role) are no arrivals, where vllm takes the
first of them for token 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from bench.client.outcome import Outcome


@dataclass(frozen=True, slots=True)
class Timing:
    """`tpot_s` is (E2E - TTFT) / (tokens - 1), `ttst_s` from sending to the chunk with token 2; None for one token."""

    ttft_s: float
    e2el_s: float
    tpot_s: float | None
    ttst_s: float | None
    gaps_s: tuple[float, ...]

    @property
    def max_gap_s(self) -> float | None:
        """The longest silence after token 1; None when everything came at once."""
        return max(self.gaps_s, default=None)


def timing_of(outcome: Outcome) -> Timing:
    """The times of a complete `outcome`."""
    came_s = arrivals_s(outcome)
    ttft_s = came_s[0] - outcome.sent_s
    e2el_s = came_s[-1] - outcome.sent_s
    num_tokens = num_output_tokens(outcome)
    return Timing(
        ttft_s=ttft_s,
        e2el_s=e2el_s,
        tpot_s=(e2el_s - ttft_s) / (num_tokens - 1) if num_tokens > 1 else None,
        ttst_s=_ttst_s(outcome) if num_tokens > 1 else None,
        gaps_s=tuple(later - earlier for earlier, later in pairwise(came_s)),
    )


def arrivals_s(outcome: Outcome) -> list[float]:
    """When chunks with tokens came, by the monotonic clock."""
    return [came_s for came_s, num in zip(outcome.chunk_s, outcome.chunk_tokens, strict=True) if num]


def num_output_tokens(outcome: Outcome) -> int:
    """Tokens of the answer by the server's own count, by the client's where the server gives none."""
    reported = _count(outcome.usage.get("completion_tokens"))
    return outcome.num_output_tokens or sum(outcome.chunk_tokens) if reported is None else reported


def num_prompt_tokens(outcome: Outcome) -> int:
    """Tokens of the prompt by the server's own count, by the client's where the server gives none."""
    reported = _count(outcome.usage.get("prompt_tokens"))
    return outcome.num_prompt_tokens if reported is None else reported


def num_cached_tokens(outcome: Outcome) -> int | None:
    """Prompt tokens that the server had already computed; None when it does not say."""
    details = outcome.usage.get("prompt_tokens_details")
    return _count(details.get("cached_tokens")) if isinstance(details, dict) else None


def _ttst_s(outcome: Outcome) -> float | None:
    """By the second chunk where the chunks do not say how many tokens they carry."""
    so_far = accumulate(outcome.chunk_tokens)
    came_s = next((came_s for came_s, num in zip(outcome.chunk_s, so_far, strict=False) if num >= 2), None)
    return None if came_s is None else came_s - outcome.sent_s


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
