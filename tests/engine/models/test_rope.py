from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from baton.engine.models.config import ModelConfig, parse_config
from baton.engine.models.rope import RotaryEmbedding, inverse_frequencies, make_rotary_embedding, rotate

MAX_POSITION = 2048
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "attention_factor": 0.7,
        "original_max_position_embeddings": 512,
    },
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 16.0,
        "mscale": 0.707,
        "mscale_all_dim": 1.2,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
        "original_max_position_embeddings": 128,
    },
}


def both_configs(rope: dict[str, Any]) -> tuple[ModelConfig, LlamaConfig]:
    parameters = {"rope_theta": 50000.0, **rope}
    reference = LlamaConfig(
        vocab_size=320,
        hidden_size=256,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITION,
        rope_parameters=parameters,
    )
    content = {**reference.to_dict(), "architectures": ["LlamaForCausalLM"]}
    return parse_config(content), reference


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "default"])
def test_frequencies_match_transformers(variant: str) -> None:
    config, reference = both_configs(VARIANTS[variant])
    expected, expected_factor = ROPE_INIT_FUNCTIONS[VARIANTS[variant]["rope_type"]](reference)
    frequencies, factor = inverse_frequencies(config.rope, config.head_dim)
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert factor == pytest.approx(expected_factor, rel=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_matches_transformers(variant: str, dtype: torch.dtype) -> None:
    config, reference = both_configs(VARIANTS[variant])
    positions = torch.tensor([0, 1, 2, 77, 511, 512, 1500, MAX_POSITION - 1])
    x = torch.randn(len(positions), 3, config.head_dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    cos, sin = LlamaRotaryEmbedding(reference)(x, positions.unsqueeze(0))
    expected, _ = apply_rotary_pos_emb(x, x, cos[0], sin[0])
    rotated = rotate(x, *RotaryEmbedding(config, torch.device("cpu")).tables(positions, dtype))
    assert rotated.dtype == dtype
    # A rounding of the angle in float32 grows with the position.
    torch.testing.assert_close(rotated, expected, rtol=1e-5, atol=2e-4 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("variant", ["default", "yarn"])
def test_both_halves_of_a_rotation_have_the_same_angles(variant: str) -> None:
    config, _ = both_configs(VARIANTS[variant])
    positions = torch.tensor([0, 1, 511, 131071])
    for table, sign in zip(
        RotaryEmbedding(config, torch.device("cpu")).tables(positions, torch.float32), (1, -1), strict=True
    ):
        assert table.shape == (4, 1, config.head_dim)
        assert table.is_contiguous()
        first, second = table.chunk(2, dim=-1)
        assert torch.equal(first, sign * second)


def test_rotation_leaves_its_input_alone() -> None:
    config, _ = both_configs(VARIANTS["default"])
    x = torch.randn(2, 3, config.head_dim)
    before = x.clone()
    rotate(x, *RotaryEmbedding(config, torch.device("cpu")).tables(torch.tensor([4, 5]), torch.float32))
    assert torch.equal(x, before)


def test_dynamic_scaling_rotates_each_position_as_when_it_is_generated() -> None:
    config, reference = both_configs(VARIANTS["dynamic"])
    assert config.max_context_len == 4 * MAX_POSITION
    theirs = LlamaRotaryEmbedding(reference)
    positions = torch.tensor([3, MAX_POSITION - 1, MAX_POSITION, MAX_POSITION + 77, 4 * MAX_POSITION - 1])
    cos, signed_sin = make_rotary_embedding(config, torch.device("cpu")).tables(positions, torch.float32)
    for row, position in enumerate(positions):
        expected_cos, expected_sin = theirs(torch.zeros(1), position[None, None])
        torch.testing.assert_close(cos[row], expected_cos[0], rtol=0, atol=3e-3)
        torch.testing.assert_close(signed_sin[row].abs(), expected_sin[0].abs(), rtol=0, atol=3e-3)
