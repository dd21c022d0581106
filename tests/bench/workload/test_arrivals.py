from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean, pvariance

import pytest

from baton.bench.serve.arrivals import RampStrategy, from_trace, poisson_or_gamma, ramp
from baton.bench.workload.dataset_settings import Prompt
from baton.wire.errors import InvalidSetting

NUM = 3000
RATE = 8.0
SHAPES = [0.25, 1.0, 4.0]


def gaps(arrivals: Sequence[float]) -> list[float]:
    return [arrivals[0], *(after - before for before, after in pairwise(arrivals))]


def stamped(*stamps: float | None) -> list[Prompt]:
    return [Prompt((1,), "", 1, stamp) for stamp in stamps]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("burstiness", SHAPES)
def test_gaps_are_distributed_as_asked(burstiness: float, seed: int) -> None:
    drawn = gaps(poisson_or_gamma(NUM, RATE, burstiness, seed))
    assert fmean(drawn) == pytest.approx(1 / RATE)
    assert pvariance(drawn) == pytest.approx(1 / burstiness / RATE**2, rel=0.25)


@pytest.mark.parametrize("num", [1, 2, 7, NUM])
@pytest.mark.parametrize("burstiness", [0.01, 1.0, 3.0, math.inf])
def test_the_last_arrives_exactly_at_the_end_and_none_goes_back(num: int, burstiness: float) -> None:
    arrivals = poisson_or_gamma(num, 3.0, burstiness, seed=5)
    assert len(arrivals) == num
    assert arrivals[-1] == num / 3.0
    assert arrivals[0] >= 0
    assert list(arrivals) == sorted(arrivals)


@pytest.mark.parametrize(
    ("strategy", "rates"), [("linear", [1.0, 4.75, 8.5, 12.25, 16.0]), ("exponential", [1.0, 2.0, 4.0, 8.0, 16.0])]
)
def test_a_ramp_goes_from_rate_to_rate_by_index(strategy: RampStrategy, rates: list[float]) -> None:
    assert gaps(ramp(5, 1.0, 16.0, strategy, math.inf, seed=0)) == pytest.approx([1 / rate for rate in rates])


def test_stamps_are_kept_from_the_first_on_and_scaled() -> None:
    assert from_trace(stamped(2.0, 2.0, 3.5, 8.0), 1.0) == (0.0, 0.0, 1.5, 6.0)
    assert from_trace(stamped(2.0, 2.0, 3.5, 8.0), 0.5) == (0.0, 0.0, 0.75, 3.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: poisson_or_gamma(1, 1.0, 1.0, -1), "--seed -1 is not at least 0"),
        (lambda: from_trace(stamped(0.0), 0.0), "--time-scale 0.0 is not above 0"),
        (lambda: from_trace(stamped(0.0), math.inf), "--time-scale inf is not above 0 and finite"),
        (lambda: from_trace(stamped(None), 1.0), "this dataset has no time stamps"),
        (lambda: from_trace(stamped(2.0, 1.0), 1.0), "not in order"),
    ],
)
def test_what_cannot_be_made_is_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        make()
