"""Attention on a GPU against float64, over the grid of `python -m bench.gpu_check`."""

from __future__ import annotations

import pytest
import torch

from bench.gpu_check.attention_cases import DTYPES, ERROR_BOUNDS, GROUPS, HEAD_SIZES, AttentionCase, attention_cases
from bench.gpu_check.attention_process import (
    GRAPH_SIZES,
    MakeBackend,
    check_case,
    check_graph,
    flashinfer_backend,
    graph_inputs,
    make_inputs,
    torch_backend,
)
from device.base import Device

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)


BACKENDS = {"flashinfer": flashinfer_backend, "torch": torch_backend}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", attention_cases(quick=False), ids=str)
@pytest.mark.parametrize("head_dim", HEAD_SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", BACKENDS.values(), ids=BACKENDS)
def test_every_case_is_near_exact_attention(
    make: MakeBackend, dtype: str, head_dim: int, case: AttentionCase, device: Device
) -> None:
    inputs = make_inputs(case, dtype, head_dim, device.torch_device, seed=11)
    error, num_stored_wrong = check_case(make, inputs, device)
    assert error <= ERROR_BOUNDS[dtype]
    assert num_stored_wrong == 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", GRAPH_SIZES)
@pytest.mark.parametrize("group", GROUPS)
def test_a_recorded_plan_follows_every_later_step(group: int, size: int, device: Device) -> None:
    error = check_graph(flashinfer_backend, graph_inputs(group, size, device.torch_device), device)
    assert error is not None
    assert error <= ERROR_BOUNDS["bfloat16"]
