"""A checkpoint's `config.json` as one validated value.

Owns: filling in each family's defaults, and refusing what the decoder would compute wrongly. Single fields are read by
`config_fields.py`, the rotary embedding by `rope_settings.py`, experts by `expert_settings.py`. Knows no tensors and
does not import torch.

Invariant: a `ModelConfig` that exists can be computed. Whatever is missing, contradictory or unsupported raised
`ModelLoadError` with the field and its value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from baton.engine.models.config_fields import MAX_TOKENS, Fields, read_json_object
from baton.engine.models.expert_settings import ExpertSettings, read_experts
from baton.engine.models.family import Block, Family, MlpKind, NormKind, QkNorm
from baton.engine.models.latent_settings import LatentSettings, latent_scale, read_latent
from baton.engine.models.names import LLAMA, Names
from baton.engine.models.quantization_settings import METHODS, PublishedQuantization, read_quantization, refusal_of
from baton.engine.models.registry import family_of
from baton.engine.models.rope_settings import RopeSettings, partial_rotary_factor, read_local_rope, read_rope
from baton.engine.models.state_settings import StateSettings, lfm2_inner, read_states
from baton.engine.models.text_part import OTHER_PARTS, text_content, text_part_of
from baton.wire.errors import ModelLoadError
from baton.wire.layout import MAX_LAYERS

_DEFAULT_WINDOW_TOKENS = 4096
_DEFAULT_MAX_WINDOW_LAYERS = 28
_LAYER_TYPES = ("full_attention", "sliding_attention")
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
LayerRope = Literal["main", "local", "none"]
"""Which rotation a layer has: the model's; the one of layers with a window; none."""


@dataclass(frozen=True)
class Multipliers:
    """Constants of a forward pass. `attention_scale`: None for 1 / sqrt(head_dim). A cap of c makes x to
    c * tanh(x / c), before the softmax of attention or for logits."""

    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0
    attention_scale: float | None = None
    attention_cap: float | None = None
    logits_cap: float | None = None


@dataclass(frozen=True)
class ModelConfig:
    """All facts that decide how a model computes. Sizes are element counts."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: QkNorm
    hidden_act: str
    windows: tuple[int | None, ...]
    """One entry a layer: a token attends to at most this many tokens, itself included; `None`: to all before it."""
    rope: RopeSettings
    dtype: str | None
    """The checkpoint's own dtype as the file names it (`bfloat16`), or `None` when it does not say."""
    eos_token_ids: tuple[int, ...]
    """From `config.json` and `generation_config.json`, sorted; of the family where both are silent. Each of them ends
    a generation."""
    block: Block = "pre"
    norm: NormKind = "rms"
    mlp: MlpKind = "gated"
    names: Names = LLAMA
    rotary_dim: int = 0
    """So many elements of each head are rotated."""
    is_interleaved: bool = False
    local_rope: RopeSettings | None = None
    layer_ropes: tuple[LayerRope, ...] = ()
    """One entry a layer."""
    experts: ExpertSettings | None = None
    latent: LatentSettings | None = None
    states: StateSettings | None = None
    quantization: PublishedQuantization | None = None
    """How the checkpoint's weights of products are quantized; experts in MXFP4 are no matter of this."""
    num_draft_layers: int = 0
    """Layers behind the others in the files, which predict further tokens and are not used."""
    other_parts: tuple[str, ...] = ()
    """What the names of tensors begin with that belong to other parts of the checkpoint, and are not read."""
    multipliers: Multipliers = field(default_factory=Multipliers)
    has_short_context: bool = False
    """longrope: no sequence is longer than the context before scaling, so the short factors count."""

    @property
    def max_context_len(self) -> int:
        """The longest sequence, in tokens, that the positions are made for."""
        return self.rope.longest(self.max_position_embeddings)

    def for_context(self, max_model_len: int) -> ModelConfig:
        """The model for sequences of at most `max_model_len` tokens (0: of any length). longrope has other frequencies
        where all of them fit into the context before scaling."""
        is_short = self.rope.rope_type == "longrope" and 0 < max_model_len <= self.rope.original_max_position
        return replace(self, has_short_context=True) if is_short else self


