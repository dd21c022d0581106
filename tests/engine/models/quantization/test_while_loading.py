from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.models.config import load_config
from engine.models.decoder import Decoder
from engine.models.dummy import fill_with_noise
from engine.models.linear_weights import PlainWeight, QuantizedWeight
from engine.models.loading import load_weights
from engine.models.quantization.while_loading import Int4, Int8, quantization_while_loading
from engine.models.weight_files import SINGLE_FILE
from tests.checkpoints import make_checkpoint, write_weights
from tests.engine.models.quantization.answers import assert_same_answer, republished
from wire.errors import InvalidSetting


def rounded(matrix: Tensor, setting: str) -> Tensor:
    """To whole multiples of a scale: of the largest number of an output, or of 32 inputs."""
    num_in = matrix.shape[1]
    if setting == "int4" and num_in % 32 == 0:
        grouped = matrix.double().reshape(len(matrix), -1, 32)
        low, high = grouped.amin(2, keepdim=True), grouped.amax(2, keepdim=True)
        scale = (torch.where(-low >= high, low, high).float() / -8).half().double()
        return (torch.round(grouped / scale).clamp(-8, 7) * scale).reshape(matrix.shape).float()
    scale = matrix.float().abs().amax(1, keepdim=True) / 127
    return (torch.round(matrix.double() / scale.double()).clamp(-127, 127) * scale.double()).float()


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("setting", ["int8", "int4"])
def test_answers_are_those_of_the_rounded_weights(tmp_path: Path, setting: str, kernels: str) -> None:
    def expected(matrix: Tensor) -> Tensor:
        return rounded(matrix, setting)

    folder = make_checkpoint(tmp_path / "plain", "qwen3", changes={"hidden_size": 96})
    reference = republished(folder, tmp_path / "rounded", lambda name, matrix: {f"{name}.weight": expected(matrix)})
    tensors = load_file(reference / SINGLE_FILE)
    write_weights(reference, {**tensors, "lm_head.weight": expected(tensors["lm_head.weight"])})
    assert_same_answer(folder, reference, 2e-4, quantization=setting, cpu_kernels=kernels)


@pytest.mark.parametrize("method", [Int8(), Int4()])
def test_numbers_are_off_by_half_a_step_at_most(method: Int8) -> None:
    matrix = torch.randn((70, 128), generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    matrix[3] = 0.0
    weight = method.quantized(PlainWeight(matrix))
    assert isinstance(weight, QuantizedWeight)
    steps = weight.scales.repeat_interleave(weight.group_size, 1)
    # numbers opposite to the furthest may lie beyond the last code
    bound = 0.51 if method.name == "int8" else 1.02
    assert ((weight.plain(torch.float32) - matrix.float()).abs() <= steps.abs() * bound).all()
    assert method.held_bytes(70, 128) <= 70 * 128 * (1.05 if method.name == "int8" else 0.57)


def test_a_plain_weight_is_freed_before_the_next_part_is_packed(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    for fill in (lambda decoder: load_weights(folder, decoder), fill_with_noise):
        decoder = Decoder(load_config(folder), torch.float32, "cpu", quantization=Int8())
        fill(decoder)
        kinds = {parameter.name.split(".")[-1] for parameter in decoder.parameters()}
        assert kinds == {"embedding", "input_norm", "mlp_norm", "norm"}


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="quantization 'int3' is not known; allowed: auto, int8, int4"):
        quantization_while_loading("int3")
