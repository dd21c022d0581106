from __future__ import annotations

from functools import partial

import pytest
import torch

from baton.engine.models.linear_weights import PackedWeight, PlainWeight
from baton.engine.models.ops.base import DecoderOps
from baton.engine.models.ops.choose import choose_ops
from baton.engine.models.ops.cpu_ops import CpuOps
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("ops", [TorchOps(), CpuOps(pack_min_elements=0), CpuOps()], ids=["torch", "packed", "small"])
def test_linear_is_its_formula(ops: DecoderOps, dtype: torch.dtype, has_bias: bool) -> None:
    matrix, bias = random(96, 64, dtype=dtype), random(1, 96, dtype=dtype, seed=1)[0] if has_bias else None
    weight = ops.pack(PlainWeight(matrix))
    for num_rows in (1, 7, 40):
        x = random(num_rows, 64, dtype=dtype, seed=num_rows)
        expected = x.double() @ matrix.double().T + (0.0 if bias is None else bias.double())
        found = ops.linear(x, weight, bias)
        assert (found.dtype, found.is_contiguous()) == (dtype, True)
        torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=1e-4 if dtype == torch.float32 else 6e-2)


def test_a_cpu_packs_large_weights_where_it_can() -> None:
    assert isinstance(CpuOps().pack(PlainWeight(torch.zeros(512, 512))), PackedWeight)
    small, half = PlainWeight(torch.zeros(16, 16)), PlainWeight(torch.zeros(512, 512, dtype=torch.float16))
    assert (CpuOps().pack(small), CpuOps().pack(half)) == (small, half)


def test_a_format_that_operations_do_not_know_is_refused() -> None:
    with pytest.raises(TypeError, match="TorchOps does not multiply by a PackedWeight"):
        TorchOps().linear(torch.zeros(1, 4), PackedWeight(torch.zeros(4, 4)), None)
    with pytest.raises(TypeError, match="TorchOps looks nothing up in a PackedWeight"):
        TorchOps().embed(torch.zeros(1, dtype=torch.int64), PackedWeight(torch.zeros(4, 4)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_embed_gives_rows_that_may_be_changed(dtype: torch.dtype) -> None:
    table = random(9, 8, dtype=dtype)
    before, rows = table.clone(), TorchOps().embed(torch.tensor([3, 3, 0]), PlainWeight(table))
    assert torch.equal(rows, torch.stack([table[3], table[3], table[0]]))
    rows.zero_()
    assert torch.equal(table, before)


def test_ops_are_chosen_by_device(caplog: pytest.LogCaptureFixture) -> None:
    triton_ops = TorchOps()
    assert choose_ops(torch.device("cuda", 1), load=lambda _: triton_ops) is triton_ops
    assert isinstance(choose_ops(torch.device("cpu"), load=lambda _: pytest.fail("loaded")), CpuOps)
    assert not caplog.records


@pytest.mark.parametrize("error", [ModuleNotFoundError("No module named 'triton'"), RuntimeError("no C compiler")])
def test_a_gpu_without_triton_gets_torch_and_one_line(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(choose_ops(torch.device("cuda"), load=partial(failing, error)), TorchOps)
    assert len(caplog.records) == 1
    assert str(error) in caplog.text


def test_a_device_that_fails_is_no_reason_for_slower_operations() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        choose_ops(torch.device("cuda"), load=partial(failing, torch.OutOfMemoryError("full")))


def failing(error: Exception, _: torch.device) -> TorchOps:
    raise error
