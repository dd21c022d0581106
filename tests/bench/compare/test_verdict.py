from __future__ import annotations

import math
import random

import pytest

from baton.bench.compare.verdict import compare, ratios_of
from baton.bench.runs import Comparison, Ratio, Run
from tests.bench.compare.results import run

SPEED = ("slower", "faster")
NUM_SIMULATED = 300


def test_a_clear_difference_is_said() -> None:
    found = compare([50, 52, 48], [100, 104, 101], [98, 105, 100], SPEED)
    assert (found.is_clear, found.verdict) == (True, "faster")
    assert found.ratio == pytest.approx(50 / 101)
    assert (found.low, found.high) == (48 / 101, 0.5)
    assert compare([100, 104, 101], [50, 52, 48], [50, 51, 49], SPEED).verdict == "slower"


def test_a_difference_within_the_noise_of_either_target_is_no_verdict() -> None:
    assert compare([110, 118, 100.1], [100, 100, 100], [], SPEED).verdict == "within noise of 18%"
    assert compare([110, 110, 110], [100, 100, 84.75], [], SPEED).verdict == "within noise of 18%"
    assert compare([150, 150, 90], [100, 100, 100], [], SPEED).verdict == "rounds disagree"
    both = compare([110, 118, 108], [100, 100, 95], [], SPEED)
    assert both.noise == pytest.approx(math.hypot(10 / 108, 5 / 95))
    assert not both.is_clear


def test_a_difference_within_that_of_the_reference_to_itself_is_no_verdict() -> None:
    assert compare([110, 110, 110], [100, 100, 100], [], SPEED).is_clear
    assert compare([110, 110, 110], [100, 100, 100], [100, 101, 99], SPEED).is_clear
    again = compare([110, 110, 110], [100, 100, 100], [100, 85, 100], SPEED)
    assert again.verdict == "within noise of 18%"


@pytest.mark.parametrize("has_control", [True, False])
@pytest.mark.parametrize("sigma", [0.01, 0.3])
@pytest.mark.parametrize("drift", [0.0, 0.5])
def test_two_equal_targets_are_rarely_called_different(sigma: float, drift: float, has_control: bool) -> None:
    found = _simulate(1.0, sigma, drift, has_control)
    assert sum(one.is_clear for one in found) < 0.05 * NUM_SIMULATED


def _simulate(factor: float, sigma: float, drift: float, has_control: bool) -> list[Comparison]:
    """Comparisons of three rounds: noise of each value, and one factor a round that all values of the round share."""
    chance = random.Random(7)

    def simulate() -> Comparison:
        rounds = [chance.lognormvariate(0, drift) for _ in range(3)]

        def draw(mean: float) -> list[float]:
            return [mean * shared * chance.lognormvariate(0, sigma) for shared in rounds]

        return compare(draw(factor), draw(1.0), draw(1.0) if has_control else [], SPEED)

    return [simulate() for _ in range(NUM_SIMULATED)]


REFERENCE = [run("a", number, value) for number, value in enumerate((100, 104, 101), 1)]
SUBJECT = [run("b", number, value) for number, value in enumerate((50, 52, 48), 1)]


def ratios(runs: list[Run], control: list[Run]) -> dict[str, Ratio]:
    return {ratio.metric: ratio for ratio in ratios_of(("a", "b"), runs, control)}


def test_ratios_are_against_the_first_target_round_by_round() -> None:
    found = ratios([*SUBJECT[::-1], *REFERENCE], [])
    ttft = found["median_ttft_ms"]
    assert (ttft.target, ttft.against, ttft.rate) == ("b", "a", 1.0)
    assert ttft.ratio == pytest.approx(50 / 101)
    assert ttft.high == 0.5
    assert ttft.verdict == "faster"
    assert found["output_throughput"].verdict == "more"
    assert found["slo_attainment"].verdict == "equal"


def test_the_control_is_noise() -> None:
    control = [run("a", number, value) for number, value in enumerate((100, 104, 250), 1)]
    found = ratios([*REFERENCE, *SUBJECT], control)["median_ttft_ms"]
    assert found.noise == pytest.approx(250 / 101 - 1)
    assert not found.is_clear


def test_a_target_that_drops_requests_is_not_called_faster() -> None:
    failing = [run("b", number, 50, failed=3, completed=17, attainment=0.5) for number in (1, 2, 3)]
    found = ratios([*REFERENCE, *failing], [])
    assert found["median_ttft_ms"].verdict == "9 of 60 requests to b failed"
    assert found["slo_attainment"].verdict == "less"
