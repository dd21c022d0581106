"""Tiny checkpoints in the format that models are published in, for every supported family.

Each has random weights, a trained byte-level tokenizer and a ChatML template, so that the same folder serves a
comparison with transformers and a whole relay with chat requests. Written without transformers, which takes seconds to
import.

The weights are scaled so that greedy output varies and the best token leads clearly: comparisons of token ids between
two computations of the same model do not hang on rounding. The special tokens have small logits, so that generation
does not end by chance; a test that wants an end sets another `eos_token_id`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""The last ids of the vocabulary, in this order. A generation ends with the first or the last."""

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

_CORPUS = (
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "Once upon a time there was a small engine that computed the first token of every story.",
    "She asked the river where it was going; the river said that it was going to the sea.",
    "def add(first, second): return first + second",
    "Ein Bote bringt den Brief, und der Brief bringt die Antwort.",
    "The answer to the question is in the question, said the teacher to the other teacher.",
    "1 + 1 = 2, 2 + 2 = 4, 4 + 4 = 8, and there is no end to this.",
    "Stations, relations and foundations: the motion of the nation is a notion.",
)

_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32},
}


def make_checkpoint(
    folder: Path,
    family: str,
    *,
    seed: int = 0,
    vocab_size: int = 320,
    tie: bool = False,
    rope: Mapping[str, object] | None = None,
    shard_bytes: int | None = None,
    max_position: int = 512,
    dtype: str = "float32",
    changes: Mapping[str, object] | None = None,
) -> Path:
    """Write a checkpoint of `family` (llama, mistral, qwen2, qwen3) into `folder` and return it.

    `rope`: the content of `rope_parameters`. `shard_bytes`: split the weights into files of about that size.
    `changes`: further fields of `config.json`; those that shape tensors (`num_hidden_layers`, `attention_bias`, ...)
    shape them here.
    """
    folder.mkdir(parents=True, exist_ok=True)
    end_ids = write_tokenizer(folder, vocab_size, max_position)
    config = {
        **_FAMILIES[family],
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": max_position,
        "tie_word_embeddings": tie,
        "rope_parameters": dict(rope) if rope is not None else {"rope_type": "default", "rope_theta": 10000.0},
        "dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": end_ids[-1],
        **(changes or {}),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end_ids}))
    write_weights(folder, random_weights(config, seed), shard_bytes)
    return folder


def random_weights(config: Mapping[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint with this `config.json`, by their published names."""
    generator = torch.Generator().manual_seed(seed)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[config["dtype"]]

    def normal(*shape: int, std: float, mean: float = 0.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * std + mean).to(dtype)

    def matrix(num_out: int, num_in: int) -> torch.Tensor:
        return normal(num_out, num_in, std=1.5 / math.sqrt(num_in))

    size, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim", size // heads)
    q, kv = heads * head_dim, config["num_key_value_heads"] * head_dim
    is_qwen2, is_qwen3 = config["model_type"] == "qwen2", config["model_type"] == "qwen3"
    attention_bias, mlp_bias = config.get("attention_bias", False), config.get("mlp_bias", False)
    tensors = {"model.embed_tokens.weight": _vocabulary(normal(config["vocab_size"], size, std=0.3))}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        matrices = {
            "self_attn.q_proj": (q, size, attention_bias or is_qwen2),
            "self_attn.k_proj": (kv, size, attention_bias or is_qwen2),
            "self_attn.v_proj": (kv, size, attention_bias or is_qwen2),
            "self_attn.o_proj": (size, q, attention_bias),
            "mlp.gate_proj": (inner, size, mlp_bias),
            "mlp.up_proj": (inner, size, mlp_bias),
            "mlp.down_proj": (size, inner, mlp_bias),
        }
        for name, (num_out, num_in, has_bias) in matrices.items():
            tensors[f"{prefix}{name}.weight"] = matrix(num_out, num_in)
            if has_bias:
                tensors[f"{prefix}{name}.bias"] = normal(num_out, std=0.5)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = normal(size, std=0.2, mean=1.0)
        if is_qwen3:
            for name in ("q_norm", "k_norm"):
                tensors[f"{prefix}self_attn.{name}.weight"] = normal(head_dim, std=0.2, mean=1.0)
    tensors["model.norm.weight"] = normal(size, std=0.2, mean=1.0)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = _vocabulary(normal(config["vocab_size"], size, std=0.3))
    return tensors


def write_weights(folder: Path, tensors: Mapping[str, torch.Tensor], shard_bytes: int | None = None) -> None:
    """Write tensors as `model.safetensors`, or as shards of about `shard_bytes` with an index."""
    if shard_bytes is None:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return
    shards: list[dict[str, torch.Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if filled and filled + tensor.nbytes > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file_name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file_name))
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _vocabulary(rows: torch.Tensor) -> torch.Tensor:
    rows[-len(SPECIAL_TOKENS) :] *= 0.1
    return rows


def write_tokenizer(folder: Path, vocab_size: int, max_position: int) -> list[int]:
    """Train and write the tokenizer; returns the ids that end a generation."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the corpus gives {tokenizer.get_vocab_size()} tokens, vocab_size asks for {vocab_size}")
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": {
            str(token_id): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for token, token_id in ids.items()
        },
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_position,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    return [vocab_size - 3, vocab_size - 1]
