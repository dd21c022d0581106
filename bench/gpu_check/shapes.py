"""The models that are measured: published sizes with random weights, and tiny ones for checks of tokens.

Owns their `config.json`. Writes no weights.
"""

from __future__ import annotations

from typing import Any

from bench.limits.model_shapes import ModelShapes, shapes_of
from engine.models.config import parse_config

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "use_sliding_window": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "max_position_embeddings": 40960,
    "bos_token_id": None,
    "dtype": "bfloat16",
}
_PUBLISHED: dict[str, dict[str, Any]] = {
    # Qwen3-8B
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
    # Qwen3-0.6B
    "0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    # stands for both where there is no GPU
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 512,
        "tie_word_embeddings": False,
    },
}


def config_of(name: str) -> dict[str, Any]:
    """The `config.json` of "8B", "0.6B" or "tiny". Raises `KeyError`."""
    sizes = _PUBLISHED[name]
    return {**_QWEN3, **sizes, "eos_token_id": sizes["vocab_size"] - 1}


def model_shapes(name: str) -> ModelShapes:
    """The sizes of one of these models in bfloat16."""
    return shapes_of(parse_config(config_of(name)), element_bytes=2)


def block_bytes(name: str, block_size: int) -> int:
    """Bytes of one KV block over all layers in bfloat16."""
    return model_shapes(name).kv_bytes_per_token * block_size
