"""The recurrence of gated delta nets by the CPU kernels, at each dispatch level that this processor can run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baton.engine.attention.base import StatePiece
from baton.engine.models.ops.delta_rule import DeltaHeads, carry_on_pieces
from baton.engine.models.ops.native_ops import NativeOps
from tests.engine.native.compiled import LEVELS, kernels, needs_kernels

pytestmark = needs_kernels

WHOLE = [StatePiece(0, 16, None, 3, 0), StatePiece(16, 27, 3, 1, 1), StatePiece(27, 28, 5, 5, 0)]
"""A prompt in two blocks, and a token of another sequence, whose matrices lie in the block 5 already."""


def heads_of(key_dim: int, value_dim: int, num_heads: int = 3) -> DeltaHeads:
    random = torch.Generator().manual_seed(key_dim)
    q, k = torch.randn(2, 28, num_heads, key_dim, generator=random)
    v = torch.randn(28, num_heads, value_dim, generator=random)
    beta, fading = torch.rand(2, 28, num_heads, generator=random)
    return DeltaHeads(q, k / k.norm(dim=-1, keepdim=True), v, beta, -fading)


def blocks_of(heads: DeltaHeads) -> Tensor:
    """Of six blocks; nothing that counts but in block 5. Blocks are further apart than their matrices are large."""
    size = heads.q.shape[1] * heads.q.shape[2] * heads.v.shape[2]
    memory = torch.full((6, size + 10), torch.nan)
    memory[5] = torch.linspace(-1, 1, size + 10)
    return memory[:, 4:-6].view(6, heads.q.shape[1], heads.q.shape[2], heads.v.shape[2])


@pytest.mark.parametrize(("key_dim", "value_dim"), [(3, 5), (128, 128), (64, 40), (256, 16), (300, 8)])
@pytest.mark.parametrize("level", LEVELS)
def test_tokens_read_and_leave_what_they_do_in_float64(level: str, key_dim: int, value_dim: int) -> None:
    heads = heads_of(key_dim, value_dim)
    matrices = blocks_of(heads)
    wide = matrices.double()
    expected = carry_on_pieces(wide, WHOLE, DeltaHeads(*(part.double() for part in heads)))
    found = NativeOps(kernels(level)).carry_on(matrices, WHOLE, heads)
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(matrices.double(), wide, atol=1e-4, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize("level", LEVELS)
def test_a_result_depends_on_no_cut_on_no_threads_and_on_nothing_beside_it(level: str) -> None:
    heads = heads_of(64, 40)
    whole, cut, alone = (blocks_of(heads) for _ in range(3))
    expected = NativeOps(kernels(level)).carry_on(whole, WHOLE, heads)
    pieces = [StatePiece(0, 5, None, 3, 0), StatePiece(5, 6, 3, 3, 1), StatePiece(6, 16, 3, 3, 2), *WHOLE[1:]]
    pieces[3] = pieces[3]._replace(level=3)
    assert torch.equal(NativeOps(kernels(level, 1)).carry_on(cut, pieces, heads), expected)
    assert torch.equal(cut.nan_to_num(), whole.nan_to_num())
    last = DeltaHeads(*(part[27:] for part in heads))
    found = NativeOps(kernels(level, 1)).carry_on(alone, [StatePiece(0, 1, 5, 5, 0)], last)
    assert torch.equal(found, expected[27:])
    assert torch.equal(alone[5], whole[5])
