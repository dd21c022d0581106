"""Outcomes with times that are easy to add up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.bench.client.outcome import Failure, Outcome


def answered(
    chunk_s: Sequence[float],
    *,
    sent_s: float = 0.0,
    scheduled_s: float | None = None,
    chunk_tokens: Sequence[int] | None = None,
    num_output: int | None = None,
    num_prompt: int = 10,
    **usage: Any,
) -> Outcome:
    """A complete request whose chunks came `chunk_s` seconds after `sent_s`."""
    tokens = list(chunk_tokens or [1] * len(chunk_s))
    num_output = sum(tokens) if num_output is None else num_output
    return Outcome(
        index=0,
        scheduled_s=sent_s if scheduled_s is None else scheduled_s,
        sent_s=sent_s,
        chunk_s=[sent_s + after_s for after_s in chunk_s],
        chunk_tokens=tokens,
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
        text="x" * num_output,
        usage={"prompt_tokens": num_prompt, "completion_tokens": num_output, **usage},
    )


def failed(failure: Failure, message: str = "", *, sent_s: float = 0.0, chunk_s: Sequence[float] = ()) -> Outcome:
    """A request that came to nothing, perhaps after some chunks."""
    tokens = [1] * len(chunk_s)
    return Outcome(0, sent_s, sent_s, list(chunk_s), tokens, failure=failure, message=message)
