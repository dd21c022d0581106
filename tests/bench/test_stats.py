from __future__ import annotations

import pytest

from bench.stats import PairedRatio, median, paired_ratio, percentile, spread


def test_percentiles_lie_between_the_nearest_values() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert median(values) == 2.5
    assert percentile(values, 0) == 1.0
    assert percentile(values, 100) == 4.0
    assert percentile(values, 99) == pytest.approx(3.97)
    assert percentile([7.0], 99) == 7.0


def test_no_values_have_no_percentile() -> None:
    with pytest.raises(ValueError, match="needs values"):
        median([])


def test_a_ratio_is_of_medians_and_its_range_of_pairs() -> None:
    assert paired_ratio([1.0, 2.0, 9.0], [2.0, 4.0, 10.0]) == PairedRatio(0.5, 0.5, 0.9)


def test_values_that_were_not_measured_in_turns_have_no_ratio() -> None:
    with pytest.raises(ValueError, match="shorter"):
        paired_ratio([1.0, 2.0], [1.0])


def test_one_outlier_in_twenty_is_no_spread() -> None:
    assert spread([10.0] * 19 + [100.0]) == 0
    assert spread([8.0, 9.0, 10.0, 11.0, 12.0]) == pytest.approx(0.32)
