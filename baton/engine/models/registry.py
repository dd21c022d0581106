"""The supported architectures, as a table of differences from one decoder.

Owns: which names `config.json` may carry under `architectures` and what each of them changes: which parts a layer is
made of, what its tensors are called (`baton.engine.models.names`), and which defaults a field has that a file leaves
out. Knows nothing of tensors or files. A further family made of the same parts is one row.
"""

from __future__ import annotations

from collections.abc import Mapping

from baton.engine.models import names
from baton.engine.models.family import Family
from baton.wire.errors import ModelLoadError

_GEMMA_DEFAULTS: Mapping[str, object] = {
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "eos_token_id": 1,
}

_GLM_DEFAULTS: Mapping[str, object] = {
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-7,
    "eos_token_id": [151_329, 151_336, 151_338],
}

_FAMILIES = (
    Family(
        "LlamaForCausalLM",
        qkv_bias=None,
        o_bias=None,
        mlp_bias=None,
        kv_heads_may_be_absent=True,
        defaults={"eos_token_id": 2},
    ),
    Family("MistralForCausalLM", window_rule="every_layer", defaults={"eos_token_id": 2}),
    Family("Qwen2ForCausalLM", qkv_bias=True, window_rule="by_layer_type"),
    Family(
        "Qwen3ForCausalLM",
        qkv_bias=None,
        o_bias=None,
        qk_norm="heads",
        window_rule="by_layer_type",
        default_head_dim=128,
    ),
    Family(
        "MixtralForCausalLM",
        window_rule="every_layer",
        experts="mixtral",
        names=names.MIXTRAL,
        defaults={"sliding_window": None, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "eos_token_id": 2},
    ),
    Family(
        "Qwen2MoeForCausalLM",
        qkv_bias=None,
        window_rule="by_layer_type",
        windowed_layers="every_other_first",
        experts="qwen",
        defaults={"attention_bias": True, "shared_expert_intermediate_size": 5632},
        renamed={"qkv_bias": "attention_bias"},
    ),
    Family(
        "Qwen3MoeForCausalLM",
        qkv_bias=None,
        o_bias=None,
        qk_norm="heads",
        window_rule="every_layer",
        experts="qwen",
        defaults={"use_sliding_window": False},
        renamed={"num_local_experts": "num_experts"},
    ),
    Family(
        "Qwen3NextForCausalLM",
        may_rotate_partly=True,
        qkv_bias=None,
        o_bias=None,
        qk_norm="heads",
        norm="offset_rms",
        experts="qwen",
        states="qwen3_next",
        names=names.QWEN3_NEXT,
        default_head_dim=256,
        unused=("mtp.",),
        defaults={"partial_rotary_factor": 0.25, "norm_topk_prob": True, "shared_expert_intermediate_size": 512},
    ),
    Family(
        "OlmoeForCausalLM",
        qkv_bias=None,
        o_bias=None,
        qk_norm="whole",
        experts="olmoe",
        kv_heads_may_be_absent=True,
        defaults={"rms_norm_eps": 1e-5, "eos_token_id": 50_279},
        refused={"clip_qkv": None},
    ),
    Family(
        "Phi3ForCausalLM",
        may_rotate_partly=True,
        window_rule="every_layer",
        names=names.PHI3,
        kv_heads_may_be_absent=True,
        defaults={
            "sliding_window": None,
            "rms_norm_eps": 1e-5,
            "original_max_position_embeddings": 4096,
            "eos_token_id": 32_000,
        },
    ),
    Family(
        "Gemma2ForCausalLM",
        qkv_bias=None,
        o_bias=None,
        window_rule="by_pattern",
        block="sandwich",
        norm="offset_rms",
        names=names.SANDWICH,
        default_head_dim=256,
        scales_embedding=True,
        defaults={
            **_GEMMA_DEFAULTS,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        refused={"use_bidirectional_attention": False},
    ),
    Family(
        "Gemma3ForCausalLM",
        qkv_bias=None,
        o_bias=None,
        qk_norm="heads",
        window_rule="by_pattern",
        rope_rule="local",
        block="sandwich",
        norm="offset_rms",
        names=names.SANDWICH,
        default_head_dim=256,
        scales_embedding=True,
        defaults={**_GEMMA_DEFAULTS, "sliding_window_pattern": 6, "rope_theta": 1e6},
        refused={"use_bidirectional_attention": False},
    ),
    Family(
        "Olmo2ForCausalLM",
        qkv_bias=None,
        o_bias=None,
        qk_norm="whole",
        block="post",
        names=names.OLMO2,
        kv_heads_may_be_absent=True,
        defaults={"rms_norm_eps": 1e-5, "eos_token_id": 50_279},
    ),
    Family(
        "GraniteForCausalLM",
        qkv_bias=None,
        o_bias=None,
        mlp_bias=None,
        kv_heads_may_be_absent=True,
        defaults={"attention_multiplier": 1.0, "eos_token_id": 2},
    ),
    Family(
        "SmolLM3ForCausalLM",
        qkv_bias=None,
        o_bias=None,
        mlp_bias=None,
        window_rule="by_layer_type",
        rope_rule="no_rope_layers",
        windowed_layers="without_rope",
        defaults={"sliding_window": None, "tie_word_embeddings": True, "rope_theta": 2e6, "eos_token_id": 128_001},
    ),
    Family(
        "GlmForCausalLM",
        may_rotate_partly=True,
        qkv_bias=None,
        is_interleaved=True,
        names=names.GLM,
        default_head_dim=128,
        defaults=_GLM_DEFAULTS,
    ),
    Family(
        "Glm4ForCausalLM",
        may_rotate_partly=True,
        qkv_bias=None,
        is_interleaved=True,
        block="sandwich",
        names=names.GLM4,
        default_head_dim=128,
        defaults=_GLM_DEFAULTS,
    ),
    Family(
        "Cohere2ForCausalLM",
        qkv_bias=None,
        o_bias=None,
        window_rule="by_pattern",
        rope_rule="windows_only",
        is_interleaved=True,
        block="parallel",
        norm="layer_without_bias",
        names=names.ONE_NORM,
        kv_heads_may_be_absent=True,
        defaults={
            "tie_word_embeddings": True,
            "sliding_window_pattern": 4,
            "sliding_window": 4096,
            "rms_norm_eps": 1e-5,
            "logit_scale": 0.0625,
            "eos_token_id": 255_001,
        },
        renamed={"layer_norm_eps": "rms_norm_eps"},
        refused={"use_qk_norm": False},
    ),
    Family(
        "StableLmForCausalLM",
        may_rotate_partly=True,
        qkv_bias=None,
        norm="layer",
        defaults={"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "eos_token_id": 0},
        renamed={"layer_norm_eps": "rms_norm_eps", "use_qkv_bias": "attention_bias"},
        refused={"use_parallel_residual": False, "qk_layernorm": False},
    ),
    Family(
        "GPT2LMHeadModel",
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        norm="layer",
        mlp="plain",
        names=names.GPT2,
        has_all_kv_heads=True,
        defaults={
            "tie_word_embeddings": True,
            "hidden_act": "gelu_new",
            "rms_norm_eps": 1e-5,
            "eos_token_id": 50_256,
        },
        renamed={
            "n_embd": "hidden_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_inner": "intermediate_size",
            "n_positions": "max_position_embeddings",
            "activation_function": "hidden_act",
            "layer_norm_epsilon": "rms_norm_eps",
        },
        refused={
            "scale_attn_by_inverse_layer_idx": False,
            "scale_attn_weights": True,
            "add_cross_attention": False,
        },
    ),
    Family(
        "GPTNeoXForCausalLM",
        may_rotate_partly=True,
        qkv_bias=None,
        o_bias=None,
        mlp_bias=True,
        block="parallel_two_norms",
        norm="layer",
        mlp="plain",
        names=names.GPT_NEOX,
        has_all_kv_heads=True,
        defaults={
            "attention_bias": True,
            "hidden_act": "gelu",
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25,
            "intermediate_size": 24_576,
            "eos_token_id": 2,
        },
        renamed={
            "layer_norm_eps": "rms_norm_eps",
            "rotary_pct": "partial_rotary_factor",
            "rotary_emb_base": "rope_theta",
        },
    ),
    Family(
        "Glm4MoeForCausalLM",
        may_rotate_partly=True,
        qkv_bias=None,
        experts="glm",
        names=names.GLM4_MOE,
        defaults={
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
            "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 1,
        },
    ),
    Family(
        "Lfm2ForCausalLM",
        qk_norm="heads",
        names=names.LFM2,
        states="lfm2",
        defaults={
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "eos_token_id": 2,
        },
        renamed={"norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings"},
    ),
    Family(
        "GptOssForCausalLM",
        qkv_bias=None,
        o_bias=None,
        window_rule="by_pattern",
        experts="gpt_oss",
        names=names.GPT_OSS,
        default_head_dim=64,
        quantization="mxfp4",
        defaults={
            "attention_bias": True,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150_000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": 4096,
                "truncate": False,
            },
            "rope_theta": 150_000.0,
        },
    ),
    Family(
        "DeepseekV2ForCausalLM",
        qkv_bias=None,
        o_bias=None,
        mlp_bias=None,
        is_interleaved=True,
        has_latents=True,
        experts="deepseek_v2",
        names=names.DEEPSEEK,
        defaults={"q_lora_rank": 1536, "n_shared_experts": 2, "eos_token_id": 2},
        refused={"norm_topk_prob": False, "moe_layer_freq": 1},
    ),
    Family(
        "DeepseekV3ForCausalLM",
        qkv_bias=None,
        o_bias=None,
        is_interleaved=True,
        has_latents=True,
        experts="glm",
        names=names.DEEPSEEK,
        defaults={
            "q_lora_rank": 1536,
            "routed_scaling_factor": 2.5,
            "n_group": 8,
            "topk_group": 4,
            "first_k_dense_replace": 3,
            "num_nextn_predict_layers": 1,
            "eos_token_id": 1,
        },
        refused={"moe_layer_freq": 1},
    ),
)
ARCHITECTURES: dict[str, Family] = {family.architecture: family for family in _FAMILIES}


def family_of(architectures: object) -> Family:
    """The family that the value of `architectures` in a `config.json` names. Raises `ModelLoadError` for anything but
    a list with one supported name."""
    supported = ", ".join(ARCHITECTURES)
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise ModelLoadError(
            f"config.json: architectures must be a list with one name, got {architectures!r}; supported: {supported}"
        )
    family = ARCHITECTURES.get(architectures[0]) if isinstance(architectures[0], str) else None
    if family is None:
        raise ModelLoadError(f"config.json: architecture {architectures[0]!r} is not supported; supported: {supported}")
    return family
