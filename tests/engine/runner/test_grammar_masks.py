"""Masks rule out exactly the tokens without a bit, in the rows that have one."""

from __future__ import annotations

import pytest
import torch

from baton.engine.runner.grammar_masks import apply_masks, are_allowed, stack_masks
from baton.engine.runner.sampled_rows import GrammarRow

VOCAB_SIZE = 21


class Fixed:
    """See `MaskSource`."""

    def __init__(self, mask: bytes | None) -> None:
        self.reason = ""
        self._mask = mask

    def accepts(self, token_id: int) -> bool:
        return self._mask is not None and bool(self._mask[token_id >> 3] >> (token_id & 7) & 1)

    def mask(self) -> bytes | None:
        return self._mask

    def fail(self, reason: str) -> None:
        self.reason = reason


def _mask(allowed: set[int], num_bytes: int = 3) -> bytes:
    return sum(1 << token_id for token_id in allowed).to_bytes(num_bytes, "little")


@pytest.mark.parametrize("rows", [(0, 1, 2), (2,), (0, 2)])
@pytest.mark.parametrize("num_bytes", [3, 8])
def test_what_has_no_bit_is_ruled_out(rows: tuple[int, ...], num_bytes: int) -> None:
    allowed = {row: {row, 9, 20} for row in rows}
    logits = torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    expected = logits.clone()
    for row in rows:
        for token_id in set(range(VOCAB_SIZE)) - allowed[row]:
            expected[row, token_id] = -torch.inf
    masks = stack_masks([GrammarRow(row, Fixed(_mask(allowed[row], num_bytes)), ()) for row in rows], VOCAB_SIZE)
    apply_masks(masks, logits)
    assert torch.equal(logits, expected)
    for token_id in range(VOCAB_SIZE):
        told = are_allowed(masks, torch.full((len(rows),), token_id))
        assert told.tolist() == [token_id in allowed[row] for row in rows]


def test_a_shorter_mask_allows_nothing_behind_its_end() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    apply_masks(stack_masks([GrammarRow(0, Fixed(b"\x03"), ())], VOCAB_SIZE), logits)
    assert logits[0].isfinite().nonzero().flatten().tolist() == [0, 1]


def test_a_row_of_nan_stays_one() -> None:
    logits = torch.full((1, VOCAB_SIZE), torch.nan)
    apply_masks(stack_masks([GrammarRow(0, Fixed(_mask({4})), ())], VOCAB_SIZE), logits)
    assert bool(logits.isnan().all())


def test_no_mask_and_no_common_token_leave_nothing() -> None:
    nothing, apart = Fixed(None), Fixed(_mask({1, 2}))
    rows = [GrammarRow(0, nothing, ()), GrammarRow(1, apart, (2, 3)), GrammarRow(2, apart, (3, 4))]
    logits = torch.zeros(3, VOCAB_SIZE)
    apply_masks(stack_masks(rows[:2], VOCAB_SIZE), logits)
    assert logits.isfinite().any(dim=1).tolist() == [False, True, True]
    assert not apart.reason
    stack_masks(rows[2:], VOCAB_SIZE)
    assert "in common" in apart.reason


def test_ends_are_ruled_out_unless_nothing_else_is_left() -> None:
    open_to_all, only_ends = Fixed(_mask({1, 2, 9})), Fixed(_mask({2, 9}))
    rows = [GrammarRow(0, open_to_all, (), (2, 9)), GrammarRow(1, only_ends, (), (2, 9))]
    logits = torch.zeros(2, VOCAB_SIZE)
    apply_masks(stack_masks(rows, VOCAB_SIZE), logits)
    assert [row.isfinite().nonzero().flatten().tolist() for row in logits] == [[1], [2, 9]]
