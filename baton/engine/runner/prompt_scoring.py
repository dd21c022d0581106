"""Log probabilities of prompt tokens: which rows of a step tell them, computed in pieces, and brought home as bytes.

Owns one step's scoring from staging to the rows of `baton.wire.prompt_logprobs`. The row of a token tells the
probabilities of the token after it. A step has as many rows as prompt tokens, so their logits do not exist at once:
`PIECE_ELEMENTS` of them do. A step in which no request wants them has no scoring at all.

Letters: T tokens of the step, S rows that are scored, V vocabulary, K alternatives (`MAX_TOP_LOGPROBS`, or V).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from baton.device.base import Array, Staging
from baton.engine.models.base import RunnableDecoder
from baton.engine.scheduler.request import ScheduledRequest
from baton.engine.scheduler.step import PromptScores, PromptSpan, Step
from baton.wire.prompt_logprobs import row_words
from baton.wire.request_key import RequestKey
from baton.wire.sampling import MAX_TOP_LOGPROBS

PIECE_ELEMENTS = 1 << 24
"""Logits of one piece: 64 MiB as float32, and as much again for their logarithms of probabilities."""


class PromptScoring:
    """The scoring of one step. It is staged at construction, `score`d behind the forward pass, and read at last."""

    def __init__(self, step: Step, last_tokens: Sequence[int], staging: Staging) -> None:
        """`last_tokens`: for each request of the step the place of its last token among all tokens."""
        placed = _placed(step, last_tokens)
        self.outputs: tuple[Tensor, ...] = ()
        """Chosen [S] float32, ranks [S] int64 and, where a span wants any, ids [S, K] int64 and values [S, K]."""
        self._spans = step.spans
        self._rows = staging.put(scored_rows(step, last_tokens))
        self._targets = staging.put(np.concatenate([_targets(span, share) for span, share, _ in placed]))

    def score(self, decoder: RunnableDecoder, hidden: Tensor) -> None:
        """Issue the operations; hidden: [T, E] as `RunnableDecoder.forward` returns it."""
        with_top = any(span.num_top for span in self._spans)
        pieces = []
        for piece in score_pieces(len(self._rows), decoder.config.vocab_size):
            rows, targets = self._rows[piece], self._targets[piece]
            pieces.append(_score(decoder.logits(hidden.index_select(0, rows)), targets, with_top))
        self.outputs = pieces[0] if len(pieces) == 1 else tuple(map(torch.cat, zip(*pieces, strict=True)))

    def read(self, arrays: Sequence[Array]) -> dict[RequestKey, PromptScores]:
        """The scores of each span, from the fetched `outputs`."""
        found, begin = {}, 0
        for span in self._spans:
            end = begin + span.num_rows
            found[span.key] = _packed(span, [array[begin:end] for array in arrays])
            begin = end
        return found


def scored_rows(step: Step, last_tokens: Sequence[int]) -> Array:
    """The rows of a step that are scored, int64. `last_tokens`: see `PromptScoring`."""
    return np.concatenate([_places(*each) for each in _placed(step, last_tokens)])


def score_pieces(num_rows: int, vocab_size: int) -> Iterator[slice]:
    """The scored rows in pieces whose logits may exist at once."""
    rows_per_piece = max(1, PIECE_ELEMENTS // vocab_size)
    for first in range(0, num_rows, rows_per_piece):
        yield slice(first, first + rows_per_piece)


def _placed(step: Step, last_tokens: Sequence[int]) -> list[tuple[PromptSpan, ScheduledRequest, int]]:
    """Each span with the share of its request and the place of that one's last token."""
    shares = {share.key: (share, last) for share, last in zip(step.requests, last_tokens, strict=True)}
    return [(span, *shares[span.key]) for span in step.spans]


def _places(span: PromptSpan, share: ScheduledRequest, last: int) -> Array:
    first = last - (share.num_tokens - 1) + span.first_row - share.start
    return np.arange(first, first + span.num_rows, dtype=np.int64)


def _targets(span: PromptSpan, share: ScheduledRequest) -> Array:
    first = span.first_row + 1
    return np.array(share.token_ids[first : first + span.num_rows], dtype=np.int64)


def _score(logits: Tensor, targets: Tensor, with_top: bool) -> tuple[Tensor, ...]:
    """See `PromptScoring.outputs`, of one piece. All rows get the largest number of alternatives, as in the sampler."""
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, targets.unsqueeze(1))
    ranks = (logprobs > chosen).sum(dim=-1).add_(1)
    if not with_top:
        return chosen.squeeze(1), ranks
    values, ids = torch.topk(logprobs, min(MAX_TOP_LOGPROBS, logprobs.shape[1]))
    return chosen.squeeze(1), ranks, ids, values


def _packed(span: PromptSpan, arrays: Sequence[Array]) -> PromptScores:
    chosen, ranks = arrays[:2]
    num_top = min(span.num_top, arrays[2].shape[1]) if span.num_top else 0
    words = np.empty((span.num_rows, row_words(num_top)), dtype="<u4")
    words[:, 0] = chosen.astype("<f4").view("<u4")
    words[:, 1] = ranks
    is_valid = np.isfinite(chosen).all()
    if num_top:
        words[:, 2 : 2 + num_top] = arrays[2][:, :num_top]
        words[:, 2 + num_top :] = np.ascontiguousarray(arrays[3][:, :num_top], dtype="<f4").view("<u4")
        is_valid = is_valid and np.isfinite(arrays[3][:, :num_top]).all()
    return PromptScores(span.key, span.first_row + 1, num_top, words.tobytes(), bool(is_valid))
