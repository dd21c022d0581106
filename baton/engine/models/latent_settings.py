"""Attention over latents (MLA) as a `config.json` describes it. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from baton.engine.models.config_fields import Fields


@dataclass(frozen=True)
class LatentSettings:
    """The sizes of attention over latents, in elements: of the vector between stream and queries (0: there is none),
    and of a latent. Then those of a head: the parts of its query without and with rotation, and its value."""

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int


def read_latent(fields: Fields) -> LatentSettings:
    """The sizes of attention over latents in a `config.json`. Raises `ModelLoadError`."""
    rope_dim = fields.count("qk_rope_head_dim")
    if rope_dim % 2:
        raise fields.error("qk_rope_head_dim", "even, to be rotated")
    return LatentSettings(
        q_rank=fields.count("q_lora_rank") if fields.has("q_lora_rank") else 0,
        kv_rank=fields.count("kv_lora_rank"),
        nope_dim=fields.count("qk_nope_head_dim"),
        rope_dim=rope_dim,
        v_dim=fields.count("v_head_dim"),
    )


def latent_scale(fields: Fields, latent: LatentSettings) -> float:
    """The scale of attention over latents, which follows the length that yarn stretches to."""
    scale = 1.0 / math.sqrt(latent.nope_dim + latent.rope_dim)
    content = fields.raw("rope_scaling") or fields.raw("rope_parameters") or {}
    rope = Fields(content, "config.json: rope_scaling")
    if content.get("rope_type", content.get("type", "default")) == "default" or not rope.has("mscale_all_dim"):
        return scale
    factor, mscale = rope.number("factor", 1.0), rope.number("mscale_all_dim")
    stretched = 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0
    return scale * stretched * stretched
