from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.bench.documents import SweepPoint
from baton.bench.sweep.command import MAX_DOUBLINGS, MAX_HALVINGS, SweepSettings, goodput_rate, next_rate

SEARCH = SweepSettings(attainment=0.9, start_rate=1.0, precision=0.1)
MOST_POINTS = MAX_DOUBLINGS + 8


def point(rate: float, attainment: float) -> SweepPoint:
    return SweepPoint(rate, attainment, [attainment], {})


def search(attainment_of: Callable[[float], float], setting: SweepSettings = SEARCH) -> list[SweepPoint]:
    points: list[SweepPoint] = []
    while (rate := next_rate(setting, points)) is not None:
        points.append(point(rate, attainment_of(rate)))
        assert len(points) <= MOST_POINTS
    return points


@pytest.mark.parametrize("capacity", [0.07, 0.7, 1.0, 5.3, 64.0, 900.0])
def test_the_highest_good_rate_is_found_to_the_precision(capacity: float) -> None:
    points = search(lambda rate: 1.0 if rate <= capacity else 0.5)
    found = goodput_rate(SEARCH, points)
    assert found is not None
    assert found <= capacity < found * 1.1 * 1.01


def test_a_server_that_is_never_good_enough_or_always_ends_the_search() -> None:
    never, always = search(lambda _: 0.0), search(lambda _: 1.0)
    assert goodput_rate(SEARCH, never) is None
    assert min(point.rate for point in never) == 2.0**-MAX_HALVINGS
    assert goodput_rate(SEARCH, always) == 2.0**MAX_DOUBLINGS


def test_a_lucky_pass_above_a_failure_does_not_count() -> None:
    points = [point(1.0, 1.0), point(2.0, 0.8), point(4.0, 0.95)]
    assert goodput_rate(SEARCH, points) == 1.0
    assert next_rate(SEARCH, points) == 1.41


def test_given_rates_are_all_measured_whatever_they_show() -> None:
    setting = SweepSettings(rates=("4", "1,2"))
    points = search(lambda rate: 0.0 if rate == 2.0 else 1.0, setting)
    assert [point.rate for point in points] == [4.0, 1.0, 2.0]
    assert goodput_rate(setting, points) == 1.0


@given(st.lists(st.floats(0, 1), min_size=MOST_POINTS, max_size=MOST_POINTS))
def test_whatever_comes_back_the_search_ends_with_an_answer_that_its_points_bear_out(attained: list[float]) -> None:
    answers = iter(attained)
    points = search(lambda _: next(answers))
    found = goodput_rate(SEARCH, points)
    if found is None:
        assert min(points, key=lambda point: point.rate).attainment < 0.9
    else:
        assert all(point.attainment >= 0.9 for point in points if point.rate <= found)
