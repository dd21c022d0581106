"""Masks of grammars: which tokens some rows may sample, as bits.

Owns the stacking on the host, where matchers compute their masks without Python's lock, and how the bits are applied;
which rows need a mask is `baton.engine.runner.redraws`. Has no state between steps. A row for which no token is left
holds -inf alone after this, which the sampler reports as it reports NaN.

Letters: G rows with a grammar, V vocabulary, W bytes of a mask.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from baton.engine.runner.sampled_rows import GrammarRow

_NO_TOKEN = "allowed_token_ids and the grammar have no token in common"
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_CHANGES_BY_BYTE = np.where(_BITS, np.float32(0), np.float32(-np.inf))
"""What a byte of a mask adds to eight logits: 0 or -inf. [256, 8]."""


@dataclass(frozen=True, slots=True)
class Masks:
    """rows: [G] int64, in their order, None when they are the first G; bits: [G * W] uint8, a bit for each token id,
    the lowest first; 8 * W is at least V."""

    num_rows: int
    rows: Tensor | None
    bits: Tensor

    def staged(self, put: Callable[[Tensor], Tensor]) -> Masks:
        """The same on the device, where there is room."""
        return Masks(self.num_rows, None if self.rows is None else put(self.rows), put(self.bits))


class RowMasks(NamedTuple):
    """Masks of rows by grammars, on the host, where nothing of torch is needed. rows: [G], bits: [G * W]."""

    rows: Sequence[int]
    bits: array[int]


def row_masks(grammar_rows: Sequence[GrammarRow], vocab_size: int) -> RowMasks:
    """The masks of these rows. A row without a mask has failed: it may sample nothing."""
    num_bytes = -(-vocab_size // 8)
    bits = array("B")
    for each in grammar_rows:
        mask: bytes | bytearray = each.matcher.mask() or b""
        if len(mask) != num_bytes:
            mask = mask[:num_bytes].ljust(num_bytes, b"\0")
        if each.allowed and not any(_has_bit(mask, token_id) for token_id in each.allowed):
            each.matcher.fail(_NO_TOKEN)
        bits.frombytes(_without(mask, each.ends) if each.ends else mask)
    return RowMasks([row.row for row in grammar_rows], bits)


def stack_masks(grammar_rows: Sequence[GrammarRow], vocab_size: int) -> Masks:
    """The masks of these rows, on the host."""
    rows, bits = row_masks(grammar_rows, vocab_size)
    are_first = rows[-1] == len(rows) - 1
    return Masks(len(rows), None if are_first else torch.tensor(rows), torch.frombuffer(bits, dtype=torch.uint8))


def apply_masks(masks: Masks, logits: Tensor) -> None:
    """Rule out all tokens that the masks do not allow. logits: [N, V], changed in place. NaN stays NaN: its row must
    not be taken for a valid one."""
    # eight logits at a time: unpacking single bits takes ten times as long on a host
    if logits.is_cpu:  # where numpy does it in half the time that torch takes
        changes = torch.from_numpy(_CHANGES_BY_BYTE.take(masks.bits.numpy(), axis=0, mode="clip"))
    else:
        changes = _changes_by_byte(logits.device).index_select(0, masks.bits.to(logits.device, torch.int64))
    changes = changes.view(masks.num_rows, -1)[:, : logits.shape[1]]
    if masks.rows is None:
        logits[: masks.num_rows].add_(changes)
    else:
        logits.index_add_(0, masks.rows.to(logits.device), changes)


def are_allowed(masks: Masks, token_ids: Tensor) -> Tensor:
    """Whether `masks` allow these tokens [G] int64, each in its row: [G] bool."""
    of_rows = masks.bits.to(token_ids.device).view(masks.num_rows, -1)
    byte = of_rows.gather(1, (token_ids >> 3).unsqueeze(1)).squeeze(1).to(torch.int64)
    return (byte >> (token_ids & 7) & 1).to(torch.bool)


def _has_bit(mask: bytes | bytearray, token_id: int) -> int:
    return mask[token_id >> 3] >> (token_id & 7) & 1


def _without(mask: bytes | bytearray, token_ids: Sequence[int]) -> bytes | bytearray:
    """`mask` without these tokens, or as it is when it allows no other."""
    for token_id in token_ids:
        if _has_bit(mask, token_id):
            break
    else:
        return mask
    changed = bytearray(mask)
    for token_id in token_ids:
        changed[token_id >> 3] &= ~(1 << (token_id & 7))
    return changed if any(changed) else mask


@cache
def _changes_by_byte(device: torch.device) -> Tensor:
    return torch.from_numpy(_CHANGES_BY_BYTE).to(device)
