"""The rows of a step that belong to adapters.

Owns the way from the adapters of requests to rows. Knows no weights: an adapter is its digest.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, pairwise

import torch
from torch import Tensor

from baton.engine.runner.inputs import StepInputs
from baton.engine.scheduler.step import Step


class StepAdapters:
    """Finds the rows of each adapter; indices are on `device`. See `InputReader`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self, step: Step, inputs: StepInputs) -> StepInputs:
        """`inputs` with the rows of adapters."""
        if not any(share.prompt.adapter for share in step.requests):
            return inputs
        found: dict[bytes, list[range]] = {}
        first = 0
        for share in step.requests:
            stop = first + share.num_tokens
            if share.prompt.adapter:
                found.setdefault(share.prompt.adapter, []).append(range(first, stop))
            first = stop
        return replace(inputs, adapted=tuple((digest, self._rows(spans)) for digest, spans in found.items()))

    def _rows(self, spans: list[range]) -> slice | Tensor:
        """Of tokens beside each other a slice: then nothing is copied."""
        if all(one.stop == other.start for one, other in pairwise(spans)):
            return slice(spans[0].start, spans[-1].stop)
        return torch.tensor(list(chain.from_iterable(spans)), device=self._device)
