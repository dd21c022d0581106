"""Weights in MXFP4 stay as they are published, and products by them are those by the numbers they stand for."""

from __future__ import annotations

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from baton.engine.models.mxfp4 import from_mxfp4
from baton.engine.models.ops.native_ops import NativeOps, NativeWeight
from tests.engine.native.compiled import LEVELS, kernels, needs_kernels

NUM_OUT, NUM_IN = 70, 96


def published() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    blocks = torch.randint(0, 256, (NUM_OUT, NUM_IN // 32, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(118, 124, blocks.shape[:-1], generator=generator, dtype=torch.uint8)


def expected(dtype: torch.dtype) -> torch.Tensor:
    blocks, scales = published()
    matrices: torch.Tensor = convert_moe_packed_tensors(blocks[None], scales[None], dtype=dtype)
    return matrices[0].T


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_numbers_are_those_that_transformers_makes_of_them(dtype: torch.dtype) -> None:
    weight = from_mxfp4(*published(), dtype)
    assert torch.equal(weight.plain(dtype), expected(dtype))
    order = torch.randperm(NUM_OUT, generator=torch.Generator().manual_seed(1))
    assert torch.equal(weight.reordered(order).plain(dtype), expected(dtype)[order])


def test_the_smallest_scale_is_exact() -> None:
    blocks, scales = published()
    weight = from_mxfp4(blocks, torch.zeros_like(scales), torch.float32)
    assert torch.equal(weight.scales, torch.full_like(weight.scales, 2.0**-127))


def test_nothing_is_copied_but_the_scales() -> None:
    blocks, scales = published()
    assert from_mxfp4(blocks, scales, torch.bfloat16).codes.data_ptr() == blocks.data_ptr()


@needs_kernels
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("num_rows", [1, 5, 40])
def test_packed_weights_take_17_bytes_for_32_numbers_and_multiply_exactly(level: str, num_rows: int) -> None:
    ops = NativeOps(kernels(level, 1))
    weight = ops.pack(from_mxfp4(*published(), torch.bfloat16))
    assert isinstance(weight, NativeWeight)
    padded = -(-NUM_OUT // 64) * 64
    assert len(weight.packed) <= padded * NUM_IN // 32 * 17
    # numbers of few bits, so that no sum is rounded
    x = torch.randint(-4, 5, (num_rows, NUM_IN), generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    plain = from_mxfp4(*published(), torch.bfloat16).plain(torch.float64)
    assert torch.equal(ops.linear(x, weight, None), (x.double() @ plain.T).to(torch.bfloat16))
