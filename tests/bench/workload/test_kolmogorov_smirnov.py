from __future__ import annotations

import math

import pytest

from tests.bench.workload.kolmogorov_smirnov import critical_distance, largest_distance, lower_incomplete_gamma


@pytest.mark.parametrize("x", [0.001, 0.5, 1.0, 1.999, 2.001, 7.0, 30.0])
def test_the_incomplete_gamma_function_has_its_known_special_cases(x: float) -> None:
    assert lower_incomplete_gamma(1, x) == pytest.approx(1 - math.exp(-x), abs=1e-12)
    assert lower_incomplete_gamma(0.5, x) == pytest.approx(math.erf(math.sqrt(x)), abs=1e-12)
    assert lower_incomplete_gamma(2, x) == pytest.approx(1 - math.exp(-x) * (1 + x), abs=1e-12)


def test_the_largest_distance_is_on_the_side_where_it_is() -> None:
    assert largest_distance([0.5], lambda value: value) == 0.5
    assert largest_distance([0.1, 0.2], lambda value: value) == pytest.approx(0.8)
    assert largest_distance([0.8, 0.9], lambda value: value) == pytest.approx(0.8)


def test_the_critical_distance_is_the_one_of_the_tables() -> None:
    assert critical_distance(10_000, alpha=0.05) == pytest.approx(0.0136, abs=5e-5)
    assert critical_distance(10_000) == pytest.approx(0.0195, abs=5e-5)
