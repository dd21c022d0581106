"""What grows in each life is told from what differs between lives, and how sure that is."""

from __future__ import annotations

import random

import pytest

from tests.soak.slopes import MIN_SAMPLES, Slope, pooled_slope


def life(begins_at: float, hourly: float, num_samples: int = 20, noise: float = 0.0) -> list[tuple[float, float]]:
    """One sample a minute."""
    rng = random.Random(begins_at)
    return [(60.0 * n, begins_at + hourly * n / 60 + rng.gauss(0.0, noise)) for n in range(num_samples)]


def slope_of(*lives: list[tuple[float, float]]) -> Slope:
    slope = pooled_slope(lives)
    assert slope is not None
    return slope


def test_what_grows_alike_in_each_life_is_found_although_the_lives_begin_elsewhere() -> None:
    slope = slope_of(life(500.0, 6.0), life(100.0, 6.0), life(300.0, 6.0))
    assert (slope.hourly, slope.low, slope.high) == pytest.approx((6.0, 6.0, 6.0))


def test_more_lives_make_surer_and_the_truth_lies_within() -> None:
    one = slope_of(life(1.0, 2.0, noise=1.0))
    many = slope_of(*(life(number, 2.0, noise=1.0) for number in range(20)))
    assert many.low < 2.0 < many.high
    assert many.high - many.low < (one.high - one.low) / 2


def test_what_was_held_for_a_moment_counts_for_nothing() -> None:
    flat = life(10.0, 0.0)
    flat[-1] = (flat[-1][0], 1e9)
    assert slope_of(flat).hourly == 0.0


def test_a_short_life_says_nothing() -> None:
    short = life(0.0, 100.0, MIN_SAMPLES - 1)
    assert pooled_slope([short]) is None
    assert slope_of(short, life(0.0, 1.0)).hourly == pytest.approx(1.0)
