"""A checkpoint's `config.json` as one validated value.

Owns: reading the file (both spellings: transformers 5 writes `rope_parameters` and `dtype`, older files `rope_theta`,
`rope_scaling` and `torch_dtype`), filling in each family's defaults, refusing what the decoder would compute wrongly.
Knows no tensors and does not import torch.

Invariant: a `ModelConfig` that exists can be computed. Whatever is missing, contradictory or unsupported raised
`ModelLoadError` with the field and its value.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.models.registry import Family, family_of
from wire.errors import ModelLoadError
from wire.layout import MAX_LAYERS

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")

_ROPE_FIELDS = frozenset(
    {
        "rope_type",
        "type",
        "rope_theta",
        "partial_rotary_factor",
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "finetuned",  # written by some early YaRN checkpoints, describes their training only
    }
)
_MAX_SIZE = 2**24
_MAX_TOKENS = 2**40
"""Limits of what a file may say: of a dimension of a tensor, and of positions."""
_DEFAULT_ROPE_THETA = 10_000.0
_DEFAULT_WINDOW_TOKENS = 4096
_DEFAULT_MAX_WINDOW_LAYERS = 28


@dataclass(frozen=True)
class RopeSettings:
    """Rotary embedding. Fields that `rope_type` does not use keep their defaults, so that equal rotations compare
    equal."""

    rope_type: str = "default"
    theta: float = _DEFAULT_ROPE_THETA
    factor: float = 1.0
    original_max_position: int = 0
    """Context length before scaling; only llama3 and yarn."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """yarn: multiplies cos and sin; `None`: derived from `factor`, `mscale` and `mscale_all_dim`."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


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
    qk_norm: bool
    hidden_act: str
    windows: tuple[int | None, ...]
    """One entry a layer: a token attends to at most this many tokens, itself included; `None`: to all before it."""
    rope: RopeSettings
    dtype: str | None
    """The checkpoint's own dtype as the file names it (`bfloat16`), or `None` when it does not say."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """From `config.json` and `generation_config.json`, sorted; each of them ends a generation."""

    @property
    def max_context_len(self) -> int:
        """The longest sequence, in tokens, that the positions are made for. YaRN, linear and dynamic scaling stretch
        it; llama3's is already part of `max_position_embeddings`."""
        stretched = {
            "yarn": self.rope.original_max_position * self.rope.factor,
            "linear": self.max_position_embeddings * self.rope.factor,
            "dynamic": self.max_position_embeddings * self.rope.factor,
        }
        return max(self.max_position_embeddings, int(stretched.get(self.rope.rope_type, 0)))


def load_config(folder: Path) -> ModelConfig:
    """Read and validate `config.json` (and the end tokens of `generation_config.json`, where there is one) of a
    checkpoint folder. Raises `ModelLoadError`."""
    content = _read_json(folder / "config.json")
    generation_file = folder / "generation_config.json"
    generation = _read_json(generation_file) if generation_file.is_file() else {}
    return parse_config(content, generation)


