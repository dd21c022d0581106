"""Turns the outputs of a step into messages for the router."""

from __future__ import annotations

from collections.abc import Iterator

from baton.engine.scheduler.reading import RowsRead
from baton.engine.scheduler.request import MEDIA_GONE
from baton.engine.scheduler.step import RequestOutput
from baton.engine.structured.matcher import OUT_OF_RESOURCES, WORN_OUT
from baton.wire.errors import BatonError, InvalidRequest, Overloaded, RequestFailed
from baton.wire.messages.output import MAX_READ_BYTES, PromptRead, StepTimes, TokenEvent
from baton.wire.request_key import RequestKey


def failure_of(output: RequestOutput) -> BatonError:
    """The error of a request with `has_failed`, for which no token could be sampled.

    A grammar that has no token here has none at another node either, unless this node lacked something, or other
    requests had used it up. A lack of room is no fault of the node.
    """
    if output.failure == MEDIA_GONE:
        return Overloaded(output.failure)
    if output.failure in (OUT_OF_RESOURCES, WORN_OUT):
        return RequestFailed(output.failure)
    if output.failure:
        return InvalidRequest(f"output {output.output_index} cannot follow the grammar: {output.failure}", "grammar")
    return RequestFailed(f"the model computed NaN for output {output.output_index}", "not_a_number")


def failure_of_read(read: RowsRead) -> BatonError:
    """The error of a request whose prompt has rows that are no numbers."""
    return RequestFailed(f"the model computed NaN near prompt token {read.first_row + 1}", "not_a_number")


def prompt_read(key: RequestKey, read: RowsRead, epoch: int) -> Iterator[PromptRead]:
    """The messages that tell a router's request what a step read of its prompt, each of bounded size: what does not fit
    one has as many bytes for each row."""
    handoff_id, attempt = key
    num_row_bytes = len(read.values) // read.num_rows
    most_rows = read.num_rows if len(read.values) <= MAX_READ_BYTES else MAX_READ_BYTES // num_row_bytes
    for first in range(0, read.num_rows, most_rows):
        num_rows = min(most_rows, read.num_rows - first)
        values = read.values
        if num_rows < read.num_rows:
            values = values[first * num_row_bytes : (first + num_rows) * num_row_bytes]
        yield PromptRead(epoch, handoff_id, attempt, read.first_row + first, num_rows, values)


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
        tiers=output.tiers if output.tiers and not output.output_index else None,
        draft=output.draft,
    )
