"""The most likely token of each row, by the CPU kernels: logits are read once, in the model's own dtype, and masks of
grammars are applied while they are read.

Knows no requests. Has no state between steps. The result is that of torch's `max` over masked logits.

Letters: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.native.arguments import DTYPES, BatonArgmax
from engine.native.library import Kernels
from engine.runner.grammar_masks import Masks


def argmax(
    kernels: Kernels, logits: Tensor, masks: Masks | None, wide: Tensor, wide_rows: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The largest logit of each row [N] float32, and its place [N] int64, the first of equal ones.

    logits: [N, V]. `wide_rows` are read from `wide` [N, V] float32 instead, and have what masks rule out as -inf there
    afterwards. Where a row holds NaN, so does the result.
    """
    num_rows, size = logits.shape
    largest, token_ids = torch.empty(num_rows), torch.empty(num_rows, dtype=torch.int64)
    call = BatonArgmax(
        token_ids=token_ids.data_ptr(),
        largest=largest.data_ptr(),
        logits=logits.data_ptr(),
        num_rows=num_rows,
        size=size,
        stride=logits.stride(0),
        dtype=DTYPES[logits.dtype],
    )
    if masks is not None:
        of_row = _mask_of_row(masks, num_rows)
        call.bits, call.masks, call.mask_bytes = masks.bits.data_ptr(), of_row.data_ptr(), -(-size // 8)
    if wide_rows:
        is_wide = bytearray(num_rows)
        for row in wide_rows:
            is_wide[row] = 1
        flags = torch.frombuffer(is_wide, dtype=torch.uint8)
        call.wide, call.is_wide = wide.data_ptr(), flags.data_ptr()
    kernels.argmax(call)
    return largest, token_ids


def _mask_of_row(masks: Masks, num_rows: int) -> Tensor:
    """The number of each row's mask [N] int64, -1 for none."""
    of_row = torch.full((num_rows,), -1)
    numbers = torch.arange(masks.num_rows)
    if masks.rows is None:
        of_row[: masks.num_rows] = numbers
    else:
        of_row[masks.rows] = numbers
    return of_row
