"""Tiny models of every family: transformers makes, initializes and publishes them, and computes what ours must equal.

Each is a change of `COMMON`, in the words of the family's own `config.json`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

VOCAB_SIZE = 160
Family: TypeAlias = tuple[str, Mapping[str, Any]]
"""The model type in transformers, and the fields that are particular."""
COMMON: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_EXPERTS: Mapping[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_LONGROPE: Mapping[str, Any] = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2.0],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 8.0],
    "original_max_position_embeddings": 16,
    "partial_rotary_factor": 0.75,
}
_GEMMA: Mapping[str, Any] = {"head_dim": 16, "sliding_window": 12, "query_pre_attn_scalar": 24}
_GROUPS: Mapping[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}
_LATENTS: Mapping[str, Any] = {
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
_YARN: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.8,
    "mscale_all_dim": 0.6,
}
_GPT2: Mapping[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "intermediate_size": None}

_LFM2: Mapping[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "conv_bias": True,
    "block_multiple_of": 32,
}
_QWEN3_NEXT: Mapping[str, Any] = {
    **_EXPERTS,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "mlp_only_layers": [3],
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 80,
}
_LLAMA3: Mapping[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

FAMILIES: Mapping[str, Family] = {
    "llama": ("llama", {"rope_parameters": _LLAMA3, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": 12}),
    "qwen2": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "qwen3": ("qwen3", {"head_dim": 32, "attention_bias": True}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "sliding_window": 12}),
    "qwen2-moe": ("qwen2_moe", {**_EXPERTS, "shared_expert_intermediate_size": 80, "decoder_sparse_step": 2}),
    "qwen3-moe": ("qwen3_moe", {**_EXPERTS, "head_dim": 32, "norm_topk_prob": True, "mlp_only_layers": [0]}),
    "qwen3-next": ("qwen3_next", _QWEN3_NEXT),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 3}),
    "phi3": ("phi3", {"sliding_window": 40}),
    "phi3-longrope": ("phi3", {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 16}),
    "gemma2": ("gemma2", _GEMMA),
    "gemma3": ("gemma3_text", {**_GEMMA, "layer_types": ["sliding_attention", "full_attention"]}),
    "olmo2": ("olmo2", {}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.3,
            "logits_scaling": 2.0,
            "attention_bias": True,
        },
    ),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "glm": ("glm", {"head_dim": 16}),
    "glm4": ("glm4", {"head_dim": 16}),
    "cohere2": ("cohere2", {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "gpt2": ("gpt2", _GPT2),
    "gpt-neox": ("gpt_neox", {}),
    "gpt-neox-sequential": ("gpt_neox", {"use_parallel_residual": False}),
    "glm4-moe": ("glm4_moe", {**_GROUPS, "head_dim": 32, "use_qk_norm": True}),
    "lfm2": ("lfm2", _LFM2),
    "gpt-oss": ("gpt_oss", {"head_dim": 16, "sliding_window": 12, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek-v2": ("deepseek_v2", {**_GROUPS, **_LATENTS, "q_lora_rank": None}),
    "deepseek-v2-groups": (
        "deepseek_v2",
        {**_GROUPS, **_LATENTS, "q_lora_rank": 20, "topk_method": "group_limited_greedy", "rope_parameters": _YARN},
    ),
    "deepseek-v3": ("deepseek_v3", {**_GROUPS, **_LATENTS, "q_lora_rank": 20, "rope_parameters": _YARN}),
}

_MROPE: Mapping[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
_TOWER: Mapping[str, Any] = {"hidden_size": 32, "intermediate_size": 32}
_QWEN_TOWER: Mapping[str, Any] = {**_TOWER, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
_LAYERED_TOWER: Mapping[str, Any] = {
    **_TOWER,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
SEEING: Mapping[str, Family] = {
    "qwen2-vl": (
        "qwen2_vl",
        {
            "text_config": {"rope_parameters": _MROPE},
            "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
        },
    ),
    "qwen2.5-vl": ("qwen2_5_vl", {"text_config": {"rope_parameters": _MROPE}, "vision_config": _QWEN_TOWER}),
    "qwen3-vl": (
        "qwen3_vl",
        {
            "text_config": {"head_dim": 16, "rope_parameters": _MROPE},
            "vision_config": {**_QWEN_TOWER, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
            "tie_word_embeddings": True,
        },
    ),
    "gemma3-vl": (
        "gemma3",
        {
            "text_config": {**_GEMMA, "layer_types": ["sliding_attention", "full_attention"]},
            "vision_config": {**_LAYERED_TOWER, "model_type": "siglip_vision_model"},
            "mm_tokens_per_image": 4,
        },
    ),
    "mistral3": (
        "mistral3",
        {
            "text_config": {"model_type": "mistral", "head_dim": 16, "sliding_window": None},
            "vision_config": {**_LAYERED_TOWER, "model_type": "pixtral", "head_dim": 16},
            "tie_word_embeddings": False,
        },
    ),
}
"""Models that see images, too, of which the text part is served."""


def make_model(folder: Path, family: str | Family, common: Mapping[str, Any] = COMMON) -> PreTrainedModel:
    """A model with random weights, written to `folder` as it would be published."""
    torch.manual_seed(1)
    if isinstance(family, str):
        family = SEEING[family] if family in SEEING else FAMILIES[family]
    model_type, changes = family
    model = _random_model(model_type, changes, common)
    for name, parameter in model.named_parameters():
        _fill(name, parameter.data)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.3)
    model.tie_weights()
    model.save_pretrained(folder)
    content = json.loads((folder / "config.json").read_text())
    assert content["architectures"] == [type(model).__name__]
    return model


def _random_model(model_type: str, changes: Mapping[str, Any], common: Mapping[str, Any]) -> PreTrainedModel:
    fields, auto = {**common, **changes}, AutoModelForCausalLM
    if "vision_config" in changes:
        text, tower = {**common, **changes["text_config"]}, dict(changes["vision_config"])
        fields, auto = {**changes, "text_config": text, "vision_config": tower}, AutoModelForImageTextToText
    config: PreTrainedConfig = AutoConfig.for_model(model_type, **fields, attn_implementation="eager")
    model: PreTrainedModel = auto.from_config(config).eval()
    return model


def _fill(name: str, tensor: torch.Tensor) -> None:
    """Weights that make the likeliest token differ from place to place, and lead clearly."""
    if "norm" in name or "ln_" in name:
        tensor.normal_(tensor.mean().item(), 0.2)
    elif tensor.dim() < 2:
        tensor.normal_(0.0, 0.3)
    else:
        is_table = any(part in name for part in ("embed", "wte", "wpe", "lm_head"))
        tensor.normal_(0.0, 0.3 if is_table else 1.5 / math.sqrt(min(tensor.shape[-2:])))
