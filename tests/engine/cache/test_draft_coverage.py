"""Which tokens have draft KV: what is told of a use of a block holds for all who have it, until it is taken anew."""

from __future__ import annotations

import pytest

from baton.engine.cache.block_pool import BlockPool
from baton.engine.cache.draft_coverage import DraftCoverage


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(6)


@pytest.fixture
def coverage(pool: BlockPool) -> DraftCoverage:
    return DraftCoverage(pool, 4)


def test_nothing_is_covered_at_first(pool: BlockPool, coverage: DraftCoverage) -> None:
    assert coverage.of(pool.allocate(3), 10) == 0


def test_tokens_are_covered_as_far_as_they_were_filled_one_after_another(
    pool: BlockPool, coverage: DraftCoverage
) -> None:
    table = pool.allocate(3)
    for first, end in ((0, 3), (3, 4), (4, 10)):
        coverage.fill(table, first, end)
        assert coverage.of(table, 12) == end
    assert [coverage.of(table, most) for most in (0, 2, 4, 9)] == [0, 2, 4, 9]


def test_who_shares_a_block_has_what_is_in_it(pool: BlockPool, coverage: DraftCoverage) -> None:
    table = pool.allocate(3)
    coverage.fill(table, 0, 12)
    assert coverage.of([*table[:2], *pool.allocate(1)], 12) == 8


def test_a_block_that_is_taken_anew_has_nothing(pool: BlockPool, coverage: DraftCoverage) -> None:
    table = pool.allocate(6)
    coverage.fill(table, 0, 24)
    pool.release(table)
    assert coverage.of(pool.allocate(6), 24) == 0


def test_a_hole_ends_what_is_covered(pool: BlockPool, coverage: DraftCoverage) -> None:
    table = pool.allocate(3)
    coverage.fill(table, 8, 12)
    assert coverage.of(table, 12) == 0


def test_blocks_that_others_read_cannot_be_filled(pool: BlockPool, coverage: DraftCoverage) -> None:
    table = pool.allocate(3)
    assert coverage.can_fill(table, 0, 12)
    coverage.is_read = {table[1]}.__contains__
    ranges = ((0, 4), (0, 5), (7, 9), (8, 12), (4, 8))
    assert [coverage.can_fill(table, *each) for each in ranges] == [True, False, False, True, False]
