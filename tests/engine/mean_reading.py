"""A kind of reading that only tests have: the mean of a prompt's last hidden states, as a pooled vector would be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baton.device.base import Array, Staging
from baton.engine.models.base import RunnableDecoder
from baton.engine.runner.readings import KindOfReading, PlacedSpan
from baton.engine.scheduler.reading import RowsRead


@dataclass(frozen=True, slots=True)
class MeanOfRows(KindOfReading):
    """Of all rows. The values of a part are its sum, [E] float32, so that parts add up."""

    with_tokens: bool = False

    def rows(self, num_prompt_tokens: int) -> range:
        """See `Reading.rows`."""
        return range(num_prompt_tokens)

    @classmethod
    def staged(cls, spans: Sequence[PlacedSpan], rows: Tensor, staging: Staging) -> StagedMeans:
        """See `KindOfReading.staged`."""
        return StagedMeans([placed.span.num_rows for placed in spans], rows)


class StagedMeans:
    """See `StagedReading`."""

    def __init__(self, nums_rows: Sequence[int], rows: Tensor) -> None:
        self.outputs: tuple[Tensor, ...] = ()
        self._nums_rows, self._rows = nums_rows, rows

    def compute(self, decoder: RunnableDecoder, hidden: Tensor) -> None:
        """See `StagedReading.compute`."""
        states = decoder.normed(hidden.index_select(0, self._rows)).float()
        self.outputs = (torch.stack([each.sum(0) for each in torch.split(states, list(self._nums_rows))]),)

    def values(self, arrays: Sequence[Array]) -> Iterator[tuple[bytes, bool]]:
        """See `StagedReading.values`."""
        for row in arrays[0]:
            yield row.astype("<f4").tobytes(), bool(np.isfinite(row).all())


def mean_of(parts: Iterable[RowsRead]) -> Array:
    """The mean that the parts of one prompt add up to, [E]."""
    listed = list(parts)
    total: Array = np.sum([np.frombuffer(part.values, "<f4") for part in listed], axis=0)
    return total / sum(part.num_rows for part in listed)
