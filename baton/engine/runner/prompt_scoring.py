"""The kind of reading that tells log probabilities of prompt tokens, as rows of `baton.wire.prompt_logprobs`.

The row of a token tells the probabilities of the token after it. A step has as many rows as prompt tokens, so their
logits do not exist at once: `PIECE_ELEMENTS` of them do.

Letters: T tokens of the step, S rows that are scored, V vocabulary, K alternatives (`MAX_TOP_LOGPROBS`, or V).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from baton.device.base import Array, Staging
from baton.engine.models.base import RunnableDecoder
from baton.engine.runner.readings import KindOfReading, PlacedSpan, row_pieces
from baton.wire.prompt_logprobs import row_words
from baton.wire.sampling import MAX_TOP_LOGPROBS


@dataclass(frozen=True, slots=True)
class PromptScoring(KindOfReading):
    """The reading that asks for log probabilities of a prompt. `num_top`: alternatives to report beside each token."""

    num_top: int
    needs_logits: ClassVar[bool] = True

    @property
    def with_tokens(self) -> bool:
        """True: tokens are wanted too."""
        return True

    def rows(self, num_prompt_tokens: int) -> range:
        """All rows of the prompt but the last one, which tells of no token of it."""
        return range(num_prompt_tokens - 1)

    @classmethod
    def staged(cls, spans: Sequence[PlacedSpan], rows: Tensor, staging: Staging) -> StagedScoring:
        """What the device needs to score these spans, in staging memory."""
        targets = staging.put(np.concatenate([_targets(placed) for placed in spans]))
        wanted = [(span.num_rows, span.reading.num_top) for span, _, _ in spans if isinstance(span.reading, cls)]
        return StagedScoring(wanted, rows, targets)


class StagedScoring:
    """Log probabilities of prompts that one step computes. `wanted`: of each span the number of rows, and of
    alternatives. rows, targets: [S]."""

    def __init__(self, wanted: Sequence[tuple[int, int]], rows: Tensor, targets: Tensor) -> None:
        self.outputs: tuple[Tensor, ...] = ()
        """Chosen [S] float32, ranks [S] int64 and, where a span wants any, ids [S, K] int64 and values [S, K]."""
        self._wanted = wanted
        self._rows = rows
        self._targets = targets

    def compute(self, decoder: RunnableDecoder, hidden: Tensor) -> None:
        """Launch the scoring, piece by piece."""
        with_top = any(num_top for _, num_top in self._wanted)
        pieces = []
        for piece in row_pieces(len(self._rows), decoder.config.vocab_size):
            rows, targets = self._rows[piece], self._targets[piece]
            pieces.append(_score(decoder.logits(hidden.index_select(0, rows)), targets, with_top))
        self.outputs = pieces[0] if len(pieces) == 1 else tuple(map(torch.cat, zip(*pieces, strict=True)))

    def values(self, arrays: Sequence[Array]) -> Iterator[tuple[bytes, bool]]:
        """For each span its rows as bytes, and whether all are numbers."""
        begin = 0
        for num_rows, num_top in self._wanted:
            yield _packed(num_top, [array[begin : begin + num_rows] for array in arrays])
            begin += num_rows


def _targets(placed: PlacedSpan) -> Array:
    first = placed.span.first_row + 1
    return np.array(placed.share.token_ids[first : first + placed.span.num_rows], dtype=np.int64)


def _score(logits: Tensor, targets: Tensor, with_top: bool) -> tuple[Tensor, ...]:
    """Log probabilities of one piece of the rows. All rows get the largest number of alternatives, as in the
    sampler."""
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, targets.unsqueeze(1))
    ranks = (logprobs > chosen).sum(dim=-1).add_(1)
    if not with_top:
        return chosen.squeeze(1), ranks
    values, ids = torch.topk(logprobs, min(MAX_TOP_LOGPROBS, logprobs.shape[1]))
    return chosen.squeeze(1), ranks, ids, values


def _packed(num_top: int, arrays: Sequence[Array]) -> tuple[bytes, bool]:
    chosen, ranks = arrays[:2]
    num_top = min(num_top, arrays[2].shape[1]) if num_top else 0
    words = np.empty((len(chosen), row_words(num_top)), dtype="<u4")
    words[:, 0] = chosen.astype("<f4").view("<u4")
    words[:, 1] = ranks
    is_valid = np.isfinite(chosen).all()
    if num_top:
        words[:, 2 : 2 + num_top] = arrays[2][:, :num_top]
        words[:, 2 + num_top :] = np.ascontiguousarray(arrays[3][:, :num_top], dtype="<f4").view("<u4")
        is_valid = is_valid and np.isfinite(arrays[3][:, :num_top]).all()
    return words.tobytes(), bool(is_valid)
