from __future__ import annotations

import pytest

from baton.wire.errors import InvalidSetting
from baton.wire.kv_shard import WHOLE_BLOCK, KvDivision, KvShard, own_layout
from baton.wire.layout import STATE, KvLayout, LayerKv

_DIVISIONS = [KvDivision(num_ranks, num_stages) for num_ranks in (1, 2, 4, 8) for num_stages in (1, 2, 3)]


@pytest.mark.parametrize("division", _DIVISIONS)
@pytest.mark.parametrize("num_heads", [1, 2, 8])
def test_ranks_have_every_layer_once_and_every_head_as_often_as_needed(division: KvDivision, num_heads: int) -> None:
    held = [
        (layer, head) for share in division.shards for layer in share.layers_of(7) for head in share.heads_of(num_heads)
    ]
    copies = division.num_copies(num_heads)
    assert sorted(held) == sorted([(layer, head) for layer in range(7) for head in range(num_heads)] * copies)
    assert [len(share.heads_of(num_heads)) for share in division.shards] == [
        max(1, num_heads // division.num_ranks)
    ] * len(division.shards)


def test_a_rank_has_a_block_of_its_heads_and_layers() -> None:
    layout = KvLayout.of_layers("float16", 4, [LayerKv(4, 8), LayerKv(2, 8, 16), LayerKv(4, 8)])
    own = own_layout(layout, KvShard(1, 0, KvDivision(2, 2)))
    assert own == KvLayout.of_layers("float16", 4, [LayerKv(2, 8), LayerKv(1, 8, 16)])
    assert own_layout(layout, WHOLE_BLOCK) is layout
    state, half = LayerKv(5, 32, None, STATE, 60), LayerKv(5, 16, None, STATE, 30)
    assert (state.num_input_rows, half.num_input_rows) == (3, 3)
    states = KvLayout.of_layers("float16", 4, [LayerKv(2, 8), state])
    assert own_layout(states, KvShard(1, 0, KvDivision(2))).layers == (LayerKv(1, 8), half)


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="3 key and value heads cannot be divided among 2 ranks"):
        KvShard(0, 0, KvDivision(2)).heads_of(3)
    states = KvLayout.of_layers("float16", 4, [LayerKv(1, 8), LayerKv(1, 9, kind=STATE)])
    with pytest.raises(InvalidSetting, match="states of 9 channels cannot be divided among 2 ranks"):
        own_layout(states, KvShard(0, 0, KvDivision(2)))
