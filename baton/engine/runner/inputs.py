"""A step's inputs as arrays: token ids, positions, and where the device finds tokens that the host does not know yet.

Owns the flattening of a step. A token that the step before samples is `PENDING_TOKEN` in its request; on the device it
lies in `sampled`, in the row that was its request's in that step.

Letters: T tokens of the step, N rows sampled by the step before.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from baton.device.base import Array
from baton.engine.models.adapters.low_rank import AdaptedRows
from baton.engine.models.media import MediaRows
from baton.engine.scheduler.request import PENDING_TOKEN
from baton.engine.scheduler.step import Step
from baton.wire.errors import BatonError
from baton.wire.request_key import RequestKey

_NO_SOURCES: Array = np.empty(0, dtype=np.int64)


class TokenUnknown(BatonError):
    """A step needs a token that the step before it does not sample."""

    code = "internal_error"


@dataclass(frozen=True, slots=True)
class StepInputs:
    """All requests one after another. token_ids, positions, sources: [T] int64.

    A token whose source is not negative is in that row of `sampled`; its token id is 0. `has_pending`: there are some;
    if not, there are no sources.
    `last_tokens`: for each request of the step the place of its last token. `media`: what its tokens of media get;
    `adapted`: the rows of adapters.
    """

    token_ids: Array
    positions: Array
    sources: Array
    has_pending: bool
    last_tokens: list[int]
    media: MediaRows | None = None
    adapted: AdaptedRows = ()

    @property
    def is_plain(self) -> bool:
        """Whether tokens and positions are all that there is to it: others are computed operation by operation."""
        return self.media is None and not self.adapted


class InputReader(Protocol):
    """Finds what the requests of some steps need beside their tokens."""

    def read(self, step: Step, inputs: StepInputs) -> StepInputs:
        """`inputs` with what it finds for them; the same where there is nothing."""
        ...


def read_inputs(step: Step, sampled_rows: Mapping[RequestKey, int]) -> StepInputs:
    """The step's tokens as inputs of the device; `sampled_rows` are the rows of the step before, by request.

    Raises `TokenUnknown`.
    """
    requests = step.requests
    num_tokens = [request.num_tokens for request in requests]
    if max(num_tokens) == 1:
        ids = [request.token_ids[request.start] for request in requests]
        token_ids = np.array(ids, dtype=np.int64)
        positions = np.array([request.start for request in requests], dtype=np.int64)
        last_tokens = list(range(len(ids)))
        has_pending = PENDING_TOKEN in ids
    else:
        token_ids, positions = _flatten(step)
        last_tokens = (np.cumsum(num_tokens) - 1).tolist()
        has_pending = any(request.token_ids[-1] == PENDING_TOKEN for request in requests)
    if not has_pending:
        return StepInputs(token_ids, positions, _NO_SOURCES, False, last_tokens)
    sources = np.full(len(token_ids), -1, dtype=np.int64)
    for place in np.flatnonzero(token_ids == PENDING_TOKEN).tolist():
        key = requests[bisect_right(last_tokens, place - 1)].key
        if key not in sampled_rows:
            raise TokenUnknown(
                f"token {positions[place]} of {key!r} is not known, and the step before samples none of it"
            )
        sources[place] = sampled_rows[key]
        token_ids[place] = 0
    return StepInputs(token_ids, positions, sources, True, last_tokens)


def fill_pending(token_ids: Tensor, sources: Tensor, sampled: Tensor) -> Tensor:
    """Token ids [T] with those in their places that the device has sampled. sampled: [at least N] int64."""
    return torch.where(sources < 0, token_ids, sampled.index_select(0, sources.clamp(min=0)))


def _flatten(step: Step) -> tuple[Array, Array]:
    """Token ids and positions, each [T] int64."""
    token_ids: list[int] = []
    positions: list[int] = []
    for request in step.requests:
        stop = request.start + request.num_tokens
        token_ids += request.token_ids[request.start : stop]
        positions += range(request.start, stop)
    return np.array(token_ids, dtype=np.int64), np.array(positions, dtype=np.int64)
