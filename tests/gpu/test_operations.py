"""Triton's operations on a GPU against plain torch and float64."""

from __future__ import annotations

import pytest
import torch

from bench.gpu_check.operations_process import (
    ERROR_BOUNDS,
    NAMES,
    ROWS,
    SAME_BOUNDS,
    make_operands,
    operation_errors,
)
from device.base import Device
from engine.models.ops.choose import choose_ops
from engine.models.ops.torch_ops import TorchOps

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("model", ["8B", "0.6B", "tiny"])
def test_a_fused_operation_rounds_as_plain_torch_does(
    model: str, dtype: str, name: str, num_rows: int, device: Device
) -> None:
    given = make_operands(num_rows, dtype, device.torch_device, model, seed=num_rows)
    error, difference = operation_errors(choose_ops(device.torch_device), name, given)
    assert error <= ERROR_BOUNDS[dtype]
    assert difference <= SAME_BOUNDS[dtype]


def test_a_gpu_gets_the_fused_operations(device: Device) -> None:
    assert type(choose_ops(device.torch_device)) is not TorchOps
