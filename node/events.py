"""Turns the outputs of a step into messages for the router."""

from __future__ import annotations

from engine.scheduler.request import RequestOutput
from wire.errors import BatonError, RequestFailed
from wire.messages import StepTimes, TokenEvent


def failure_of(output: RequestOutput) -> BatonError:
    """The error of a request with `has_failed`, for which no token could be sampled."""
    return RequestFailed(f"the model computed NaN for output {output.output_index}", "not_a_number")


def token_event(output: RequestOutput, times: StepTimes | None = None) -> TokenEvent | None:
    """The token that a step sampled for a router's request, or None when it sampled none."""
    if output.token is None:
        return None
    handoff_id, attempt = output.key
    token_id, logprobs = output.token
    return TokenEvent(
        handoff_id,
        attempt,
        output.output_index,
        (token_id,),
        () if logprobs is None else (logprobs,),
        output.finish_reason,
        output.num_cached_tokens,
        times=times,
    )
