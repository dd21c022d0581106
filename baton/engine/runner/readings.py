"""What a step reads of rows of prompts, whatever kinds of readings its requests ask for.

Owns the contract of a kind, and one step's readings from staging to the values on the host. Which rows are read is the
scheduler's decision (`baton.engine.scheduler.reading`); what is computed of them is that of the kinds, each a module of
its own, as `baton.engine.runner.prompt_scoring`. A step without spans has nothing of this.

Where an engine has several ranks, all of them compute logits together, so each kind that needs logits asks for those of
its rows once, in the pieces of `row_pieces`, and the kinds follow each other in the order of `by_kind`.

Letters: T tokens of the step, S rows of one kind, E hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from baton.device.base import Array, Staging
from baton.engine.models.base import RunnableDecoder
from baton.engine.scheduler.reading import ReadSpan, RowsRead
from baton.engine.scheduler.request import ScheduledRequest
from baton.engine.scheduler.step import Step
from baton.wire.request_key import RequestKey

PIECE_ELEMENTS = 1 << 24
"""Logits of one piece: 64 MiB as float32, and as much again for their logarithms of probabilities."""
MAX_KINDS = 8
"""In one step, as far as staging memory is concerned."""


class PlacedSpan(NamedTuple):
    """A span of `share`, which it is a part of. `first_place`: of its first row among the T tokens."""

    span: ReadSpan
    share: ScheduledRequest
    first_place: int


class StagedReading(Protocol):
    """What one kind computes in one step."""

    outputs: tuple[Tensor, ...]
    """There after `compute`; they come to the host as they are."""

    def compute(self, decoder: RunnableDecoder, hidden: Tensor) -> None:
        """Issue the operations; hidden: [T, E] as `RunnableDecoder.forward` returns it, which must not be changed."""
        ...

    def values(self, arrays: Sequence[Array]) -> Iterator[tuple[bytes, bool]]:
        """Of the fetched `outputs` what `RowsRead` says, for each span in order: (values, whether they are valid)."""
        ...


class KindOfReading(ABC):
    """A reading with its device code. A kind is a frozen dataclass of this base."""

    needs_logits: ClassVar[bool] = False

    @property
    @abstractmethod
    def with_tokens(self) -> bool:
        """Whether tokens are wanted too."""

    @abstractmethod
    def rows(self, num_prompt_tokens: int) -> range:
        """Which rows of a prompt are read."""

    @classmethod
    @abstractmethod
    def staged(cls, spans: Sequence[PlacedSpan], rows: Tensor, staging: Staging) -> StagedReading:
        """Begin with the readings of this kind in one step. rows: [S] int64, of all `spans`, which are in order, among
        the T tokens. May stage 8 bytes for each row."""


class StepReadings:
    """All of a step. They are staged at construction, computed behind the forward pass, and read at last."""

    def __init__(self, step: Step, last_tokens: Sequence[int], staging: Staging) -> None:
        """`last_tokens`: for each request of the step the place of its last token among all tokens."""
        self.outputs: tuple[Tensor, ...] = ()
        self._kinds = [
            (spans, kind.staged(spans, staging.put(places(spans)), staging))
            for kind, spans in by_kind(step, last_tokens).items()
        ]

    def compute(self, decoder: RunnableDecoder, hidden: Tensor) -> None:
        """Launch what is read, kind by kind."""
        for _, staged in self._kinds:
            staged.compute(decoder, hidden)
            self.outputs += staged.outputs

    def read(self, arrays: Sequence[Array]) -> dict[RequestKey, RowsRead]:
        """What was read of each span, from the fetched `outputs`."""
        found, first = {}, 0
        for spans, staged in self._kinds:
            end = first + len(staged.outputs)
            for placed, (values, is_valid) in zip(spans, staged.values(arrays[first:end]), strict=True):
                span = placed.span
                found[span.key] = RowsRead(span.first_row, span.num_rows, values, is_valid)
            first = end
        return found


def by_kind(step: Step, last_tokens: Sequence[int]) -> dict[type[KindOfReading], list[PlacedSpan]]:
    """The spans of a step, those of a kind together. Raises `TypeError` for a reading that no runner knows."""
    found: dict[type[KindOfReading], list[PlacedSpan]] = {}
    shares = {share.key: (share, last) for share, last in zip(step.requests, last_tokens, strict=True)}
    for span in step.spans:
        share, last = shares[span.key]
        if not isinstance(span.reading, KindOfReading):
            raise TypeError(f"{span.reading!r} is no kind of reading")
        placed = PlacedSpan(span, share, last - (share.num_tokens - 1) + span.first_row - share.start)
        found.setdefault(type(span.reading), []).append(placed)
    return found


def places(spans: Sequence[PlacedSpan]) -> Array:
    """The rows of all spans among the T tokens, [S] int64."""
    each = [np.arange(first, first + span.num_rows, dtype=np.int64) for span, _, first in spans]
    return np.concatenate(each)


def logit_rows(step: Step, last_tokens: Sequence[int]) -> list[Array]:
    """The rows whose logits are computed to be read, [S] int64 of each kind that needs them, in their order."""
    kinds = by_kind(step, last_tokens) if step.spans else {}
    return [places(spans) for kind, spans in kinds.items() if kind.needs_logits]


def row_pieces(num_rows: int, vocab_size: int) -> Iterator[slice]:
    """The rows of a kind in pieces whose logits may exist at once."""
    rows_per_piece = max(1, PIECE_ELEMENTS // vocab_size)
    for first in range(0, num_rows, rows_per_piece):
        yield slice(first, first + rows_per_piece)
