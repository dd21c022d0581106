"""The recurrence of a gated delta net, token by token and many tokens at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from baton.engine.models.ops.delta_rule import carry_on

HEADS, KEY, VALUE = 2, 3, 5


def one_by_one(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, fading: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """As it is defined."""
    read = []
    for token in range(q.shape[1]):
        matrix = matrix * fading[:, token].exp()[:, None, None]
        key = k[:, token, :, None]
        wrong = v[:, token] - (matrix * key).sum(dim=1)
        matrix = matrix + key * (beta[:, token, None] * wrong)[:, None, :]
        read.append((matrix * q[:, token, :, None]).sum(dim=1))
    return torch.stack(read, dim=1), matrix


@pytest.mark.parametrize("cuts", [(12,), (1,) * 12, (5, 1, 6)])
def test_pieces_of_any_length_carry_on_the_same_matrix(cuts: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(3)
    q, k = torch.randn(2, HEADS, 12, KEY, generator=generator, dtype=torch.float64)
    k = k / k.norm(dim=-1, keepdim=True)
    v = torch.randn(HEADS, 12, VALUE, generator=generator, dtype=torch.float64)
    beta, fading = torch.rand(2, HEADS, 12, generator=generator, dtype=torch.float64)
    first = torch.randn(HEADS, KEY, VALUE, generator=generator, dtype=torch.float64)
    expected, last = one_by_one(q, k, v, beta, -fading, first)
    found, matrix = [], first
    for parts in zip(*(part.split(cuts, dim=1) for part in (q, k, v, beta, -fading)), strict=True):
        read, matrix = carry_on(matrix, *parts)
        found.append(read)
    torch.testing.assert_close(torch.cat(found, dim=1), expected)
    torch.testing.assert_close(matrix, last)
