"""Norms, rotation and gate by the CPU kernels, at every dispatch level: their formulas, rounding included."""

from __future__ import annotations

import itertools

import pytest
import torch

from baton.engine.models.ops.native_ops import NativeOps
from baton.engine.models.ops.torch_ops import TorchOps
from tests.engine.models.op_cases import (
    DTYPES,
    EPS,
    assert_same_roundings,
    plain_add_norm,
    plain_gate,
    plain_norm_rotate,
    random,
    random_rotation,
)
from tests.engine.native.compiled import LEVELS, kernels, needs_kernels

pytestmark = needs_kernels
NUM_ROWS = (0, 1, 33)


@pytest.fixture(params=LEVELS)
def ops(request: pytest.FixtureRequest) -> NativeOps:
    return NativeOps(kernels(request.param))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_norm_is_its_formula(ops: NativeOps, dtype: torch.dtype) -> None:
    for size, has_delta, num_rows in itertools.product((1, 64, 83, 4096), (True, False), NUM_ROWS):
        residual, weight = random(num_rows, size, dtype=dtype, gap=8), random(1, size, dtype=dtype, seed=2)[0]
        delta = random(num_rows, size, dtype=dtype, seed=1, gap=16) if has_delta else None
        expected_sum, expected = plain_add_norm(residual, delta, weight, EPS)
        normed = ops.add_norm(residual, delta, weight, EPS)
        assert torch.equal(residual, expected_sum)
        assert_same_roundings(normed, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_rotate_is_its_formula(ops: NativeOps, dtype: torch.dtype) -> None:
    shapes = ((1, 16), (6, 2), (3, 64), (5, 80), (40, 128), (2, 512), (1, 514))
    for (num_heads, head_dim), has_norm, num_tokens in itertools.product(shapes, (True, False), NUM_ROWS):
        weight = random(num_heads, head_dim, dtype=dtype, seed=2) if has_norm else None
        x = random(num_tokens, num_heads, head_dim, dtype=dtype, gap=2 * head_dim)
        before, rotation = x.clone(), random_rotation(num_tokens, head_dim, dtype)
        rotated = ops.norm_rotate(x, weight, EPS, rotation)
        assert torch.equal(x, before)
        assert rotated.is_contiguous()
        assert_same_roundings(rotated, plain_norm_rotate(x, weight, EPS, rotation))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_is_its_formula(ops: NativeOps, dtype: torch.dtype) -> None:
    for size, num_rows in itertools.product((1, 64, 83, 4864), NUM_ROWS):
        gate_up = random(num_rows, 2 * size, dtype=dtype, gap=16).mul_(4)
        assert_same_roundings(ops.gate(gate_up), plain_gate(gate_up))


def test_gate_far_from_zero(ops: NativeOps) -> None:
    gate_up = torch.tensor([[-1000.0, -100.0, -90.0, 90.0, 100.0, 1000.0, *[2.0] * 6]])
    torch.testing.assert_close(ops.gate(gate_up), TorchOps().gate(gate_up))
    not_a_number = ops.gate(torch.tensor([[torch.nan, 1.0]]))
    assert not_a_number.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_of_every_exponent_is_torchs(ops: NativeOps, dtype: torch.dtype) -> None:
    """A norm whose factor is one passes values through float32 and back."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = bits.view(torch.bfloat16 if dtype == torch.float32 else dtype).float()
    values = values[values.isfinite() & (values.abs() < 2.0**100)]
    ones = torch.ones(len(values), 1, dtype=dtype)
    delta = values.to(dtype)[:, None] * 0
    residual = values.to(dtype)[:, None].clone()
    ops.add_norm(residual, delta, ones[0], EPS)
    assert torch.equal(residual[:, 0], values.to(dtype))
