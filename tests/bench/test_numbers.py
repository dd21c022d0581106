from __future__ import annotations

import pytest

from bench.numbers import number, percent, rate, size, span


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
