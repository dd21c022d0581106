"""`--activation-dtype int8`: what products with quantized weights multiply is rounded to 8 bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.engine.models.linear_weights import PlainWeight, QuantizedWeight, StackedWeight
from baton.engine.models.ops.native_ops import NativeOps
from baton.engine.models.quantization.while_loading import Int4, Int8
from baton.engine.native.arguments import BatonRoundedLinear
from baton.wire.errors import InvalidSetting
from tests.checkpoints import make_checkpoint
from tests.engine.models.quantization.answers import answer
from tests.engine.native.compiled import LEVELS, kernels, needs_kernels

pytestmark = needs_kernels
ROUNDED = {"activation_dtype": "int8"}


def rounded(x: Tensor) -> Tensor:
    """Each 32 numbers of a row as multiples of 1/127 of the largest."""
    numbers = x.float().reshape(len(x), -1, 32)
    scales = numbers.abs().amax(-1, keepdim=True) / 127
    return ((numbers / scales).round() * scales).view(x.shape)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@pytest.mark.parametrize("level", LEVELS)
def test_products_are_those_of_rounded_rows(level: str) -> None:
    ops = NativeOps(kernels(level), rounds_activations=True)
    order = torch.randperm(128, generator=torch.Generator().manual_seed(1))
    loaded = [method.quantized(PlainWeight(noise(40, 128, seed=seed))) for seed, method in enumerate((Int8(), Int4()))]
    first, second = (weight for weight in loaded if isinstance(weight, QuantizedWeight))
    pieces = (first, second, replace(second, input_order=order))
    x = noise(7, 160)[:, 16:144]
    found = ops.linear(x, StackedWeight(tuple(map(ops.pack, pieces))), None)
    wanted = [rounded(x) @ piece.plain(torch.float32).T for piece in pieces[:2]]
    wanted.append(rounded(x[:, order]) @ second.plain(torch.float32).T)
    torch.testing.assert_close(found.float(), torch.cat(wanted, dim=1), rtol=0.01, atol=0.02)
    assert ops.has_rounded


@pytest.mark.parametrize("level", LEVELS)
def test_other_weights_multiply_what_is_there(level: str) -> None:
    ops = NativeOps(kernels(level), rounds_activations=True)
    codes = noise(8, 96).to(torch.float8_e4m3fn)
    floats = QuantizedWeight(codes, torch.ones(8, 1), None, 96, torch.bfloat16)
    odd = QuantizedWeight(codes.view(torch.int8), torch.ones(8, 4), None, 24, torch.bfloat16)
    for weight in (PlainWeight(noise(8, 96)), floats, odd):
        packed = ops.pack(weight)
        assert not isinstance(getattr(packed, "product", None), BatonRoundedLinear)
        plain = weight.matrix if isinstance(weight, PlainWeight) else weight.plain(torch.bfloat16)
        x = noise(3, 96, seed=1)
        torch.testing.assert_close(ops.linear(x, packed, None), x @ plain.T, rtol=0.02, atol=1.0)
    assert not ops.has_rounded


@pytest.mark.parametrize("setting", ["int8", "int4"])
def test_answers_are_near_and_do_not_depend_on_steps(tmp_path: Path, setting: str) -> None:
    folder = make_checkpoint(tmp_path, "qwen3")
    shared: Mapping[str, object] = {"dtype": "bfloat16", "quantization": setting}
    _, near = answer(folder, **shared)
    tokens, found = answer(folder, **shared, **ROUNDED)
    torch.testing.assert_close(found, near, rtol=0, atol=0.3)
    assert not torch.equal(found, near)
    for changes in ({"max_num_batched_tokens": 5}, {"enforce_eager": True}, {"num_threads": 2}):
        other_tokens, other = answer(folder, **shared, **ROUNDED, **changes)
        assert tokens == other_tokens
        assert torch.equal(found, other)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "no weight here has 8 or 4 bits"),
        ({"quantization": "int8", "cpu_kernels": "torch"}, "needs Baton's CPU kernels"),
    ],
)
def test_what_rounds_nothing_is_refused(tmp_path: Path, settings: dict[str, object], message: str) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    with pytest.raises(InvalidSetting, match=message):
        answer(folder, **settings, **ROUNDED)