def load_config(folder: Path) -> ModelConfig:
    """Read and validate `config.json` (and the end tokens of `generation_config.json`, where there is one) of a
    checkpoint folder. Raises `ModelLoadError`."""
    return parse_config(*read_config_files(folder))


def read_config_files(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """`config.json` and `generation_config.json` of a checkpoint folder; the latter may be absent, which is as if it
    were empty. Raises `ModelLoadError`."""
    generation_file = folder / "generation_config.json"
    generation = read_json_object(generation_file) if generation_file.is_file() else {}
    return read_json_object(folder / "config.json"), generation


def parse_config(content: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    """The value of an already decoded `config.json` and `generation_config.json`. Raises `ModelLoadError`."""
    text_part = text_part_of(content)
    if text_part is not None:
        content = text_content(content, text_part)
    family = family_of(content.get("architectures"))
    generation_fields = Fields(generation or {}, "generation_config.json")
    if generation_fields.has(_ENDS):
        content = {_ENDS: None, **content}
    fields = Fields(_completed(content, family), "config.json", family.renamed)
    _refuse_unsupported(fields, family)
    hidden_size = fields.count("hidden_size")
    num_layers = fields.count("num_hidden_layers", most=MAX_LAYERS)
    num_heads = fields.count("num_attention_heads")
    attention_bias = fields.flag("attention_bias", False)
    mlp_bias = fields.flag("mlp_bias", False)
    max_position = fields.count("max_position_embeddings", most=MAX_TOKENS)
    latent = read_latent(fields) if family.has_latents else None
    head_dim = _head_dim(fields, family, hidden_size, num_heads) if latent is None else latent.rope_dim
    rotary_dim = _rotary_dim(fields, family, head_dim)
    windows = _windows(fields, family, num_layers)
    return ModelConfig(
        architecture=family.architecture,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_inner(fields, family, hidden_size),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_kv_heads(fields, family, num_heads) if latent is None else 1,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_position_embeddings=max_position,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=mlp_bias if family.mlp_bias is None else family.mlp_bias,
        qk_norm="heads" if fields.flag("use_qk_norm", False) else family.qk_norm,
        hidden_act=_activation(fields),
        windows=windows,
        rope=read_rope(fields, max_position, rotary_dim, has_local=family.rope_rule == "local"),
        dtype=fields.dtype(),
        eos_token_ids=_eos_token_ids(fields, generation_fields),
        block=_block(fields, family),
        norm=family.norm,
        mlp=family.mlp,
        names=family.names,
        rotary_dim=rotary_dim,
        is_interleaved=fields.flag("rope_interleave", family.is_interleaved),
        local_rope=read_local_rope(fields, max_position, rotary_dim) if family.rope_rule == "local" else None,
        layer_ropes=_layer_ropes(fields, family, windows),
        experts=None if family.experts is None else read_experts(family.experts, fields, num_layers),
        latent=latent,
        states=read_states(family.states, fields, num_layers),
        num_draft_layers=fields.index("num_nextn_predict_layers", 0) if fields.has("num_nextn_predict_layers") else 0,
        other_parts=family.unused if text_part is None else OTHER_PARTS,
        multipliers=_multipliers(fields, family, hidden_size, latent),
        quantization=read_quantization(fields, family.quantization),
    )


def _completed(content: dict[str, Any], family: Family) -> dict[str, Any]:
    """`content` by the usual names of fields, with the family's own defaults for what it leaves out."""
    found = dict(content)
    for other, name in family.renamed.items():
        if found.get(other) is not None and found.get(name) is None:
            found[name] = found[other]
    for name, default in family.defaults.items():
        if name not in found or (found[name] is None and name not in _NULL_MEANS_NONE):
            found[name] = default
    return found


_ENDS = "eos_token_id"
_NULL_MEANS_NONE = (
    "sliding_window",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "rope_theta",
    "q_lora_rank",
    _ENDS,
)


def _refuse_unsupported(fields: Fields, family: Family) -> None:
    quantization = fields.raw("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        is_own = family.quantization and method == family.quantization
        if not is_own and not (isinstance(quantization, dict) and method in METHODS):
            raise refusal_of(method)
    for name, only in family.refused.items():
        if fields.has(name) and fields.raw(name) != only:
            raise fields.error(name, f"{only!r}: {family.architecture} is supported with that only")


def _inner(fields: Fields, family: Family, hidden_size: int) -> int:
    if family.states == "lfm2":
        return lfm2_inner(fields)
    return fields.count("intermediate_size", 4 * hidden_size if family.mlp == "plain" else None)


def _activation(fields: Fields) -> str:
    name = "hidden_activation" if fields.has("hidden_activation") else "hidden_act"
    activation = fields.raw(name)
    if activation is None:
        return "silu"
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        supported = ", ".join(_ACTIVATIONS)
        raise ModelLoadError(f"config.json: {name} {activation!r} is not supported; supported: {supported}")
    return _ACTIVATIONS[activation]


def _kv_heads(fields: Fields, family: Family, num_heads: int) -> int:
    if family.has_all_kv_heads:
        return num_heads
    # An explicit null means "as many as query heads" everywhere; a missing field only where files predate it.
    means_all = family.kv_heads_may_be_absent or fields.is_null("num_key_value_heads")
    default = num_heads if means_all else None
    num_kv_heads = fields.count("num_key_value_heads", default)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    return num_kv_heads


def _head_dim(fields: Fields, family: Family, hidden_size: int, num_heads: int) -> int:
    if fields.has("head_dim"):
        head_dim = fields.count("head_dim")
    elif family.default_head_dim is not None:
        head_dim = family.default_head_dim
    elif hidden_size % num_heads == 0:
        head_dim = hidden_size // num_heads
    else:
        raise fields.error("hidden_size", f"a multiple of num_attention_heads ({num_heads})")
    if head_dim % 2:
        raise ModelLoadError(f"config.json: head_dim must be even to be rotated, got {head_dim}")
    return head_dim


def _rotary_dim(fields: Fields, family: Family, head_dim: int) -> int:
    """Elements of a head that are rotated, none where positions are learned."""
    if family.names.positions:
        return 0
    factor = partial_rotary_factor(fields)
    if factor != 1.0 and not family.may_rotate_partly:
        raise fields.error("partial_rotary_factor", f"1: {family.architecture} rotates whole heads")
    rotary_dim = int(head_dim * factor)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise fields.error("partial_rotary_factor", f"such that an even part of {head_dim} elements is rotated")
    return rotary_dim


def _block(fields: Fields, family: Family) -> Block:
    if family.block == "parallel_two_norms" and not fields.flag("use_parallel_residual", True):
        return "pre"
    return family.block


def _layer_ropes(fields: Fields, family: Family, windows: tuple[int | None, ...]) -> tuple[LayerRope, ...]:
    without_window: LayerRope = "none" if family.rope_rule == "windows_only" or family.names.positions else "main"
    with_window: LayerRope = "local" if family.rope_rule == "local" else "main"
    if family.rope_rule == "no_rope_layers":
        return _marked_ropes(fields, len(windows))
    return tuple(without_window if window is None else with_window for window in windows)


def _marked_ropes(fields: Fields, num_layers: int) -> tuple[LayerRope, ...]:
    marks = fields.raw("no_rope_layers")
    if marks is None:
        interval = fields.count("no_rope_layer_interval", 4)
        marks = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    if not isinstance(marks, list) or len(marks) != num_layers or any(mark not in (0, 1) for mark in marks):
        raise fields.error("no_rope_layers", f"a list of {num_layers} of 0 and 1")
    kinds: tuple[LayerRope, LayerRope] = ("none", "main")
    return tuple(kinds[mark] for mark in marks)


def _multipliers(fields: Fields, family: Family, hidden_size: int, latent: LatentSettings | None) -> Multipliers:
    def optional(name: str) -> float | None:
        return fields.number(name) if fields.has(name) else None

    scale = optional("attention_multiplier")
    if fields.has("query_pre_attn_scalar"):
        scale = fields.number("query_pre_attn_scalar") ** -0.5
    if latent is not None:
        scale = latent_scale(fields, latent)
    return Multipliers(
        embedding=hidden_size**0.5 if family.scales_embedding else fields.number("embedding_multiplier", 1.0),
        residual=fields.number("residual_multiplier", 1.0),
        logits=fields.number("logit_scale", 1.0) / fields.number("logits_scaling", 1.0),
        attention_scale=scale,
        attention_cap=optional("attn_logit_softcapping"),
        logits_cap=optional("final_logit_softcapping"),
    )


def _windows(fields: Fields, family: Family, num_layers: int) -> tuple[int | None, ...]:
    full: tuple[int | None, ...] = (None,) * num_layers
    if family.window_rule == "never":
        return full
    if family.window_rule == "every_layer":
        return _same_windows(fields, family, full)
    layer_types = _layer_types(fields, num_layers)
    if family.window_rule == "by_layer_type":
        if not fields.flag("use_sliding_window", False) or fields.is_null("sliding_window"):
            if "sliding_attention" in (layer_types or ()):
                raise fields.error("layer_types", "without sliding_attention when use_sliding_window is not true")
            return full
        if layer_types is None:
            window = fields.count("sliding_window", _DEFAULT_WINDOW_TOKENS, MAX_TOKENS)
            windowed = _windowed_layers(fields, family, num_layers)
            return tuple(window if layer in windowed else None for layer in range(num_layers))
    elif fields.is_null("sliding_window"):
        return full
    elif layer_types is None:
        pattern = fields.count("sliding_window_pattern")
        layer_types = [
            "sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(num_layers)
        ]
    window = fields.count("sliding_window", _DEFAULT_WINDOW_TOKENS, MAX_TOKENS)
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)


def _windowed_layers(fields: Fields, family: Family, num_layers: int) -> Sequence[int]:
    layers, border = range(num_layers), fields.index("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS)
    if family.windowed_layers == "without_rope":
        return [layer for layer, rope in enumerate(_marked_ropes(fields, num_layers)) if rope == "none"]
    return layers[:border:2] if family.windowed_layers == "every_other_first" else layers[border:]


def _same_windows(fields: Fields, family: Family, full: tuple[int | None, ...]) -> tuple[int | None, ...]:
    if fields.has("layer_types"):
        raise fields.error("layer_types", f"absent: {family.architecture} has one window for all layers")
    if fields.is_null("sliding_window") or not fields.flag("use_sliding_window", True):
        return full
    return (fields.count("sliding_window", _DEFAULT_WINDOW_TOKENS, MAX_TOKENS),) * len(full)


def _layer_types(fields: Fields, num_layers: int) -> list[str] | None:
    layer_types = fields.raw("layer_types")
    if layer_types is None:
        return None
    if (
        not isinstance(layer_types, list)
        or len(layer_types) != num_layers
        or any(layer_type not in _LAYER_TYPES for layer_type in layer_types)
    ):
        raise fields.error("layer_types", f"a list of {num_layers} of {' and '.join(_LAYER_TYPES)}")
    return layer_types


def _eos_token_ids(fields: Fields, generation: Fields) -> tuple[int, ...]:
    return tuple(sorted({*fields.token_ids(_ENDS), *generation.token_ids(_ENDS)}))
