"""Turns the outputs of a step into messages for the router."""

from __future__ import annotations

from collections.abc import Iterator

from baton.engine.scheduler.request import IMAGES_GONE
from baton.engine.scheduler.step import PromptScores, RequestOutput
from baton.engine.structured.matcher import OUT_OF_RESOURCES, WORN_OUT
from baton.wire.errors import BatonError, InvalidRequest, Overloaded, RequestFailed
from baton.wire.messages import PromptLogprobs, StepTimes, TokenEvent
from baton.wire.prompt_logprobs import MAX_ROWS, row_bytes


def failure_of(output: RequestOutput) -> BatonError:
    """The error of a request with `has_failed`, for which no token could be sampled.

    A grammar that has no token here has none at another node either, unless this node lacked something, or other
    requests had used it up. A lack of room is no fault of the node.
    """
    if output.failure == IMAGES_GONE:
        return Overloaded(output.failure)
    if output.failure in (OUT_OF_RESOURCES, WORN_OUT):
        return RequestFailed(output.failure)
    if output.failure:
        return InvalidRequest(f"output {output.output_index} cannot follow the grammar: {output.failure}", "grammar")
    return RequestFailed(f"the model computed NaN for output {output.output_index}", "not_a_number")


def failure_of_scores(scores: PromptScores) -> BatonError:
    """The error of a request whose prompt has tokens without a log probability."""
    return RequestFailed(f"the model computed NaN near prompt token {scores.first}", "not_a_number")


def prompt_logprobs(scores: PromptScores, epoch: int) -> Iterator[PromptLogprobs]:
    """The messages that tell a router's request what a step found out about its prompt, each of bounded size."""
    handoff_id, attempt = scores.key
    num_row_bytes = row_bytes(scores.num_top)
    for first_byte in range(0, len(scores.rows), MAX_ROWS * num_row_bytes):
        yield PromptLogprobs(
            epoch=epoch,
            handoff_id=handoff_id,
            attempt=attempt,
            first=scores.first + first_byte // num_row_bytes,
            num_top=scores.num_top,
            rows=scores.rows[first_byte : first_byte + MAX_ROWS * num_row_bytes],
        )


def token_event(output: RequestOutput, times: StepTimes | None = None) -> TokenEvent | None:
    """The new tokens of a router's request; None where there are none."""
    if not output.tokens:
        return None
    handoff_id, attempt = output.key
    return TokenEvent(
        handoff_id,
        attempt,
        output.output_index,
        tuple(output.token_ids),
        tuple([token.logprobs for token in output.tokens if token.logprobs is not None]),
        output.finish_reason,
        output.num_cached_tokens,
        times=times,
    )
