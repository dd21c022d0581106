from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from baton.kvtransfer.runs import Run, coalesce

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
