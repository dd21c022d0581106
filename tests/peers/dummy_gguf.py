"""`python -m tests.peers.dummy_gguf CONFIG.json OUT.gguf`: a mixture of experts of random weights, for llama.cpp.

The shapes are those of a published config (`gpt_oss` with experts in MXFP4 and the rest in Q8_0, `qwen3_moe` in Q4_0
with a head in Q6_K, as published files have them). All layers have the same random codes, and routers of their own, so
tokens go to different experts. For times only. Needs llama.cpp's `gguf` package, and a few GiB of memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

_CHANCE = np.random.default_rng(0)
_SCALES: Mapping[Type, tuple[int, bytes]] = {
    Type.Q4_0: (0, np.float16(0.005).tobytes()),
    Type.Q8_0: (0, np.float16(0.0002).tobytes()),
    Type.MXFP4: (0, bytes([121])),
    Type.Q6_K: (192, bytes([32] * 16) + np.float16(1e-5).tobytes()),
}
"""Where the scales of a block lie, and scales of which products are neither tiny nor huge."""


def packed(kind: Type, *shape: int) -> Any:
    """Random codes of a matrix, or of one for each expert, as bytes."""
    block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    codes = _CHANCE.integers(0, 256, (*shape[:-1], shape[-1] // block, num_bytes), np.uint8)
    first, scale = _SCALES[kind]
    codes[..., first : first + len(scale)] = np.frombuffer(scale, np.uint8)
    return codes.reshape(*shape[:-1], -1)


def plain(*shape: int) -> Any:
    return (0.02 * _CHANCE.standard_normal(shape)).astype(np.float32)


class Model:
    """The tensors of a config, by name, with their types (None: plain)."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._hidden, self._experts = config["hidden_size"], config.get("num_experts") or config["num_local_experts"]
        self._is_gpt = config["model_type"] == "gpt_oss"
        self._inner = config["intermediate_size"] if self._is_gpt else config["moe_intermediate_size"]
        self._dense, self._expert = (Type.Q8_0, Type.MXFP4) if self._is_gpt else (Type.Q4_0, Type.Q4_0)

    def tensors(self) -> Iterator[tuple[str, Any, Type | None]]:
        vocabulary = self._config["vocab_size"]
        yield "token_embd.weight", packed(self._dense, vocabulary, self._hidden), self._dense
        head = Type.Q8_0 if self._is_gpt else Type.Q6_K
        yield "output.weight", packed(head, vocabulary, self._hidden), head
        yield "output_norm.weight", np.ones(self._hidden, np.float32), None
        layer = [*self._layer()]
        for number in range(self._config["num_hidden_layers"]):
            yield f"blk.{number}.ffn_gate_inp.weight", plain(self._experts, self._hidden), None
            yield from ((f"blk.{number}.{name}", values, kind) for name, values, kind in layer)

    def _layer(self) -> Iterator[tuple[str, Any, Type | None]]:
        config, dim = self._config, self._config["head_dim"]
        queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
        shapes = {"q": (queries, self._hidden), "k": (keys, self._hidden), "v": (keys, self._hidden)}
        for name, shape in {**shapes, "output": (self._hidden, queries)}.items():
            yield f"attn_{name}.weight", packed(self._dense, *shape), self._dense
            if self._is_gpt:
                yield f"attn_{name}.bias", plain(shape[0]), None
        for name, rows, columns in (
            ("gate", self._inner, self._hidden),
            ("up", self._inner, self._hidden),
            ("down", self._hidden, self._inner),
        ):
            yield f"ffn_{name}_exps.weight", packed(self._expert, self._experts, rows, columns), self._expert
            if self._is_gpt:
                yield f"ffn_{name}_exps.bias", plain(self._experts, rows), None
        yield "attn_norm.weight", np.ones(self._hidden, np.float32), None
        if self._is_gpt:
            yield "post_attention_norm.weight", np.ones(self._hidden, np.float32), None
            yield "attn_sinks.weight", plain(config["num_attention_heads"]), None
            yield "ffn_gate_inp.bias", plain(self._experts), None
        else:
            yield "ffn_norm.weight", np.ones(self._hidden, np.float32), None
            yield from ((f"attn_{name}_norm.weight", np.ones(dim, np.float32), None) for name in "qk")


def describe(config: Mapping[str, Any], writer: Any) -> None:
    """What llama.cpp has to know about a model."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_expert_count(config.get("num_experts") or config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config.get("moe_intermediate_size") or config["intermediate_size"])
    if config["sliding_window"]:
        writer.add_sliding_window(config["sliding_window"])
    if scaling := config["rope_scaling"]:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    writer.add_tokenizer_model("no_vocab")


def main() -> None:
    source, out = map(Path, sys.argv[1:3])
    config = json.loads(source.read_text())
    writer = gguf.GGUFWriter(out, {"gpt_oss": "gpt-oss", "qwen3_moe": "qwen3moe"}[config["model_type"]])
    describe(config, writer)
    for name, values, kind in Model(config).tensors():
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
