from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from bench.gpu_check.operations_process import (
    ERROR_BOUNDS,
    NAMES,
    SAME_BOUNDS,
    make_operands,
    operation_errors,
    run_operation,
)
from engine.models.ops.torch_ops import TorchOps
from engine.models.rope import Rotation

CPU = torch.device("cpu")


class Broken(TorchOps):
    """Each operation with one mistake that a kernel could make."""

    def add_norm(self, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        kept = residual.clone()
        normed = super().add_norm(residual, delta, weight, eps)
        residual.copy_(kept) if delta is not None else residual.mul_(1.1)
        return normed

    def norm_rotate(self, x: Tensor, weight: Tensor | None, eps: float, rotation: Rotation) -> Tensor:
        cos, sin = rotation
        return super().norm_rotate(x, weight, eps, (cos, -sin))

    def gate(self, gate_up: Tensor) -> Tensor:
        out = super().gate(gate_up)
        out[-1, -1] = math.nan
        return out


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", NAMES)
def test_plain_torch_keeps_the_bounds(name: str, dtype: str) -> None:
    given = make_operands(7, dtype, CPU, "tiny")
    error, difference = operation_errors(TorchOps(), name, given)
    assert 0 < error <= ERROR_BOUNDS[dtype]
    assert difference == 0 <= SAME_BOUNDS[dtype]


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_operation_is_seen(name: str) -> None:
    error, difference = operation_errors(Broken(), name, make_operands(7, "bfloat16", CPU, "tiny"))
    assert not error <= ERROR_BOUNDS["bfloat16"]
    assert not difference <= SAME_BOUNDS["bfloat16"]


def test_an_unknown_operation_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown operation softmax"):
        run_operation(TorchOps(), "softmax", make_operands(1, "float32", CPU, "tiny"))
