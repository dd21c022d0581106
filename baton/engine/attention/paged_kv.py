"""The KV pool as attention sees it: blocks of a layout, and views of the part that belongs to one layer.

A block may have more layers than one attention reads and writes: those of other stages, and those by which a draft is
computed, which lie behind the model's.

Owns the one place where a layout becomes views of a tensor. Does not own the memory (`baton.engine.runner.kv_memory`).

Letters: B blocks, Hkv key and value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from baton.engine.models.shard import WHOLE, Shard
from baton.wire.layout import KvLayout


@dataclass(frozen=True, slots=True, eq=False)
class PagedKv:
    """`blocks`: [B, elements of a block], contiguous, in the dtype that `layout` names; bytes where that has scales.

    `layout` is what is read and written here of each token. With `whole` a block is one of that, and others have the
    rest of it: layers before `first_layer` and behind those of `layout`, and heads of other ranks than `shard`.
    Without, a block is one of `layout`. `draft_blocks`: no request has them. Within a step they hold the states behind
    drafts, which may be wrong.
    """

    layout: KvLayout
    blocks: Tensor
    whole: KvLayout | None = None
    shard: Shard = WHOLE
    draft_blocks: range = range(0)
    first_layer: int = 0

    def last_layers(self, layout: KvLayout) -> PagedKv:
        """The last layers of each block, which store `layout`, with all their heads."""
        whole = self.whole or self.layout
        return PagedKv(layout, self.blocks, whole, first_layer=whole.num_layers - layout.num_layers)

    @property
    def own_part(self) -> Tensor:
        """A view [B, elements of the layers here] of the blocks, with the heads of all ranks."""
        ends = (0, *(end // self.blocks.element_size() for end in (self.whole or self.layout).layer_ends))
        begin, end = ends[self.first_layer], ends[self.first_layer + self.layout.num_layers]
        return self.blocks.narrow(1, begin, end - begin)

    def heads(self, number: int) -> Tensor:
        """A view [B, planes, Hkv, elements of a head] of one of the layers here; with `key_value`, plane 0 are keys and
        1 values. The heads of a plane are contiguous; blocks are as far apart as all layers together are large."""
        layout = self.whole or self.layout
        number += self.first_layer
        kv, element_bytes = layout.layers[number], self.blocks.element_size()
        end = layout.layer_ends[number] // element_bytes
        size = layout.layer_bytes(kv) // element_bytes
        shape = (len(self.blocks), kv.num_planes, kv.num_kv_heads, layout.head_elements(kv))
        heads = self.shard.kv_heads_of(kv.num_kv_heads)
        return self.blocks.narrow(1, end - size, size).view(shape)[:, :, heads.start : heads.stop]

    def layer(self, number: int) -> Tensor:
        """The KV of a layer as [B, planes, Hkv, block_size, D], where no scales lie between heads."""
        heads = self.heads(number)
        return heads.view(*heads.shape[:3], self.layout.block_size, -1)

    def state(self, number: int) -> Tensor:
        """A view [B, rows, elements of a row] of the states of a layer here that stores them; those of all
        ranks."""
        layout = self.whole or self.layout
        number += self.first_layer
        kv, element_bytes = layout.layers[number], self.blocks.element_size()
        begin = (layout.layer_ends[number] - layout.layer_bytes(kv)) // element_bytes
        states = self.blocks.narrow(1, begin, kv.elements_per_token)
        return states.view(len(self.blocks), kv.num_kv_heads, kv.head_dim)
