"""How one architecture may differ from the others: the kinds of parts that a decoder is made of.

Owns the vocabulary of the table in `baton.engine.models.registry`. Knows no architecture by name, no tensors and no
files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from baton.engine.models import names
from baton.engine.models.expert_settings import ExpertStyle
from baton.engine.models.names import Names
from baton.engine.models.state_settings import StateStyle

WindowRule = Literal["never", "every_layer", "by_layer_type", "by_pattern"]
"""Which layers look back only a window: none of them; all of them; those that `layer_types` (or `max_window_layers`)
names when `use_sliding_window` is true; those that `layer_types` names, or all but each `sliding_window_pattern`th."""
WindowedLayers = Literal["last", "every_other_first", "without_rope"]
"""Which layers have a window where `use_sliding_window` is true and no `layer_types` names them: those behind the first
`max_window_layers`; every other one of these; those that do not rotate."""
QkNorm = Literal["none", "heads", "whole"]
"""Norms of queries and keys before their rotation: of each head, or of all heads of a token together."""
RopeRule = Literal["all", "local", "windows_only", "no_rope_layers"]
"""Which layers rotate: all; all, and those with a window by a rope of their own; only those with a window; those that
`no_rope_layers` marks with 1."""
Block = Literal["pre", "post", "sandwich", "parallel", "parallel_two_norms"]
"""Where the norms of a layer are: before attention and MLP, after them, both; or attention and MLP read the same
stream, by one norm or by one each."""
NormKind = Literal["rms", "offset_rms", "layer", "layer_without_bias"]
MlpKind = Literal["gated", "plain"]


@dataclass(frozen=True)
class Family:
    """The fields of one architecture that distinguish it from others.

    A bias of `None` follows the checkpoint's own flag (`attention_bias`, `mlp_bias`); true or false is fixed by the
    architecture, whatever the file says. `defaults`: of fields that a file leaves out. `renamed`: other names of
    fields. `refused`: fields that would change the results, and the only value each may have.
    """

    architecture: str
    qkv_bias: bool | None = False
    o_bias: bool | None = False
    mlp_bias: bool | None = False
    qk_norm: QkNorm = "none"
    window_rule: WindowRule = "never"
    rope_rule: RopeRule = "all"
    is_interleaved: bool = False
    """Rotated pairs are neighbours in the checkpoint, not half a head apart."""
    windowed_layers: WindowedLayers = "last"
    may_rotate_partly: bool = False
    """A part of each head may be all that is rotated (`partial_rotary_factor`)."""
    block: Block = "pre"
    norm: NormKind = "rms"
    mlp: MlpKind = "gated"
    experts: ExpertStyle | None = None
    names: Names = names.LLAMA
    default_head_dim: int | None = None
    """Head size of a file that has no `head_dim`; `None`: hidden_size / num_attention_heads."""
    kv_heads_may_be_absent: bool = False
    """Files older than grouped-query attention have no `num_key_value_heads`: as many as query heads."""
    has_all_kv_heads: bool = False
    """The architecture has a key and value head for each query head, whatever the file says."""
    has_latents: bool = False
    """Attention stores compressed vectors, which all heads share."""
    states: StateStyle = "none"
    """Some layers keep a state in the place of attention."""
    unused: tuple[str, ...] = ()
    """What the names of tensors begin with that are published and not used."""
    scales_embedding: bool = False
    """The embedding is multiplied by the square root of the hidden size."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, object] = field(default_factory=dict)
    quantization: str = ""
    """The method in which checkpoints may be quantized, "" for none."""
