"""The fused operations of a decoder on a device against plain torch and float64.

Letters: T tokens, E hidden size, I intermediate size, H heads, D head size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from baton.bench.gpu_check.setup_process import config_of
from baton.device.base import Device
from baton.engine.models.config import parse_config
from baton.engine.models.decoder import TORCH_DTYPES
from baton.engine.models.ops.base import DecoderOps
from baton.engine.models.ops.choose import choose_ops
from baton.engine.models.ops.torch_ops import TorchOps
from baton.engine.models.rope import RotaryEmbedding
from tests.gpu.conftest import IS_GPU, IS_QUICK

ERROR_BOUNDS = {"bfloat16": 2e-2, "float16": 3e-3, "float32": 2e-6}
"""Of an element, over the largest exact one: a few roundings."""
SAME_BOUNDS = {"bfloat16": 8e-3, "float16": 1e-3, "float32": 2e-6}
"""Between two implementations that round at the same places: one unit in the last place of the largest."""
ROWS = (1, 3, 64, 257)
EPS = 1e-6
MODELS = ("tiny",) if not IS_GPU else ("8B",) if IS_QUICK else ("8B", "0.6B", "tiny")

Operation = Callable[[DecoderOps, Sequence[Tensor]], tuple[Tensor, ...]]
"""What an operation returns, and the residual that it may have changed."""


def operands(num_rows: int, dtype: str, device: torch.device, model: str) -> tuple[Tensor, ...]:
    """Residual and delta [T, E], weight [E], x [T, H, D] as a view of wider rows, its weight, gate_up [T, 2 I], cos,
    sin."""
    config, kind = parse_config(config_of(model)), TORCH_DTYPES[dtype]
    chance = torch.Generator(device).manual_seed(num_rows)
    num_heads = config.num_heads + config.num_kv_heads

    def normal(*shape: int, mean: float = 0.0) -> Tensor:
        return (torch.randn(shape, generator=chance, device=device) + mean).to(kind)

    positions = torch.randint(0, 8192, (num_rows,), generator=chance, device=device)
    return (
        normal(num_rows, config.hidden_size),
        normal(num_rows, config.hidden_size),
        normal(config.hidden_size, mean=1.0),
        normal(num_rows, num_heads + config.num_kv_heads, config.head_dim)[:, :num_heads],
        normal(num_heads, config.head_dim, mean=1.0),
        normal(num_rows, 2 * config.intermediate_size),
        *RotaryEmbedding(config, device).tables(positions, kind),
    )


def add_norm(ops: DecoderOps, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
    residual = given[0].clone()
    return ops.add_norm(residual, given[1], given[2], EPS), residual


def norm(ops: DecoderOps, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (ops.add_norm(given[0].clone(), None, given[2], EPS),)


def norm_rotate(ops: DecoderOps, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (ops.norm_rotate(given[3], given[4], EPS, (given[6], given[7])),)


def rotate(ops: DecoderOps, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (ops.norm_rotate(given[3], None, EPS, (given[6], given[7])),)


def gate(ops: DecoderOps, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return (ops.gate(given[5]),)


def difference(found: Sequence[Tensor], wanted: Sequence[Tensor], exact: Sequence[Tensor]) -> Tensor:
    """The largest over the largest exact value; NaN when anything is."""
    pairs = zip(found, wanted, exact, strict=True)
    return torch.stack([(a.double() - b.double()).abs().max() / scale.abs().max() for a, b, scale in pairs]).max()


@torch.inference_mode()
@pytest.mark.parametrize("operation", [add_norm, norm, norm_rotate, rotate, gate])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_fused_operation_rounds_as_torch_does(
    dtype: str, operation: Operation, device: Device, within: Callable[..., None]
) -> None:
    ops, errors, differences = choose_ops(device.torch_device), [], []
    for model, num_rows in itertools.product(MODELS, ROWS):
        given = operands(num_rows, dtype, device.torch_device, model)
        exact = operation(TorchOps(), [tensor.double() for tensor in given])
        found = operation(ops, given)
        errors.append(difference(found, exact, exact))
        differences.append(difference(found, operation(TorchOps(), given), exact))
    assert float(torch.stack(differences).max()) <= SAME_BOUNDS[dtype], "other roundings than plain torch"
    within(float(torch.stack(errors).max()), ERROR_BOUNDS[dtype], unit="of max", num_cases=len(errors))


@pytest.mark.skipif(not IS_GPU, reason="a GPU's operations")
def test_a_gpu_gets_the_fused_operations(device: Device) -> None:
    assert type(choose_ops(device.torch_device)) is not TorchOps
