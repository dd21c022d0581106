from __future__ import annotations

import pytest
import torch

from baton.engine.models.parameters import Box, Parameter, Source, whole


def parameter(shape: tuple[int, ...], *regions: Box) -> Parameter:
    """Filled by one tensor for each region, of just its shape."""
    sources = []
    for number, region in enumerate(regions):
        sizes = tuple(map(len, region))
        sources.append(Source(f"tensor {number}", sizes, whole(sizes), region))
    return Parameter("weight", torch.empty(shape), tuple(sources))


ROWS, LEFT, RIGHT = range(4), range(2), range(2, 6)


@pytest.mark.parametrize(
    "regions",
    [
        [(ROWS, range(6))],
        [(ROWS, RIGHT), (ROWS, LEFT)],
        [(range(1), range(6)), (range(1, 4), LEFT), (range(1, 4), RIGHT)],
        [(ROWS, range(6)), (range(0), range(6))],
    ],
)
def test_regions_that_lie_side_by_side_cover_a_parameter(regions: list[Box]) -> None:
    assert parameter((4, 6), *regions).is_covered


@pytest.mark.parametrize(
    "regions",
    [
        [],
        [(ROWS, LEFT)],
        [(ROWS, range(6)), (range(3, 4), range(5, 6))],
        [(ROWS, LEFT), (ROWS, range(1, 6))],
        # as many elements as there are, but some twice and some never
        [(ROWS, LEFT), (ROWS, LEFT), (ROWS, LEFT)],
        [(ROWS, range(7))],
        [(range(-1, 4), range(6))],
    ],
)
def test_gaps_overlaps_and_what_lies_outside_are_noticed(regions: list[Box]) -> None:
    assert not parameter((4, 6), *regions).is_covered


@pytest.mark.parametrize(
    ("shape", "taken"),
    [((6,), (range(6),)), ((8, 6), (range(4, 8), range(6))), ((4, 8), (ROWS, range(2, 8)))],
    ids=["repeated", "rows", "columns"],
)
def test_a_piece_may_be_taken_and_repeated(shape: tuple[int, ...], taken: Box) -> None:
    source = Source("tensor", shape, taken, (ROWS, range(6)))
    assert Parameter("weight", torch.empty(4, 6), (source,)).is_covered


@pytest.mark.parametrize(
    ("shape", "taken"),
    [((4, 5), whole((4, 5))), ((6,), (range(1, 7),)), ((4, 6), (range(3), range(6)))],
    ids=["narrow", "not-there", "short"],
)
def test_a_piece_of_another_size_does_not_cover(shape: tuple[int, ...], taken: Box) -> None:
    source = Source("tensor", shape, taken, (ROWS, range(6)))
    assert not Parameter("weight", torch.empty(4, 6), (source,)).is_covered
