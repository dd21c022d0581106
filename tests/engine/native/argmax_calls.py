"""The kernel that finds the most likely tokens as tests call it, with memory that ends at a page nobody may touch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.native.arguments import DTYPES, BatonArgmax
from tests.engine.native.compiled import kernels
from tests.engine.native.linear_calls import guarded, guarded_copy


@dataclass(frozen=True)
class Rows:
    """logits: [N, V], a view. masks: [G, ceil(V / 8)] uint8; mask_of: [N], -1 for none. `wide`: the rows that are read
    from `wide_logits` [N, V] float32."""

    logits: Tensor
    masks: Tensor | None = None
    mask_of: Tensor | None = None
    wide: Tensor | None = None
    wide_logits: Tensor | None = None

    def find(self, level: str, num_threads: int) -> tuple[Tensor, Tensor, Tensor]:
        """token ids [N] int64, largest [N] float32, whether they are valid [N] bool."""
        num_rows, size = self.logits.shape
        token_ids, largest = guarded((num_rows,), torch.int64), guarded((num_rows,), torch.float32)
        is_valid = guarded((num_rows,), torch.uint8)
        held = [None if each is None else guarded_copy(each) for each in (self.mask_of, self.wide)]
        bits = None if self.masks is None else guarded_copy(self.masks.flatten())
        mask_of, is_wide = (None if each is None else each.data_ptr() for each in held)
        kernels(level, num_threads).argmax(
            BatonArgmax(
                token_ids.data_ptr(),
                largest.data_ptr(),
                is_valid.data_ptr(),
                self.logits.data_ptr(),
                None if self.wide_logits is None else self.wide_logits.data_ptr(),
                is_wide,
                None if bits is None else bits.data_ptr(),
                mask_of,
                num_rows,
                size,
                self.logits.stride(0),
                0 if self.masks is None else self.masks.shape[1],
                DTYPES[self.logits.dtype],
            )
        )
        return token_ids, largest, is_valid != 0

    def ruled_out(self) -> Tensor:
        """What the rows compare, [N, V] float32, by torch."""
        values = self.logits.to(torch.float32, copy=True)
        if self.wide is not None and self.wide_logits is not None:
            values = torch.where(self.wide[:, None] != 0, self.wide_logits, values)
        for row, mask in enumerate([] if self.mask_of is None else self.mask_of.tolist()):
            if mask >= 0 and self.masks is not None:
                values[row] += torch.where(bits_of(self.masks[mask], values.shape[1]), 0.0, -torch.inf)
        return values


def bits_of(mask: Tensor, size: int) -> Tensor:
    """[size] bool of a mask [ceil(size / 8)] uint8."""
    return ((mask[:, None] >> torch.arange(8)) & 1).flatten()[:size] != 0
