"""Writes GGUF files for tests, from a checkpoint folder, as the format describes them."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from baton.engine.models.weight_files import SINGLE_FILE

_TYPES = {"F32": 0, "F16": 1, "Q4_1": 3, "Q8_0": 8, "BF16": 30}
_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def fact(name: str, value: object) -> bytes:
    return string(name) + _value(value)


def _value(value: object) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + string(value)
    assert isinstance(value, Sequence)
    if isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(string, value))
    return struct.pack("<IIQ", 9, 5, len(value)) + struct.pack(f"<{len(value)}i", *value)


def quantize(matrix: Tensor, kind: str) -> tuple[bytes, Tensor]:
    """The bytes of a tensor, and the numbers that they stand for."""
    if kind in ("F32", "F16", "BF16"):
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
        kept = matrix.to(dtype)
        return kept.contiguous().view(torch.uint8).numpy().tobytes(), kept.float()
    groups = matrix.float().reshape(-1, 32).numpy()
    if kind == "Q8_0":
        scale = (np.abs(groups).max(1, keepdims=True) / 127).astype(np.float16)
        codes = np.round(groups / np.maximum(scale.astype(np.float32), 1e-8)).clip(-127, 127).astype(np.int8)
        data = np.concatenate((scale.view(np.uint8), codes.view(np.uint8)), axis=1)
        meaning = codes * scale.astype(np.float32)
    else:
        low = groups.min(1, keepdims=True).astype(np.float16)
        scale = ((groups.max(1, keepdims=True) - low) / 15).astype(np.float16)
        wide = scale.astype(np.float32)
        codes = np.round((groups - low) / np.maximum(wide, 1e-8)).clip(0, 15).astype(np.uint8)
        pairs = codes[:, :16] | codes[:, 16:] << 4
        data = np.concatenate((scale.view(np.uint8), low.view(np.uint8), pairs), axis=1)
        meaning = codes * wide + low.astype(np.float32)
    return data.tobytes(), torch.from_numpy(meaning.astype(np.float32)).view(matrix.shape)


def write_gguf(folder: Path, target: Path, architecture: str, kinds: Mapping[str, str]) -> dict[str, Tensor]:
    """The checkpoint in `folder` as a GGUF file. `kinds`: the type of matrices by the end of their GGUF name, Q8_0 for
    others. Returns the numbers that it stands for, by the names of the folder."""
    config = json.loads((folder / "config.json").read_text())
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    special = {token["id"] for token in tokenizer["added_tokens"]}
    tokens = [token for token, _ in sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])]
    tokens += [token["content"] for token in tokenizer["added_tokens"] if token["id"] >= len(tokens)]
    merges = tokenizer["model"]["merges"]
    facts = {
        "general.architecture": architecture,
        f"{architecture}.block_count": config["num_hidden_layers"],
        f"{architecture}.context_length": config["max_position_embeddings"],
        f"{architecture}.embedding_length": config["hidden_size"],
        f"{architecture}.feed_forward_length": config["intermediate_size"],
        f"{architecture}.attention.head_count": config["num_attention_heads"],
        f"{architecture}.attention.head_count_kv": config["num_key_value_heads"],
        f"{architecture}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{architecture}.rope.freq_base": float((config.get("rope_parameters") or config)["rope_theta"]),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if number in special else 1 for number in range(len(tokens))],
        "tokenizer.ggml.merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in merges],
    }
    if "head_dim" in config:
        facts[f"{architecture}.attention.key_length"] = config["head_dim"]
    infos, data, meaning = b"", b"", {}
    tensors = load_file(folder / SINGLE_FILE)
    for name, values in tensors.items():
        base, ending = name.rsplit(".", 1)
        parts = base.split(".")
        known = _GGUF_NAMES.get(base) or f"blk.{parts[2]}.{_GGUF_NAMES['.'.join(parts[3:])]}"
        values = values.float()
        kind = "F32" if values.dim() == 1 else next((kinds[end] for end in kinds if known.endswith(end)), "Q8_0")
        if architecture == "llama" and known.endswith(("attn_q", "attn_k")):
            encoded, numbers = quantize(_neighbours(values, config, known), kind)
            numbers = _halves(numbers, config, known)
        else:
            encoded, numbers = quantize(values, kind)
        meaning[name] = numbers
        shape = tuple(values.shape)[::-1]
        infos += string(f"{known}.{ending}") + struct.pack(
            f"<I{len(shape)}QIQ", len(shape), *shape, _TYPES[kind], len(data)
        )
        data += encoded + bytes(-len(encoded) % 32)
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(facts))
    header += b"".join(fact(name, value) for name, value in facts.items()) + infos
    target.write_bytes(header + bytes(-len(header) % 32) + data)
    return meaning


def _num_heads(config: Mapping[str, int], name: str) -> int:
    return config["num_attention_heads" if name.endswith("attn_q") else "num_key_value_heads"]


def _neighbours(values: Tensor, config: Mapping[str, int], name: str) -> Tensor:
    """With the two rows of each rotated pair side by side."""
    count = _num_heads(config, name)
    return values.view(count, 2, len(values) // count // 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)


def _halves(values: Tensor, config: Mapping[str, int], name: str) -> Tensor:
    count = _num_heads(config, name)
    return values.view(count, len(values) // count // 2, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