def parse_config(content: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    """The value of an already decoded `config.json` and `generation_config.json`. Raises `ModelLoadError`."""
    family = family_of(content.get("architectures"))
    fields = _Fields(content, "config.json")
    _refuse_unsupported(fields)
    hidden_size = fields.count("hidden_size")
    num_layers = fields.count("num_hidden_layers", most=MAX_LAYERS)
    num_heads = fields.count("num_attention_heads")
    attention_bias = fields.flag("attention_bias", False)
    mlp_bias = fields.flag("mlp_bias", False)
    max_position = fields.count("max_position_embeddings", most=_MAX_TOKENS)
    return ModelConfig(
        architecture=family.architecture,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_kv_heads(fields, family, num_heads),
        head_dim=_head_dim(fields, family, hidden_size, num_heads),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_position_embeddings=max_position,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=attention_bias if family.o_bias is None else family.o_bias,
        mlp_bias=mlp_bias if family.mlp_bias is None else family.mlp_bias,
        qk_norm=family.qk_norm,
        hidden_act="silu",
        windows=_windows(fields, family, num_layers),
        rope=_rope(fields, max_position),
        dtype=_dtype(fields),
        bos_token_id=next(iter(fields.token_ids("bos_token_id")), None),
        eos_token_ids=_eos_token_ids(fields, _Fields(generation or {}, "generation_config.json")),
    )


def architecture_facts(config: ModelConfig) -> dict[str, int | float | str | bool | None]:
    """The fields of `config` that change what a forward pass computes, flat and in a fixed order, for a fingerprint.

    Left out: the checkpoint's dtype (the dtype in use is the node's own choice) and the bos and eos ids (no tensor
    depends on them)."""
    shape = asdict(config)
    for not_computed in ("dtype", "bos_token_id", "eos_token_ids"):
        del shape[not_computed]
    rope = shape.pop("rope")
    windows = shape.pop("windows")
    facts: dict[str, int | float | str | bool | None] = dict(shape)
    facts.update({f"rope_{name.removeprefix('rope_')}": value for name, value in rope.items()})
    facts["windows"] = ",".join("all" if window is None else str(window) for window in windows)
    return dict(sorted(facts.items()))


class _Fields:
    """Typed access to a decoded JSON object; each error names file, field and value."""

    def __init__(self, content: dict[str, Any], source: str) -> None:
        self._content = content
        self._source = source

    def error(self, name: str, expected: str) -> ModelLoadError:
        if name not in self._content:
            return ModelLoadError(f"{self._source}: {name} is missing, expected {expected}")
        return ModelLoadError(f"{self._source}: {name} must be {expected}, got {self._content[name]!r}")

    def has(self, name: str) -> bool:
        """Whether the field is there with a value; files write an explicit null for 'not set'."""
        return self._content.get(name) is not None

    def is_null(self, name: str) -> bool:
        """Whether the field is there as an explicit null, which some fields tell from not being there."""
        return name in self._content and self._content[name] is None

    def raw(self, name: str) -> Any:
        return self._content.get(name)

    def count(self, name: str, default: int | None = None, most: int = _MAX_SIZE) -> int:
        """A size from 1 to `most`. What no model has would be allocated before it is compared with anything."""
        value = self._content.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(name, "a positive integer")
        if value > most:
            raise self.error(name, f"at most {most}")
        return value

    def index(self, name: str, default: int) -> int:
        value = self._content.get(name, default)
        if not _is_natural(value):
            raise self.error(name, "an integer that is not negative")
        return int(value)

    def number(self, name: str, default: float | None = None) -> float:
        value = self._content.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
            raise self.error(name, "a positive number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._content.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def token_ids(self, name: str) -> list[int]:
        """One id or a list of ids; a null is an empty list."""
        value = self._content.get(name)
        if value is None:
            return []
        ids = value if isinstance(value, list) else [value]
        if not all(_is_natural(token_id) for token_id in ids):
            raise self.error(name, "a token id or a list of token ids")
        return ids


def _is_natural(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelLoadError(f"{path.parent}: not a checkpoint, it has no {path.name}") from None
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path}: must hold a JSON object, got {type(content).__name__}")
    return content


def _refuse_unsupported(fields: _Fields) -> None:
    quantization = fields.raw("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise ModelLoadError(f"config.json: quantization_config (quant_method {method!r}) is not supported")
    activation = fields.raw("hidden_act")
    if activation not in (None, "silu"):
        raise ModelLoadError(f"config.json: hidden_act {activation!r} is not supported; supported: silu")
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise fields.error("partial_rotary_factor", "1 (a partial rotation is not supported)")


def _kv_heads(fields: _Fields, family: Family, num_heads: int) -> int:
    # An explicit null means "as many as query heads" everywhere; a missing field only where files predate it.
    means_all = family.kv_heads_may_be_absent or fields.is_null("num_key_value_heads")
    default = num_heads if means_all else None
    num_kv_heads = fields.count("num_key_value_heads", default)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    return num_kv_heads


def _head_dim(fields: _Fields, family: Family, hidden_size: int, num_heads: int) -> int:
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


def _windows(fields: _Fields, family: Family, num_layers: int) -> tuple[int | None, ...]:
    full: tuple[int | None, ...] = (None,) * num_layers
    if family.window_rule == "never":
        return full
    if family.window_rule == "every_layer":
        if fields.has("layer_types"):
            raise fields.error("layer_types", f"absent: {family.architecture} has one window for all layers")
        if fields.is_null("sliding_window"):
            return full
        return (fields.count("sliding_window", _DEFAULT_WINDOW_TOKENS, _MAX_TOKENS),) * num_layers
    layer_types = _layer_types(fields, num_layers)
    if not fields.flag("use_sliding_window", False) or fields.is_null("sliding_window"):
        if "sliding_attention" in (layer_types or ()):
            raise fields.error("layer_types", "without sliding_attention when use_sliding_window is not true")
        return full
    window = fields.count("sliding_window", _DEFAULT_WINDOW_TOKENS, _MAX_TOKENS)
    if layer_types is None:
        first_windowed = fields.index("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS)
        return tuple(window if layer >= first_windowed else None for layer in range(num_layers))
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)


def _layer_types(fields: _Fields, num_layers: int) -> list[str] | None:
    layer_types = fields.raw("layer_types")
    if layer_types is None:
        return None
    known = ("full_attention", "sliding_attention")
    if (
        not isinstance(layer_types, list)
        or len(layer_types) != num_layers
        or any(layer_type not in known for layer_type in layer_types)
    ):
        raise fields.error("layer_types", f"a list of {num_layers} of {' and '.join(known)}")
    return layer_types


def _rope(fields: _Fields, max_position: int) -> RopeSettings:
    # When a file has both spellings transformers lets the older one win.
    name = "rope_scaling" if fields.raw("rope_scaling") else "rope_parameters"
    content = fields.raw(name) or {}
    if not isinstance(content, dict):
        raise fields.error(name, "an object or null")
    unknown = sorted(set(content) - _ROPE_FIELDS)
    rope_type = content.get("rope_type", content.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise ModelLoadError(
            f"config.json: {name}: rope type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
        )
    if unknown:
        raise ModelLoadError(f"config.json: {name}: unknown fields {', '.join(unknown)}")
    rope = _Fields(content, f"config.json: {name}")
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise rope.error("partial_rotary_factor", "1 (a partial rotation is not supported)")
    theta = rope.number("rope_theta", fields.number("rope_theta", _DEFAULT_ROPE_THETA))
    if rope_type == "default":
        return RopeSettings(theta=theta)
    if rope_type in ("linear", "dynamic"):
        return RopeSettings(rope_type=rope_type, theta=theta, factor=rope.number("factor"))
    name = "original_max_position_embeddings"
    original = fields.count(name, rope.count(name, max_position, _MAX_TOKENS), _MAX_TOKENS)
    if rope_type == "llama3":
        return _llama3(rope, theta, original)
    return _yarn(rope, theta, original, max_position)


def _llama3(rope: _Fields, theta: float, original_max_position: int) -> RopeSettings:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise rope.error("high_freq_factor", f"above low_freq_factor ({low})")
    return RopeSettings(
        rope_type="llama3",
        theta=theta,
        factor=rope.number("factor"),
        original_max_position=original_max_position,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(rope: _Fields, theta: float, original_max_position: int, max_position: int) -> RopeSettings:
    def optional(name: str) -> float | None:
        return rope.number(name) if rope.has(name) else None

    if theta <= 1.0:
        raise rope.error("rope_theta", "above 1 for yarn")
    return RopeSettings(
        rope_type="yarn",
        theta=theta,
        factor=rope.number("factor", max_position / original_max_position),
        original_max_position=original_max_position,
        beta_fast=rope.number("beta_fast", RopeSettings.beta_fast),
        beta_slow=rope.number("beta_slow", RopeSettings.beta_slow),
        attention_factor=optional("attention_factor"),
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
        truncate=rope.flag("truncate", True),
    )


def _dtype(fields: _Fields) -> str | None:
    name = "dtype" if fields.has("dtype") else "torch_dtype"
    value = fields.raw(name)
    if value is None:
        return None
    if not isinstance(value, str):
        raise fields.error(name, "the name of a dtype")
    return value.removeprefix("torch.")


def _eos_token_ids(fields: _Fields, generation: _Fields) -> tuple[int, ...]:
    return tuple(sorted({*fields.token_ids("eos_token_id"), *generation.token_ids("eos_token_id")}))
