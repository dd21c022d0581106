from __future__ import annotations

import pytest

from baton.bench.numbers import median, number, paired_ratio, percent, percentile, rate, size, span


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "-"), (0, "0.00"), (1.234, "1.23"), (9.999, "10.0"), (12.34, "12.3"), (99.97, "100"), (6474.2, "6,474")],
)
def test_three_digits_matter(value: float | None, shown: str) -> None:
    assert number(value) == shown


@pytest.mark.parametrize(
    ("share", "shown"), [(None, "-"), (0, "0 %"), (0.004, "0.4 %"), (0.58, "58 %"), (0.996, "99.6 %"), (1, "100 %")]
)
def test_nearly_all_is_not_all(share: float | None, shown: str) -> None:
    assert percent(share) == shown


def test_ranges_ratios_and_sizes() -> None:
    assert span((1.0, 20.0)) == "1.00 to 20.0"
    assert span((1.0, 1.001)) == "1.00"
    assert span(None) == ""
    assert [rate(value) for value in (0.456, 1.823, 19.34, 120.4)] == ["0.46", "1.82", "19.3", "120"]
    assert size(24 * 2**30) == "24 GiB"


def test_percentiles_lie_between_the_nearest_values() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert median(values) == 2.5
    assert percentile(values, 0) == 1.0
    assert percentile(values, 100) == 4.0
    assert percentile(values, 99) == pytest.approx(3.97)
    assert percentile([7.0], 99) == 7.0


def test_values_that_were_not_measured_in_turns_have_no_ratio() -> None:
    with pytest.raises(ValueError, match="shorter"):
        paired_ratio([1.0, 2.0], [1.0])
