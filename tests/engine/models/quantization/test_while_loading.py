from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.engine.models.config import load_config
from baton.engine.models.decoder import Decoder
from baton.engine.models.dummy import fill_with_noise
from baton.engine.models.linear_weights import PlainWeight, QuantizedWeight
from baton.engine.models.loading import load_weights
from baton.engine.models.quantization.while_loading import Int4, Int8, quantization_while_loading
from baton.wire.errors import InvalidSetting
from tests.checkpoints import make_checkpoint
from tests.engine.models.quantization.answers import assert_same_answer, dequantized
from tests.engine.native.compiled import LEVELS, kernels

METHODS = [Int8(), Int4()]


def quantized(method: Int8, matrix: Tensor) -> QuantizedWeight:
    weight = method.quantized(PlainWeight(matrix))
    assert isinstance(weight, QuantizedWeight)
    return weight


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("setting", ["int8", "int4"])
def test_answers_are_those_of_the_rounded_weights(tmp_path: Path, setting: str, kernels: str) -> None:
    # inputs that groups of 64 do not divide, and some that they do
    folder = make_checkpoint(tmp_path / "plain", "qwen3", changes={"hidden_size": 96})
    reference = dequantized(folder, tmp_path / "rounded", setting)
    assert_same_answer(folder, reference, 2e-4, quantization=setting, cpu_kernels=kernels)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_each_number_gets_the_code_that_is_nearest(method: Int8) -> None:
    matrix = noise(70, 128)
    matrix[3], matrix[4], matrix[5, :32] = 0.0, 1e-7, 0.25
    weight = quantized(method, matrix)
    steps = weight.scales.repeat_interleave(weight.group_size, 1)
    off = weight.plain(torch.float32) - matrix.float()
    lowest, highest = (-127, 127) if method.name == "int8" else (-8, 7)
    codes = weight.codes if method.name == "int8" else torch.stack((weight.codes & 15, weight.codes >> 4), 2).flatten(1)
    codes = codes.to(torch.int8) - (0 if method.name == "int8" else 8)
    # what lies beyond the outermost codes has these, and is not far from them
    is_within = (off.abs() <= steps * 0.501) | ((codes == lowest) & (off > 0)) | ((codes == highest) & (off < 0))
    assert is_within.all()
    assert (off.abs() <= steps * 2 + 1e-7).all()
    assert method.held_bytes(70, 128) <= 70 * 128 * (1.05 if method.name == "int8" else 0.63)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("method", [Int8, Int4])
@pytest.mark.parametrize("level", LEVELS)
def test_kernels_give_the_numbers_that_torch_gives(level: str, method: type[Int8], dtype: torch.dtype) -> None:
    # groups of 32, of 64, and of an odd number of inputs; more of them than a tile has, and a part of one
    for shape in ((70, 128), (1, 32), (33, 2048), (9, 77)):
        matrix = (noise(*shape) * torch.exp2(noise(shape[0], 1, seed=1) * 2)).to(dtype)
        matrix[0, 1:], matrix[-1, 5] = matrix[0, 0], matrix[-1, 5] * 30
        if len(matrix) > 8:
            matrix[3], matrix[4], matrix[5, :32], matrix[6] = 0.0, 1e-7, 0.25, matrix[6].abs()
        found, expected = quantized(method(kernels(level)), matrix), quantized(method(), matrix)
        assert (found.group_size, found.codes.dtype) == (expected.group_size, expected.codes.dtype)
        assert torch.equal(found.scales, expected.scales)
        assert torch.equal(found.codes, expected.codes)
        assert (found.offsets is None) == (expected.offsets is None)
        if found.offsets is not None and expected.offsets is not None:
            assert torch.equal(found.offsets, expected.offsets)


def test_numbers_of_4_bits_are_found_again() -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (8, 4, 32), generator=generator).float()
    codes[:, :, 0], codes[:, :, 1] = 0.0, 15.0
    scale, low = torch.rand((2, 8, 4, 1), generator=generator).half().float()
    matrix = (codes * scale - 8 * low).half().float().view(8, 128)
    found = quantized(Int4(), matrix).plain(torch.float32)
    torch.testing.assert_close(found, matrix, rtol=0, atol=8e-3)


def test_ranges_are_chosen_that_leave_a_smaller_error() -> None:
    matrix = noise(64, 512).float()
    grouped = matrix.view(-1, 32)
    low, high = grouped.aminmax(dim=1, keepdim=True)
    step = (high - low) / 15
    plainly = (((grouped - low) / step).round() * step + low - grouped).square().sum()
    assert (quantized(Int4(), matrix).plain(torch.float32) - matrix).square().sum() < 0.93 * plainly


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_rank_has_the_numbers_that_one_node_has(method: Int8) -> None:
    matrix = noise(40, 256)
    whole = quantized(method, matrix).plain(torch.float32)
    halves = [quantized(method, half.contiguous()).plain(torch.float32) for half in matrix.chunk(2, dim=1)]
    assert torch.equal(torch.cat(halves, dim=1), whole)
    assert torch.equal(quantized(method, matrix[16:]).plain(torch.float32), whole[16:])


def test_a_plain_weight_is_freed_before_the_next_part_is_packed(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    for fill in (lambda decoder: load_weights(folder, decoder), fill_with_noise):
        decoder = Decoder(load_config(folder), torch.float32, "cpu", quantization=Int8())
        fill(decoder)
        kinds = {parameter.name.split(".")[-1] for parameter in decoder.parameters()}
        assert kinds == {"input_norm", "mlp_norm", "norm"}


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="quantization 'int3' is not known; allowed: auto, int8, int4"):
        quantization_while_loading("int3")
