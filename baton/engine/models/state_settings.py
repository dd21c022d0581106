"""Layers that keep a state in the place of attention, as a `config.json` describes them. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from baton.engine.models.config_fields import Fields

_MAX_WIDTH = 64
_ATTENTION = "full_attention"
StateStyle = Literal["none", "lfm2", "qwen3_next"]


@dataclass(frozen=True)
class ConvolutionSettings:
    """Short convolutions. `layers`: one entry a layer, whether it has one. `width`: how many inputs are added up, the
    token's own and those before it."""

    layers: tuple[bool, ...]
    width: int
    has_bias: bool


@dataclass(frozen=True)
class DeltaSettings:
    """Gated delta nets: each value head carries on a matrix [key_dim, value_dim]. `layers` and `width` as above, of the
    convolution before it."""

    layers: tuple[bool, ...]
    width: int
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int


StateSettings: TypeAlias = ConvolutionSettings | DeltaSettings


def read_states(style: StateStyle, fields: Fields, num_layers: int) -> StateSettings | None:
    """The layers with states of a family of that `style`. Raises `ModelLoadError`."""
    return _READERS[style](fields, num_layers)


def _none(fields: Fields, num_layers: int) -> None:
    return None


def _lfm2(fields: Fields, num_layers: int) -> ConvolutionSettings:
    attending = fields.token_ids("full_attn_idxs") if fields.has("full_attn_idxs") else range(num_layers)
    usual = tuple(layer not in attending for layer in range(num_layers))
    layers = _state_layers(fields, "conv", usual)
    return ConvolutionSettings(layers, _width(fields, "conv_L_cache", 3), fields.flag("conv_bias", False))


def _qwen3_next(fields: Fields, num_layers: int) -> DeltaSettings:
    interval = fields.count("full_attention_interval", 4)
    usual = tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    num_key_heads = fields.count("linear_num_key_heads", 16)
    num_value_heads = fields.count("linear_num_value_heads", 32)
    if num_value_heads % num_key_heads:
        raise fields.error("linear_num_value_heads", f"a multiple of linear_num_key_heads ({num_key_heads})")
    return DeltaSettings(
        layers=_state_layers(fields, "linear_attention", usual),
        width=_width(fields, "linear_conv_kernel_dim", 4),
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=fields.count("linear_key_head_dim", 128),
        value_dim=fields.count("linear_value_head_dim", 128),
    )


def _width(fields: Fields, name: str, default: int) -> int:
    width = fields.count(name, default, _MAX_WIDTH)
    if width < 2:
        raise fields.error(name, "at least 2")
    return width


def _state_layers(fields: Fields, kind: str, usual: tuple[bool, ...]) -> tuple[bool, ...]:
    """Which layers are of that kind in `layer_types`, `usual` where there is none; some layer has to attend."""
    found, kinds = fields.raw("layer_types"), (_ATTENTION, kind)
    if found is not None:
        if not isinstance(found, list) or len(found) != len(usual) or any(each not in kinds for each in found):
            raise fields.error("layer_types", f"a list of {len(usual)} of {' and '.join(kinds)}")
        usual = tuple(each == kind for each in found)
    if all(usual):
        raise fields.error("layer_types", f"such that some layer is {_ATTENTION}")
    return usual


def lfm2_inner(fields: Fields) -> int:
    """The rows of an MLP of LFM2, of which the file has the number before it was rounded. Raises `ModelLoadError`."""
    inner = fields.count("block_ff_dim" if fields.has("block_ff_dim") else "intermediate_size")
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return inner
    inner = 2 * inner // 3
    if fields.is_null("block_ffn_dim_multiplier"):
        return inner
    multiple = fields.count("block_multiple_of", 256)
    return -(-int(fields.number("block_ffn_dim_multiplier", 1.0) * inner) // multiple) * multiple


_READERS: Mapping[StateStyle, Callable[[Fields, int], StateSettings | None]] = {
    "none": _none,
    "lfm2": _lfm2,
    "qwen3_next": _qwen3_next,
}
