"""The shard of a KV block that one rank of a node has where ranks have pools of their own: its heads of its layers, and
of layers that keep a state its channels and its heads' matrices.

Owns the division, on which P and D have to agree before a rank of one may send to a rank of the other: stages have
neighbouring layers, and within a stage ranks have neighbouring heads. Which bytes these are is
`baton.kvtransfer.parts`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from baton.wire.codec import Bounds
from baton.wire.errors import InvalidSetting
from baton.wire.layout import STATE, KvLayout, LayerKv

MAX_RANKS = 64
"""Of a node, in all its stages."""
_Number = Annotated[int, Bounds(0, MAX_RANKS - 1)]
_Size = Annotated[int, Bounds(1, MAX_RANKS)]


@dataclass(frozen=True, slots=True)
class KvDivision:
    """A node of `num_stages` stages with `num_ranks` ranks in each. The default: nothing is divided."""

    num_ranks: _Size = 1
    num_stages: _Size = 1

    @property
    def shards(self) -> list[KvShard]:
        """The shards of all ranks: stage after stage, and in a stage rank after rank."""
        places = [(rank, stage) for stage in range(self.num_stages) for rank in range(self.num_ranks)]
        return [KvShard(rank, stage, self) for rank, stage in places]

    def num_copies(self, num_heads: int) -> int:
        """How many ranks of a stage have the same head; of `num_heads` that a layer stores."""
        return max(1, self.num_ranks // num_heads)


@dataclass(frozen=True, slots=True)
class KvShard:
    """The part of a block that rank `rank` in stage `stage` stores. The default is the whole block. One that a peer
    names may not exist: only those of `KvDivision.shards` do."""

    rank: _Number = 0
    stage: _Number = 0
    division: KvDivision = KvDivision()

    @property
    def is_whole(self) -> bool:
        """Whether there are no other ranks."""
        return self.division == KvDivision()

    def layers_of(self, num_layers: int) -> range:
        """The layers of this stage, of `num_layers`. The first stages have one more where they do not divide."""
        few, num_longer = divmod(num_layers, self.division.num_stages)
        first = self.stage * few + min(self.stage, num_longer)
        return range(first, first + few + (self.stage < num_longer))

    def heads_of(self, num_heads: int) -> range:
        """Its key and value heads of so many. With more ranks than heads, neighbouring ranks have the same one. Raises
        `InvalidSetting` where heads and ranks do not divide."""
        num_ranks = self.division.num_ranks
        if num_heads % num_ranks and num_ranks % num_heads:
            raise InvalidSetting(f"{num_heads} key and value heads cannot be divided among {num_ranks} ranks")
        first = self.rank * num_heads // num_ranks
        return range(first, first + max(1, num_heads // num_ranks))


WHOLE_BLOCK = KvShard()


def own_layout(layout: KvLayout, shard: KvShard) -> KvLayout:
    """The part of a block of `layout` that a rank with `shard` stores, in a pool of its own. Raises `InvalidSetting` if
    it cannot be divided."""
    if shard.is_whole:
        return layout
    kvs = [layout.layers[layer] for layer in shard.layers_of(layout.num_layers)]
    return KvLayout.of_layers(layout.dtype, layout.block_size, [_own_kv(kv, shard) for kv in kvs])


def _own_kv(kv: LayerKv, shard: KvShard) -> LayerKv:
    if kv.kind != STATE:
        return LayerKv(len(shard.heads_of(kv.num_kv_heads)), kv.head_dim, kv.window, kv.kind)
    num_ranks = shard.division.num_ranks
    if kv.head_dim % num_ranks or kv.num_carried % num_ranks:
        raise InvalidSetting(f"states of {kv.head_dim} channels cannot be divided among {num_ranks} ranks")
    return LayerKv(kv.num_kv_heads, kv.head_dim // num_ranks, kv.window, STATE, kv.num_carried // num_ranks)
