"""The models that are measured, and what the machine's own rates allow them.

Owns published sizes, and the arithmetic between counted bytes or operations (`bench.limits.model_shapes`) and measured
rates. No tensors, no clock. Times are milliseconds, rates GB/s and TFLOP/s, where G is 1e9 and T is 1e12.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.limits.model_shapes import ModelShapes, Product, shapes_of
from engine.models.config import parse_config

BLOCK_SIZE = 16
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
_NAMES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
)
_SIZES = {
    "8B": (4096, 12288, 36, 32, 8, 128, 151936, False),
    "0.6B": (1024, 3072, 28, 16, 8, 128, 151936, True),
    "tiny": (128, 256, 2, 4, 2, 64, 512, False),
}
"""Qwen3-8B, Qwen3-0.6B, and what stands for both where there is no GPU."""


def config_of(name: str) -> dict[str, Any]:
    """The `config.json` of "8B", "0.6B" or "tiny". Raises `KeyError`."""
    sizes = dict(zip(_NAMES, _SIZES[name], strict=True))
    return {**_QWEN3, **sizes, "eos_token_id": sizes["vocab_size"] - 1}


def write_model(folder: Path, name: str) -> Path:
    """What a server needs of a model beside its weights: `config.json`, and a tokenizer with one word for each id."""
    config = config_of(name)
    words = {f"w{index}": index for index in range(config["vocab_size"])}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "w0"}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def model_shapes(name: str) -> ModelShapes:
    """The sizes of one of these models in bfloat16."""
    return shapes_of(parse_config(config_of(name)), element_bytes=2)


def block_bytes(name: str) -> int:
    """Bytes of one KV block over all layers in bfloat16."""
    return model_shapes(name).kv_bytes_per_token * BLOCK_SIZE


def decode_floor_ms(shapes: ModelShapes, context_lens: Sequence[int], rate_gb_per_s: float) -> float:
    """Every weight and every visible key and value once, over the bandwidth."""
    return shapes.decode_bytes(list(context_lens)) / rate_gb_per_s / 1e6


def prefill_floor_ms(shapes: ModelShapes, num_tokens: int, tflop_per_s: float) -> float:
    """Operations of a prompt over the rate of the model's own products."""
    return shapes.prefill_flop(num_tokens) / tflop_per_s / 1e9


def weighted_tflop_per_s(products: Sequence[Product], taken_ms: Sequence[float]) -> float:
    """The rate over all products of a model, where one of each was timed. Raises `ValueError` for a missing time."""
    total_ms = sum(product.count * ms for product, ms in zip(products, taken_ms, strict=True))
    return sum(product.flop for product in products) / total_ms / 1e9


def gb_per_s(num_bytes: int, taken_ms: float) -> float:
    """A rate of bytes."""
    return num_bytes / taken_ms / 1e6


def busy_us(intervals: Iterable[tuple[float, float]]) -> float:
    """How long a device was busy: the union of (begin, end) in microseconds, whatever overlaps."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        if end > until:
            total += end - max(begin, until)
            until = end
    return total
