"""Parts of a block between nodes of any two divisions: every byte that a rank needs comes once, from where it is."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from baton.kvtransfer.parts import ByteRun, part_runs
from baton.kvtransfer.pools import dot64
from baton.kvtransfer.pools.cut import StrandTotals, WholeChecksums, sink_of, source_of
from baton.kvtransfer.pools.host import HostPool
from baton.wire.kv_shard import WHOLE_BLOCK, KvDivision, KvShard, own_layout
from baton.wire.layout import LATENT, STATE, KvLayout, LayerKv
from tests.kvtransfer.late_stream import late_pool

_DIVISIONS = [KvDivision(num_ranks, num_stages) for num_ranks in (1, 2, 4, 8) for num_stages in (1, 2)]
_PAIRS = list(itertools.product(_DIVISIONS, _DIVISIONS))
_NUM_BLOCKS = 5
_LAYOUTS = {
    "a head for each of 8 ranks": [LayerKv(8, 2)] * 3,
    "fewer heads than ranks": [LayerKv(2, 4)] * 3,
    "latents": [LayerKv(1, 6, kind=LATENT)] * 2,
    "two kinds": [LayerKv(4, 2), LayerKv(1, 4), LayerKv(4, 2)],
    "convolutions": [LayerKv(8, 2), LayerKv(2, 32, kind=STATE), LayerKv(2, 32, kind=STATE)],
    "delta nets": [LayerKv(6, 32, kind=STATE, num_carried=80), LayerKv(8, 10), LayerKv(8, 10)],
}


def layout_of(layers: Sequence[LayerKv]) -> KvLayout:
    return KvLayout.of_layers("float16", 2, layers)


def cut(layout: KvLayout, shard: KvShard, blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """What a rank stores of whole blocks, layer by layer: the definition that the plan is compared with."""
    found, begin = [], 0
    for number, kv in enumerate(layout.layers):
        end = begin + layout.layer_bytes(kv)
        if number in shard.layers_of(layout.num_layers):
            if kv.kind == STATE:
                found.append(cut_state(kv, own_layout(layout, shard), shard, blocks[:, begin:end]))
            else:
                layer = blocks[:, begin:end].reshape(len(blocks), kv.num_planes, kv.num_kv_heads, -1)
                heads = shard.heads_of(kv.num_kv_heads)
                found.append(layer[:, :, heads.start : heads.stop].reshape(len(blocks), -1))
        begin = end
    return np.ascontiguousarray(np.concatenate(found, axis=1))


def cut_state(kv: LayerKv, own: KvLayout, shard: KvShard, state: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The channels and matrices of a rank, filled up."""
    (mine,) = {each for each in own.layers if each.kind == STATE}
    rows = state[:, : 2 * kv.elements_per_token].reshape(len(state), kv.num_kv_heads, -1)
    width, size, num_rows = 2 * mine.head_dim, 2 * mine.num_carried, kv.num_input_rows
    inputs = rows[:, :num_rows, shard.rank * width : (shard.rank + 1) * width].reshape(len(state), -1)
    carried = rows[:, num_rows:].reshape(len(state), -1)[:, shard.rank * size : (shard.rank + 1) * size]
    found = np.zeros((len(state), own.layer_bytes(mine)), dtype=np.uint8)
    found[:, : inputs.shape[1] + size] = np.concatenate((inputs, carried), axis=1)
    return found


def blocks_of(layout: KvLayout) -> npt.NDArray[np.uint8]:
    """Noise; zero where states are filled up."""
    blocks = np.random.default_rng(3).integers(0, 256, (_NUM_BLOCKS, layout.block_bytes), dtype=np.uint8)
    for kv, end in zip(layout.layers, layout.layer_ends, strict=True):
        if kv.kind == STATE:
            num_used = kv.num_input_rows * kv.head_dim + kv.num_carried
            blocks[:, end - layout.layer_bytes(kv) + 2 * num_used : end] = 0
    return blocks


@pytest.mark.parametrize("name", _LAYOUTS)
def test_every_byte_of_every_rank_comes_once_from_a_rank_that_has_it(name: str) -> None:
    layout = layout_of(_LAYOUTS[name])
    whole = blocks_of(layout)
    for sources, target in [(sources, shard) for sources, targets in _PAIRS for shard in targets.shards]:
        expected = cut(layout, target, whole)
        assert expected.shape[1] == own_layout(layout, target).block_bytes
        pool, written = HostPool(np.zeros_like(expected)), np.zeros(expected.shape[1], dtype=int)
        for source, runs in part_runs(layout, sources, target).items():
            moved = source_of(HostPool(cut(layout, source, whole)), runs).outlet(2).lend([4, 1, 2])
            payload = np.concatenate([np.asarray(frame) for frame in moved.frames])
            sink_of(pool, runs).write([4, 1, 2], payload)
            for run in runs:
                written[run.target : run.target + run.num_bytes] += 1
        assert ((written == 1) | (expected == 0).all(axis=0)).all(), (sources, target)
        assert written.max() == 1, (sources, target)
        assert (pool.memory[[4, 1, 2]] == expected[[4, 1, 2]]).all(), (sources, target)
        assert not pool.memory[[0, 3]].any(), (sources, target)


