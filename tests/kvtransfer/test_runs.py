from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.runs import ByteRun, Run, coalesce, head_runs, heads_of
from wire.layout import KvLayout, LayerKv

_MOVES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=40)


@given(_MOVES, st.integers(1, 8))
def test_runs_cover_exactly_the_moves(moves: list[tuple[int, int]], max_count: int) -> None:
    runs = coalesce([source for source, _ in moves], [target for _, target in moves], max_count)
    said = [(run.source + step, run.target + step) for run in runs for step in range(run.count)]
    assert said == moves
    assert all(1 <= run.count <= max_count for run in runs)


@given(_MOVES)
def test_adjacent_moves_are_joined(moves: list[tuple[int, int]]) -> None:
    runs = coalesce([source for source, _ in moves], [target for _, target in moves], max_count=1000)
    for run, following in pairwise(runs):
        follows_on = following.source == run.source + run.count and following.target == run.target + run.count
        assert not follows_on


def test_neighbours_on_one_side_only_are_not_a_run() -> None:
    assert coalesce([1, 2, 3], [7, 8, 4], max_count=8) == [Run(1, 7, 2), Run(3, 4, 1)]
    assert coalesce([1, 2, 4], [7, 8, 9], max_count=8) == [Run(1, 7, 2), Run(4, 9, 1)]


def test_long_runs_are_cut() -> None:
    assert coalesce(range(5), range(10, 15), max_count=2) == [Run(0, 10, 2), Run(2, 12, 2), Run(4, 14, 1)]


# --- heads of different ranks ----------------------------------------------------------------------------------------

_NUM_HEADS = 8
_MODEL = KvLayout.of_layers("float16", 2, [LayerKv(num_kv_heads=_NUM_HEADS, head_dim=4)] * 3)


def block_of(heads: range, model: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint8]:
    """The bytes of a rank's block, cut from the whole model's block [L, 2, H, S, D]."""
    return np.ascontiguousarray(model[:, :, heads.start : heads.stop]).view(np.uint8).reshape(-1)


@pytest.mark.parametrize("num_targets", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("num_sources", [1, 2, 4, 8, 16])
def test_every_rank_gets_its_heads_from_the_ranks_that_hold_them(num_sources: int, num_targets: int) -> None:
    shape = (_MODEL.num_layers, 2, _NUM_HEADS, _MODEL.block_size, 4)
    model = np.random.default_rng(3).integers(0, 2**16, shape, dtype=np.uint16)
    for target_rank in range(num_targets):
        target_heads = heads_of(target_rank, num_targets, _NUM_HEADS)
        expected = block_of(target_heads, model)
        target = np.zeros_like(expected)
        for source_rank in range(num_sources):
            source_heads = heads_of(source_rank, num_sources, _NUM_HEADS)
            source = block_of(source_heads, model)
            for run in head_runs(_MODEL, source_heads, target_heads):
                target[run.target : run.target + run.num_bytes] = source[run.source : run.source + run.num_bytes]
        assert (target == expected).all()


def test_equal_ranks_exchange_a_block_as_one_run() -> None:
    heads = heads_of(1, 4, 8)
    assert head_runs(_MODEL, heads, heads) == [ByteRun(0, 0, _MODEL.block_bytes // 4)]
    assert head_runs(_MODEL, range(8), range(8)) == [ByteRun(0, 0, _MODEL.block_bytes)]


def test_ranks_without_a_common_head_exchange_nothing() -> None:
    assert head_runs(_MODEL, heads_of(0, 4, 8), heads_of(3, 4, 8)) == []


def test_a_run_for_each_layer_and_each_of_keys_and_values() -> None:
    runs = head_runs(_MODEL, range(8), heads_of(1, 2, 8))
    assert [run.num_bytes for run in runs] == [4 * 2 * 4 * 2] * 6
    assert runs[1] == ByteRun(source=64 * 2 + 64, target=64, num_bytes=64)


@pytest.mark.parametrize(("rank", "num_ranks", "num_heads"), [(0, 3, 8), (4, 4, 8), (-1, 4, 8), (0, 12, 8)])
def test_splits_that_do_not_divide_are_refused(rank: int, num_ranks: int, num_heads: int) -> None:
    with pytest.raises(ValueError, match=r"rank"):
        heads_of(rank, num_ranks, num_heads)
