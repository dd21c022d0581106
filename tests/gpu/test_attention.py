"""Attention on a device against float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from baton.device.base import Device
from tests.gpu.attention import (
    DTYPES,
    ERROR_BOUNDS,
    GRAPH_SIZES,
    GROUPS,
    HEAD_SIZES,
    MakeBackend,
    attention_cases,
    check_case,
    check_graph,
    graph_inputs,
    make_inputs,
    worst,
)
from tests.gpu.conftest import IS_GPU, IS_QUICK


@pytest.mark.parametrize("head_dim", HEAD_SIZES if IS_GPU else HEAD_SIZES[-1:])
@pytest.mark.parametrize("dtype", DTYPES if IS_GPU else DTYPES[:1])
@pytest.mark.parametrize("backend", ["flashinfer", "torch"], indirect=True)
def test_attention_is_exact_and_stores_its_kv(
    backend: MakeBackend, dtype: str, head_dim: int, device: Device, within: Callable[..., None]
) -> None:
    errors, wrong_stores = {}, []
    for seed, case in enumerate(attention_cases(quick=IS_QUICK)):
        inputs = make_inputs(case, dtype, head_dim, device.torch_device, seed)
        errors[str(case)], num_stored_wrong = check_case(backend, inputs, device)
        if num_stored_wrong:
            wrong_stores.append(str(case))
    bound = ERROR_BOUNDS[dtype]
    bad = [case for case, error in errors.items() if not error <= bound]
    note = f"wrong: {'; '.join(bad)}" if bad else f"{len(errors)} cases, the worst is {worst(errors)}"
    within(errors[worst(errors)], bound, unit="of max", note=note, num_cases=len(errors))
    assert wrong_stores == [], "KV stored in a wrong place"


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("backend", ["flashinfer"], indirect=True)
def test_a_recorded_plan_follows_every_later_step(
    backend: MakeBackend, group: int, device: Device, within: Callable[..., None]
) -> None:
    errors = {}
    for size in GRAPH_SIZES if IS_GPU else GRAPH_SIZES[1:2]:
        error = check_graph(backend, graph_inputs(group, size, device.torch_device), device)
        assert error is not None, "this backend runs decode steps without a recording"
        errors[f"batches of {size}"] = error
    within(errors[worst(errors)], ERROR_BOUNDS["bfloat16"], unit="of max", note=worst(errors), num_cases=len(errors))
