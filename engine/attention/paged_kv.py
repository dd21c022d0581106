"""The KV pool as attention sees it: blocks of a layout, and views of the part that belongs to one layer.

Owns the one place where a layout becomes views of a tensor. Does not own the memory (`engine.runner.kv_memory`).

Letters: B blocks, Hkv key and value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from wire.layout import KvLayout


@dataclass(frozen=True, slots=True, eq=False)
class PagedKv:
    """`blocks`: [B, elements of a block of `layout`], contiguous, in the dtype that the layout names."""

    layout: KvLayout
    blocks: Tensor

    def layer(self, number: int) -> Tensor:
        """A view [B, planes, Hkv, block_size, D] of one layer; with `key_value`, plane 0 are keys and 1 values. What
        lies within a block is contiguous; blocks are as far apart as all layers together are large."""
        kv, element_bytes = self.layout.layers[number], self.blocks.element_size()
        end = self.layout.layer_ends[number] // element_bytes
        size = self.layout.layer_bytes(kv) // element_bytes
        shape = (len(self.blocks), kv.num_planes, kv.num_kv_heads, self.layout.block_size, kv.head_dim)
        return self.blocks.narrow(1, end - size, size).view(shape)