def test_ranks_that_have_the_same_head_send_it_to_different_ranks() -> None:
    layout = layout_of([LayerKv(1, 2)])
    senders = [source.rank for target in KvDivision(4).shards for source in part_runs(layout, KvDivision(2), target)]
    assert senders == [0, 1, 0, 1]


def test_equal_ranks_exchange_their_block_as_it_is() -> None:
    layout, division = layout_of([LayerKv(8, 2)] * 3), KvDivision(4, 2)
    for shard in division.shards:
        num_bytes = own_layout(layout, shard).block_bytes
        assert part_runs(layout, division, shard) == {shard: [ByteRun(0, 0, num_bytes)]}
    pool = HostPool(np.zeros((2, layout.block_bytes), dtype=np.uint8))
    assert source_of(pool, [ByteRun(0, 0, layout.block_bytes)]) is pool


@pytest.mark.parametrize("division", _DIVISIONS)
@pytest.mark.parametrize("name", _LAYOUTS)
def test_what_ranks_add_up_is_the_checksum_of_the_whole_block(name: str, division: KvDivision) -> None:
    layout = layout_of(_LAYOUTS[name])
    whole = blocks_of(layout)
    pools = {shard: HostPool(cut(layout, shard, whole)) for shard in division.shards}
    block_ids = [3, 0]

    def values() -> list[int]:
        sums = {shard: StrandTotals(pool, layout, shard) for shard, pool in pools.items()}
        totals = {shard: each.begin(block_ids).take() or () for shard, each in sums.items()}
        return WholeChecksums(layout, division).values(len(block_ids), totals)

    right = [dot64.Dot64(layout.block_bytes).checksum(whole[block]) for block in block_ids]
    assert values() == right
    for pool in pools.values():  # one byte of any rank, also where another rank has the same head
        pool.memory[3, 1] ^= 4
        assert [found == wanted for found, wanted in zip(values(), right, strict=True)] == [False, True]
        pool.memory[3, 1] ^= 4


def test_heads_that_are_no_whole_words_cannot_be_added_up() -> None:
    layout = KvLayout.of_layers("float16", 1, [LayerKv(2, 3)])
    shard = KvShard(1, 0, KvDivision(2))
    with pytest.raises(ValueError, match="whole words"):
        StrandTotals(HostPool(np.zeros((1, 12), dtype=np.uint8)), layout, shard)
    assert StrandTotals(HostPool(np.zeros((1, 24), dtype=np.uint8)), layout, WHOLE_BLOCK).begin([0]).take() == [0]


def test_parts_of_blocks_on_a_device_that_is_late_are_there_when_they_are_read_or_settled() -> None:
    layout, (target, *_) = layout_of(_LAYOUTS["delta nets"]), KvDivision(2).shards
    whole = blocks_of(layout)
    runs = part_runs(layout, KvDivision(), target)[WHOLE_BLOCK]
    expected, memory = cut(layout, target, whole), np.zeros_like(cut(layout, target, whole))
    source, sink = source_of(late_pool(whole.copy()), runs), sink_of(late_pool(memory), runs)
    payload = np.empty((1, source.block_bytes), dtype=np.uint8)
    for block in range(_NUM_BLOCKS):  # more writes than may be in flight
        source.read([block], payload)
        sink.write([block], payload)
        payload[:] = 0
    sink.settle()
    assert (memory == expected).all()
    totals = StrandTotals(late_pool(memory), layout, target).begin([3, 0])
    while (found := totals.take()) is None:
        pass
    assert [each % 2**64 for each in found] == StrandTotals(HostPool(memory), layout, target).begin([3, 0]).take()


@pytest.mark.parametrize("num_word_bytes", [1, 2, 4, 8])
def test_parts_on_a_device_are_cut_at_any_byte(num_word_bytes: int) -> None:
    whole = np.random.default_rng(1).integers(0, 256, (3, 8 * num_word_bytes), dtype=np.uint8)
    runs = [ByteRun(place * num_word_bytes, place * num_word_bytes, num_word_bytes) for place in (1, 5)]
    payload, memory = np.empty((2, 2 * num_word_bytes), dtype=np.uint8), np.zeros_like(whole)
    source_of(late_pool(whole.copy()), runs).read([2, 0], payload)
    sink = sink_of(late_pool(memory), runs)
    sink.write([0, 1], payload)
    sink.settle()
    kept = np.zeros_like(whole[0])
    for run in runs:
        kept[run.source : run.source + run.num_bytes] = 255
    assert (memory == np.stack([whole[2] & kept, whole[0] & kept, 0 * kept])).all()
