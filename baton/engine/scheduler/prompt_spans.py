"""The tokens of prompts whose rows tell the log probability of the next token: which of them a step has, and that they
are known once it was computed. Each is told once, whatever is computed again."""

from __future__ import annotations

from collections.abc import Mapping

from baton.engine.scheduler.request import Request, ScheduledRequest
from baton.engine.scheduler.step import PromptScores, PromptSpan, Step
from baton.wire.request_key import RequestKey


def span_of(request: Request, share: ScheduledRequest) -> PromptSpan | None:
    """The rows of `share` that tell the log probabilities of prompt tokens which nothing has told yet."""
    first = max(share.start, request.num_scored_tokens - 1)
    num_rows = min(share.start + share.num_tokens, request.num_prompt_tokens - 1) - first
    if num_rows <= 0:
        return None
    return PromptSpan(share.key, share.arrival, first, num_rows, request.params.prompt_logprobs or 0)


def note_scored(
    running: Mapping[RequestKey, Request], step: Step, scores: Mapping[RequestKey, PromptScores]
) -> list[PromptScores]:
    """Record what `step` has found out about prompts; what concerns requests that were not removed since its launch."""
    found = []
    for span in step.spans:
        request = running.get(span.key)
        if request is not None and request.arrival == span.arrival:
            request.num_scored_tokens = span.first_row + span.num_rows + 1
            found.append(scores[span.key])
    return found
