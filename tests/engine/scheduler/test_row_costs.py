"""What rows cost: the staircase that was seen, a line where nothing was, and no memory of a single wrong time."""

from __future__ import annotations

import pytest

from baton.engine.scheduler.row_costs import MOST_ROWS, RowCosts


def staircase(num_rows: int) -> float:
    """Kernels of six rows a tile."""
    return 0.04 + 0.01 * (-(-num_rows // 6) - 1)


def test_before_any_step_a_row_more_is_taken_to_cost_little() -> None:
    costs = RowCosts()
    assert costs.seconds(2) < 1.2 * costs.seconds(1)
    assert costs.seconds(64) > 2 * costs.seconds(1)
    costs.learn(1, 0.04)
    assert costs.seconds(1) == pytest.approx(0.04)
    assert 0.04 < costs.seconds(4) < 0.06


def test_the_staircase_is_learned_where_steps_were_seen() -> None:
    costs = RowCosts()
    for _ in range(40):
        for rows in (1, 4, 6, 7, 12, 13):
            costs.learn(rows, staircase(rows))
    for rows in (1, 4, 6, 7, 12, 13):
        assert costs.seconds(rows) == pytest.approx(staircase(rows), rel=0.03)
    assert costs.seconds(6) - costs.seconds(1) < 0.2 * (costs.seconds(7) - costs.seconds(6))


def test_costs_never_fall_with_rows_and_go_on_behind_the_largest_seen() -> None:
    costs = RowCosts()
    for _ in range(20):
        for rows, seconds in ((1, 0.040), (2, 0.044), (3, 0.042), (8, 0.050)):
            costs.learn(rows, seconds)
    found = [costs.seconds(rows) for rows in range(1, 200)]
    assert found == sorted(found)
    assert costs.seconds(30) > costs.seconds(8) + 20 * 0.0005


def test_a_wrong_time_is_forgotten_although_its_number_of_rows_is_not_seen_again() -> None:
    costs = RowCosts()
    for _ in range(50):
        costs.learn(1, 0.04)
        costs.learn(8, 0.05)
    for _ in range(8):
        costs.learn(4, 5.0)
    assert costs.seconds(4) > 0.06
    for _ in range(600):
        costs.learn(1, 0.04)
        costs.learn(8, 0.05)
    assert costs.seconds(4) < 0.048


def test_steps_of_many_rows_teach_nothing() -> None:
    costs = RowCosts()
    costs.learn(MOST_ROWS + 1, 1.0)
    assert not costs.is_known
