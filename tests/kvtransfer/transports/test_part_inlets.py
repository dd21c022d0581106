"""What a pool takes from ranks of any node, and from how many kinds of nodes."""

from __future__ import annotations

import numpy as np
import pytest

from baton.kvtransfer.pools.host import HostPool
from baton.kvtransfer.transports.part_inlets import RankInlets
from baton.wire.kv_shard import MAX_RANKS, WHOLE_BLOCK, KvDivision, KvShard
from baton.wire.layout import KvLayout, LayerKv

LAYOUT = KvLayout.of_layers("float16", 2, [LayerKv(2, 2)] * 32)


@pytest.fixture
def inlets() -> RankInlets:
    return RankInlets(HostPool(np.zeros((1, LAYOUT.block_bytes), dtype=np.uint8)), LAYOUT, WHOLE_BLOCK)


def test_a_sender_without_ranks_has_the_whole_pool(inlets: RankInlets) -> None:
    whole = inlets.of(None)
    assert whole is not None
    assert (whole.source, whole.sources, whole.sink.block_bytes) == (WHOLE_BLOCK, (WHOLE_BLOCK,), LAYOUT.block_bytes)
    assert inlets.of(WHOLE_BLOCK) == whole


def test_each_rank_has_its_part_and_knows_the_others(inlets: RankInlets) -> None:
    division = KvDivision(2, MAX_RANKS // 2)
    for shard in division.shards:
        inlet = inlets.of(shard)
        assert inlet is not None
        assert (inlet.source, inlet.sources) == (shard, tuple(division.shards))
        assert inlet.sink.block_bytes * MAX_RANKS == LAYOUT.block_bytes


def test_what_no_node_has_and_a_rank_that_there_is_not_have_nothing_here(inlets: RankInlets) -> None:
    assert inlets.of(KvShard(0, 0, KvDivision(3))) is None, "two heads cannot be divided so"
    assert inlets.of(KvShard(1, 1, KvDivision(1, 2))) is None
    assert inlets.of(KvShard(0, 0, KvDivision(1, 2))) is not None


def test_there_are_not_more_than_64_ranks_and_16_kinds_of_nodes(inlets: RankInlets) -> None:
    assert inlets.of(KvShard(0, 0, KvDivision(2, 33))) is None
    for num_stages in range(1, 17):
        assert inlets.of(KvShard(0, 0, KvDivision(1, num_stages))) is not None
    assert inlets.of(KvShard(0, 0, KvDivision(1, 17))) is None
    assert inlets.of(KvShard(0, 0, KvDivision(1, 16))) is not None
