from __future__ import annotations

import pytest
from bench.limits.difference import difference_of


def test_a_difference_is_of_medians_and_its_range_of_pairs() -> None:
    found = difference_of("d", "case", [15.0, 18.0, 16.0], [10.0, 10.5, 10.2], unit="us", note="n")
    assert found.value == pytest.approx(16.0 - 10.2)
    assert (found.low, found.high) == pytest.approx((5.0, 7.5))
    assert (found.unit, found.goal, found.note, found.noisy) == ("us", "0", "n", False)


def test_an_unsteady_yardstick_makes_a_difference_noisy() -> None:
    found = difference_of("d", "case", [15.0, 15.0], [10.0, 13.0], unit="us")
    assert found.noisy
    assert "yardstick moved" in found.note


def test_a_yardstick_may_move_when_that_is_little_beside_the_difference() -> None:
    assert not difference_of("d", "case", [1000.0, 1000.0], [10.0, 13.0], unit="us").noisy


def test_a_steady_yardstick_may_be_as_large_as_it_is() -> None:
    """What moves is little beside the yardstick and much beside the difference: the pairs' range shows it."""
    assert not difference_of("d", "case", [1001.0, 1030.0], [1000.0, 1028.0], unit="us").noisy


def test_values_come_in_pairs() -> None:
    with pytest.raises(ValueError, match="zip"):
        difference_of("d", "case", [1.0], [1.0, 2.0], unit="us")
