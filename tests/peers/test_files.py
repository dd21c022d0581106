"""Checkpoints that are written for vLLM hold the numbers that they shall."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.checkpoints import make_checkpoint
from tests.engine.models.quantization.answers import assert_same_answer, republished
from tests.engine.models.quantization.test_published import meaning_of, rounded
from tests.peers.files import write_vllm


@pytest.mark.parametrize(("kind", "bits", "scale_dtype"), [("w8a8", 8, torch.float32), ("w4", 4, torch.bfloat16)])
def test_a_checkpoint_for_vllm_answers_as_the_numbers_in_it(
    tmp_path: Path, kind: str, bits: int, scale_dtype: torch.dtype
) -> None:
    """By Baton, which reads the same form and does not round activations."""
    plain = make_checkpoint(
        tmp_path / "plain", "qwen3", changes={"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    )
    (plain / "model.gguf").write_bytes(b"another form of it")
    write_vllm(plain, tmp_path)

    def plainly(name: str, matrix: Tensor) -> dict[str, Tensor]:
        codes, scales, zeros = rounded(matrix.float(), bits, matrix.shape[1] if bits == 8 else 128, is_symmetric=True)
        return {f"{name}.weight": meaning_of(codes, scales.to(scale_dtype).float(), zeros)}

    assert_same_answer(tmp_path / f"vllm-{kind}", republished(plain, tmp_path / "reference", plainly), 3e-4)
    assert not list((tmp_path / f"vllm-{kind}").glob("*.gguf"))


def test_vllm_is_told_to_round_activations_of_8_bit_weights(tmp_path: Path) -> None:
    write_vllm(make_checkpoint(tmp_path / "plain", "qwen3", changes={"hidden_size": 128, "head_dim": 64}), tmp_path)
    config = json.loads((tmp_path / "vllm-w8a8" / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    assert group["input_activations"]["strategy"] == "token"
    assert group["weights"]["num_bits"] == 8
