from __future__ import annotations

import importlib.util

import pytest
import torch

from engine.models.ops import TorchOps, choose_ops
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_delta", [True, False])
def test_add_norm_is_its_formula(dtype: torch.dtype, has_delta: bool) -> None:
    residual, weight = random(33, 80, dtype=dtype, gap=8), random(1, 80, dtype=dtype, seed=2)[0]
    delta = random(33, 80, dtype=dtype, seed=1, gap=16) if has_delta else None
    expected_sum, expected = plain_add_norm(residual, delta, weight, EPS)
    normed = TorchOps().add_norm(residual, delta, weight, EPS)
    assert torch.equal(residual, expected_sum)
    assert normed.is_contiguous()
    assert_same_roundings(normed, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [True, False])
def test_norm_rotate_is_its_formula(dtype: torch.dtype, has_norm: bool) -> None:
    x = random(33, 5, 24, dtype=dtype, gap=48)
    before = x.clone()
    weight = random(5, 24, dtype=dtype, seed=2) if has_norm else None
    rotation = random_rotation(33, 24, dtype)
    rotated = TorchOps().norm_rotate(x, weight, EPS, rotation)
    assert torch.equal(x, before)
    assert rotated.is_contiguous()
    assert_same_roundings(rotated, plain_norm_rotate(x, weight, EPS, rotation))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_is_its_formula(dtype: torch.dtype) -> None:
    gate_up = random(33, 160, dtype=dtype, gap=8) * 4
    gated = TorchOps().gate(gate_up)
    assert gated.is_contiguous()
    assert_same_roundings(gated, plain_gate(gate_up))


def test_ops_are_chosen_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 1)
    assert type(choose_ops(cpu)).__name__ == "TorchOps"
    assert type(choose_ops(gpu)).__name__ == "TritonOps"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert type(choose_ops(gpu)).__name__ == "TorchOps"
