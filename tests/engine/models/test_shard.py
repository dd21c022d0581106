from __future__ import annotations

import pytest

from baton.engine.models.shard import WHOLE, Shard, scaled
from baton.wire.errors import InvalidSetting, ModelLoadError


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_ranks_share_everything_evenly(size: int) -> None:
    shares = [Shard(rank, size).share_of(16, "rows") for rank in range(size)]
    assert [row for share in shares for row in share] == list(range(16))
    assert {len(share) for share in shares} == {16 // size}


def test_one_rank_has_the_whole() -> None:
    assert (WHOLE.share_of(7, "rows"), WHOLE.kv_heads_of(3)) == (range(7), range(3))


@pytest.mark.parametrize(("num_heads", "size"), [(8, 2), (8, 8), (2, 8), (1, 4)])
def test_query_heads_find_their_key_head_on_the_same_rank(num_heads: int, size: int) -> None:
    num_queries = 16
    for rank in range(size):
        shard = Shard(rank, size)
        kv_heads = shard.kv_heads_of(num_heads)
        assert {query * num_heads // num_queries for query in shard.share_of(num_queries, "heads")} == set(kv_heads)


def test_what_does_not_divide_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="6 attention heads cannot be divided among 4 ranks"):
        Shard(0, 4).share_of(6, "attention heads")
    with pytest.raises(ModelLoadError, match="3 key and value heads cannot be divided among 4 ranks"):
        Shard(0, 4).kv_heads_of(3)


@pytest.mark.parametrize(("rank", "size"), [(1, 1), (-1, 2), (0, 0)])
def test_a_rank_that_there_is_not_is_refused(rank: int, size: int) -> None:
    with pytest.raises(InvalidSetting, match=f"no rank {rank} of {size}"):
        Shard(rank, size)


@pytest.mark.parametrize(("num_layers", "num_stages"), [(4, 1), (5, 2), (7, 3), (4, 4)])
def test_stages_have_all_layers_and_the_first_ones_one_more(num_layers: int, num_stages: int) -> None:
    stages = [Shard(0, 1, stage, num_stages).layers_of(num_layers) for stage in range(num_stages)]
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    assert [len(stage) for stage in stages] == sorted(map(len, stages), reverse=True)
    assert len(stages[0]) - len(stages[-1]) <= 1
    with pytest.raises(ModelLoadError, match="layers cannot be divided among 9 stages"):
        Shard(0, 1, 0, 9).layers_of(num_layers)


def test_the_driver_is_the_first_rank_of_the_last_stage() -> None:
    shards = [Shard.of_process(number, 2, 3) for number in range(6)]
    assert [(shard.stage, shard.rank) for shard in shards] == [(2, 0), (2, 1), (0, 0), (0, 1), (1, 0), (1, 1)]
    assert [shard.is_last_stage for shard in shards] == [True, True, False, False, False, False]
    assert Shard.of_process(0, 1, 1) == WHOLE
    with pytest.raises(InvalidSetting, match="no stage 2 of 2"):
        Shard(0, 1, 2, 2)


def test_heads_become_rows() -> None:
    assert scaled(range(2, 4), 16) == range(32, 64)
