"""Tiny models of architectures that Baton has no decoder for, or that are computed without it here; see `families`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.engine.models.families import FAMILIES, Family

_BY_LAYER: Mapping[str, Any] = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS: Mapping[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
_HEAD: Mapping[str, Any] = {"head_dim": 16}
_ROUTED: Mapping[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}

COMPUTED: Mapping[str, Family] = {
    "gemma": ("gemma", _HEAD),
    "cohere": ("cohere", {}),
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "gpt-bigcode": ("gpt_bigcode", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 96}),
    "exaone4": ("exaone4", {**_BY_LAYER, "sliding_window_pattern": 2}),
    "vaultgemma": ("vaultgemma", {**_BY_LAYER, **_HEAD}),
    "granite-moe": ("granitemoe", _EXPERTS),
    "gpt-oss": FAMILIES["gpt-oss"],
    "deepseek-v3": FAMILIES["deepseek-v3"],
}
"""Plain ones; heads that share keys; learned positions; windows; caps; experts; sinks; values smaller than keys."""

ALSO_COMPUTED: Mapping[str, Family] = {
    "starcoder2": ("starcoder2", {"sliding_window": 12}),
    "nemotron": ("nemotron", {}),
    "persimmon": ("persimmon", {}),
    "olmo": ("olmo", {}),
    "olmo3": ("olmo3", _BY_LAYER),
    "flex-olmo": ("flex_olmo", {"num_experts": 4, "num_experts_per_tok": 2}),
    "arcee": ("arcee", {}),
    "ernie4.5": ("ernie4_5", _HEAD),
    "ernie4.5-moe": (
        "ernie4_5_moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 48, "moe_num_shared_experts": 1},
    ),
    "seed-oss": ("seed_oss", _HEAD),
    "hunyuan": ("hunyuan_v1_dense", _HEAD),
    "hunyuan-moe": ("hunyuan_v1_moe", {**_HEAD, "num_experts": 4, "moe_topk": 2}),
    "apertus": ("apertus", {}),
    "phi": ("phi", {}),
    "phi-moe": ("phimoe", {"num_local_experts": 4}),
    "bitnet": ("bitnet", {}),
    "dots1": ("dots1", _ROUTED),
    "solar-open": ("solar_open", {**_HEAD, **_ROUTED}),
    "ministral3": ("ministral3", _HEAD),
    "nanochat": ("nanochat", {}),
    "minimax-m2": ("minimax_m2", {**_HEAD, **_EXPERTS}),
    "helium": ("helium", _HEAD),
    "afmoe": (
        "afmoe",
        {
            **_HEAD,
            **_BY_LAYER,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "num_dense_layers": 1,
        },
    ),
}
"""Compared by `python -m tests.engine.models.modelling`, not in every run of the tests."""

REFUSED: Mapping[str, tuple[Family, str]] = {
    "chunks": (
        ("llama4_text", {**_EXPERTS, **_HEAD, "intermediate_size_mlp": 96, "attention_chunk_size": 8}),
        "its masks are neither causal nor windows",
    ),
    "masks of its own": (("doge", {}), "it makes masks of its own"),
    "two attentions a layer": (("diffllama", {}), "its 2 layers attend 4 times, in 2 places"),
    "states": (("mamba", {}), "transformers does not let its attention be replaced"),
    "fixed attention": (("falcon", {}), "transformers does not let its attention be replaced"),
    "rope by length": (FAMILIES["phi3-longrope"], "longrope rope follow the longest sequence"),
}
