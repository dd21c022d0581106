"""Small random checkpoints in the published format, and folders for engines with random weights.

Owns the files. Written without torch: float32 weights through numpy, a tokenizer with one word for each id, so that a
vocabulary of any size can be served by its ids.

The weights are scaled so that greedy output varies and the best token leads clearly: a comparison of token ids between
two computations of the same model does not hang on rounding.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

VOCAB_SIZE = 512
MAX_POSITION = 2048
_SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCAB_SIZE,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": MAX_POSITION,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "attention_bias": False,
    "bos_token_id": None,
    "eos_token_id": VOCAB_SIZE - 1,
    "dtype": "float32",
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "use_sliding_window": False},
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
}


def write_checkpoint(folder: Path, family: str, seed: int = 0) -> Path:
    """A checkpoint of `family` ("qwen3", "llama") in float32; returns `folder`."""
    config = {**_SIZES, **FAMILIES[family]}
    write_config(folder, config)
    save_file(_weights(config, seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    """What a server needs of a model beside its weights: `config.json` and a tokenizer; returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    words = {f"w{index}": index for index in range(config["vocab_size"])}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def _weights(config: dict[str, Any], seed: int) -> dict[str, npt.NDArray[np.float32]]:
    """Tensors by their published names."""
    chance = np.random.default_rng(seed)
    size, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q, kv = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))

    def normal(*shape: int, deviation: float, mean: float = 0.0) -> npt.NDArray[np.float32]:
        return chance.normal(mean, deviation, shape).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": normal(vocab, size, deviation=0.3),
        "model.norm.weight": normal(size, deviation=0.2, mean=1.0),
        "lm_head.weight": normal(vocab, size, deviation=0.3),
    }
    matrices = {
        "self_attn.q_proj": (q, size),
        "self_attn.k_proj": (kv, size),
        "self_attn.v_proj": (kv, size),
        "self_attn.o_proj": (size, q),
        "mlp.gate_proj": (inner, size),
        "mlp.up_proj": (inner, size),
        "mlp.down_proj": (size, inner),
    }
    norms = {"input_layernorm": size, "post_attention_layernorm": size}
    if config["model_type"] == "qwen3":
        norms |= {"self_attn.q_norm": config["head_dim"], "self_attn.k_norm": config["head_dim"]}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, (num_out, num_in) in matrices.items():
            tensors[f"{prefix}{name}.weight"] = normal(num_out, num_in, deviation=1.5 / math.sqrt(num_in))
        for name, length in norms.items():
            tensors[f"{prefix}{name}.weight"] = normal(length, deviation=0.2, mean=1.0)
    return tensors
