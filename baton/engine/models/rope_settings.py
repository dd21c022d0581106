"""The rotary embedding that a `config.json` describes, as values. Imports no torch.

Owns the spellings (transformers 5 writes `rope_parameters`, older files `rope_theta` and `rope_scaling`) and which
scalings there are. What they compute is `baton.engine.models.rope`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from baton.engine.models.config_fields import MAX_TOKENS, Fields
from baton.wire.errors import ModelLoadError

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_OLD_NAMES = {"su": "longrope"}
_STRETCHING = ("linear", "dynamic")
_FIELDS = frozenset(
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
        "short_factor",
        "long_factor",
        "finetuned",  # written by some early YaRN checkpoints, describes their training only
    }
)
_DEFAULT_THETA = 10_000.0


@dataclass(frozen=True)
class RopeSettings:
    """Rotary embedding. Fields that `rope_type` does not use keep their defaults, so that equal rotations compare
    equal."""

    rope_type: str = "default"
    theta: float = _DEFAULT_THETA
    factor: float = 1.0
    original_max_position: int = 0
    """Context length before scaling; only llama3, yarn and longrope."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """yarn, longrope: multiplies cos and sin; `None`: yarn derives it from `factor`, `mscale` and `mscale_all_dim`."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    """longrope: divisors of the frequencies, for sequences within `original_max_position` and for longer ones."""

    def longest(self, max_position: int) -> int:
        """The longest sequence, in tokens, of a model whose file says `max_position`. Yarn, linear and dynamic scaling
        stretch it; with other kinds the file's number has that in it."""
        if self.rope_type == "yarn":
            return max(max_position, int(self.original_max_position * self.factor))
        return int(max_position * max(self.factor, 1.0)) if self.rope_type in _STRETCHING else max_position


def read_rope(fields: Fields, max_position: int, rotary_dim: int, *, has_local: bool = False) -> RopeSettings:
    """The rotation of all layers; with `has_local` of those without a window. Raises `ModelLoadError`."""
    # When a file has both spellings transformers lets the older one win.
    name = "rope_scaling" if fields.raw("rope_scaling") else "rope_parameters"
    content = fields.raw(name) or {}
    if has_local and isinstance(content, dict) and isinstance(content.get("full_attention"), dict):
        name, content = f"{name}.full_attention", content["full_attention"]
    return _read(fields, name, content, fields.number("rope_theta", _DEFAULT_THETA), max_position, rotary_dim)


def read_local_rope(fields: Fields, max_position: int, rotary_dim: int) -> RopeSettings:
    """The rotation of layers with a window, where it is another one. Raises `ModelLoadError`."""
    parameters = fields.raw("rope_parameters") or {}
    content = parameters.get("sliding_attention") or {} if isinstance(parameters, dict) else {}
    theta = fields.number("rope_local_base_freq", _DEFAULT_THETA)
    return _read(fields, "rope_parameters.sliding_attention", content, theta, max_position, rotary_dim)


def partial_rotary_factor(fields: Fields) -> float:
    """The part of a head that is rotated, which may stand among the rope's own fields. Raises `ModelLoadError`."""
    for name in ("rope_scaling", "rope_parameters"):
        content = fields.raw(name)
        if isinstance(content, dict) and content.get("partial_rotary_factor") is not None:
            return Fields(content, f"config.json: {name}").number("partial_rotary_factor")
    return fields.number("partial_rotary_factor", 1.0)


def _read(
    fields: Fields, name: str, content: Any, default_theta: float, max_position: int, rotary_dim: int
) -> RopeSettings:
    if not isinstance(content, dict):
        raise fields.error(name, "an object or null")
    rope_type = content.get("rope_type", content.get("type", "default"))
    rope_type = _OLD_NAMES.get(rope_type, rope_type) if isinstance(rope_type, str) else rope_type
    if rope_type not in ROPE_TYPES:
        raise ModelLoadError(
            f"config.json: {name}: rope type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}"
        )
    unknown = sorted(set(content) - _FIELDS)
    if unknown:
        raise ModelLoadError(f"config.json: {name}: unknown fields {', '.join(unknown)}")
    rope = Fields(content, f"config.json: {name}")
    theta = rope.number("rope_theta", default_theta)
    if rope_type == "default":
        return RopeSettings(theta=theta)
    if rope_type in _STRETCHING:
        return RopeSettings(rope_type=rope_type, theta=theta, factor=rope.number("factor"))
    field = "original_max_position_embeddings"
    original = fields.count(field, rope.count(field, max_position, MAX_TOKENS), MAX_TOKENS)
    if rope_type == "llama3":
        return _llama3(rope, theta, original)
    if rope_type == "longrope":
        return _longrope(rope, theta, original, max_position, rotary_dim)
    return _yarn(rope, theta, original, max_position)


def _llama3(rope: Fields, theta: float, original_max_position: int) -> RopeSettings:
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


def _yarn(rope: Fields, theta: float, original_max_position: int, max_position: int) -> RopeSettings:
    optional = _optional(rope)
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


def _longrope(rope: Fields, theta: float, original: int, max_position: int, rotary_dim: int) -> RopeSettings:
    factor = rope.number("factor", max_position / original)
    derived = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    return RopeSettings(
        rope_type="longrope",
        theta=theta,
        original_max_position=original,
        attention_factor=rope.number("attention_factor", derived),
        short_factors=rope.numbers("short_factor", rotary_dim // 2),
        long_factors=rope.numbers("long_factor", rotary_dim // 2),
    )


def _optional(rope: Fields) -> Callable[[str], float | None]:
    return lambda name: rope.number(name) if rope.has(name) else None
