"""Inputs for the operations of a decoder, their results by plain formulas, and how close two implementations must be.

Letters: T tokens, E hidden size, I intermediate size, H heads, D head size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from baton.engine.models.rope import Rotation

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
EPS = 0.1
"""Large enough to matter."""


def random(*shape: int, dtype: torch.dtype, seed: int = 0, gap: int = 0) -> Tensor:
    """Normal numbers [T, ...]. Between two tokens lie `gap` NaNs, as where a view leaves out part of a wider tensor."""
    row = math.prod(shape[1:])
    wide = torch.full((shape[0], row + gap), math.nan, dtype=dtype)
    wide[:, :row] = torch.randn(shape[0], row, generator=torch.Generator().manual_seed(seed)).to(dtype)
    inner = [math.prod(shape[axis + 1 :]) for axis in range(1, len(shape))]
    return wide.as_strided(shape, (row + gap, *inner))


def random_rotation(num_tokens: int, head_dim: int, dtype: torch.dtype) -> Rotation:
    """Numbers in the place of cos and sin, all different: reading the wrong half of a table shows."""
    cos, sin = (random(num_tokens, 1, head_dim, dtype=dtype, seed=seed).sin() for seed in (8, 9))
    return cos, sin


def plain_add_norm(residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum and its norm."""
    total = residual if delta is None else (residual.double() + delta.double()).to(residual.dtype)
    return total, _plain_norm(total, weight, eps)


def plain_norm_rotate(x: Tensor, weight: Tensor | None, eps: float, rotation: Rotation) -> Tensor:
    normed = x if weight is None else _plain_norm(x, weight, eps)
    cos, signed_sin = rotation
    head_dim = x.shape[-1]
    partner_of = [(element + head_dim // 2) % head_dim for element in range(head_dim)]
    own = (normed.double() * cos.double()).to(x.dtype)
    partner = (normed[..., partner_of].double() * signed_sin.double()).to(x.dtype)
    return (own.double() + partner.double()).to(x.dtype)


def plain_gate(gate_up: Tensor) -> Tensor:
    size = gate_up.shape[1] // 2
    gate, up = gate_up[:, :size].double(), gate_up[:, size:].double()
    activated = (gate / (1.0 + torch.exp(-gate))).to(gate_up.dtype)
    return (activated.double() * up).to(gate_up.dtype)


def _plain_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    normed = (wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt()).to(x.dtype)
    return (normed.double() * weight.double()).to(x.dtype)


def assert_same_roundings(actual: Tensor, expected: Tensor) -> None:
    """Equal but for the order of float32 sums, which now and then moves a value of the dtype to its neighbour. Rounding
    at another place moves a quarter of them and more."""
    assert actual.dtype == expected.dtype
    if actual.dtype == torch.float32:
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
        return
    spacing = torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual, expected, rtol=2 * spacing, atol=4 * spacing)
    assert actual.numel() == 0 or (actual == expected).float().mean() > 0.99
