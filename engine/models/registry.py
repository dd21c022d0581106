"""The supported architectures, as a table of differences from one decoder.

Owns: which names `config.json` may carry under `architectures` and what each of them changes. Knows nothing of
tensors, files or the fields that every family shares (`engine/models/config.py`). A further family of the same shape
is one row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from wire.errors import ModelLoadError

WindowRule = Literal["never", "every_layer", "by_layer_type"]
"""Which layers look back only a window: none of them, all of them, or those that `layer_types` (or
`max_window_layers`) names when `use_sliding_window` is true."""


@dataclass(frozen=True)
class Family:
    """What distinguishes one architecture. A bias of `None` follows the checkpoint's own flag (`attention_bias`,
    `mlp_bias`); true or false is fixed by the architecture whatever the file says."""

    architecture: str
    qkv_bias: bool | None
    o_bias: bool | None
    mlp_bias: bool | None
    qk_norm: bool
    window_rule: WindowRule
    default_head_dim: int | None = None
    """Head size of a file that has no `head_dim`; `None`: hidden_size / num_attention_heads."""
    kv_heads_may_be_absent: bool = False
    """Files older than grouped-query attention have no `num_key_value_heads`: as many as query heads."""


ARCHITECTURES: dict[str, Family] = {
    family.architecture: family
    for family in (
        Family(
            "LlamaForCausalLM",
            qkv_bias=None,
            o_bias=None,
            mlp_bias=None,
            qk_norm=False,
            window_rule="never",
            kv_heads_may_be_absent=True,
        ),
        Family(
            "MistralForCausalLM",
            qkv_bias=False,
            o_bias=False,
            mlp_bias=False,
            qk_norm=False,
            window_rule="every_layer",
        ),
        Family(
            "Qwen2ForCausalLM",
            qkv_bias=True,
            o_bias=False,
            mlp_bias=False,
            qk_norm=False,
            window_rule="by_layer_type",
        ),
        Family(
            "Qwen3ForCausalLM",
            qkv_bias=None,
            o_bias=None,
            mlp_bias=False,
            qk_norm=True,
            window_rule="by_layer_type",
            default_head_dim=128,
        ),
    )
}


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
