"""The layers by which drafts are computed, and whose KV lies behind that of the model's layers in each block.

A block that has room for their KV carries it wherever it goes: through the pool, the prefix cache, handoffs and tiers.
It is a hint: where it is missing or wrong, drafts are wrong, and no token is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from baton.wire.layout import LayerKv


@dataclass(frozen=True, slots=True)
class DraftLayers:
    """`kvs`: what each of them stores of a token. `identity`: equal where their KV means the same. `weights_bytes`: of
    weights that only drafts need. `reads_steps`: whether they read what the model computes between its layers, which a
    recorded graph does not keep."""

    reads_steps: ClassVar[bool] = False

    kvs: tuple[LayerKv, ...]
    identity: str
    weights_bytes: int
