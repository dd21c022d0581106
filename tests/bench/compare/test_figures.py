from __future__ import annotations

import pytest

from baton.bench.compare.verdict import ratios_of
from baton.bench.runs import Ratio, Run
from tests.bench.compare.results import run

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
    assert ttft.verdict.endswith("faster")
    assert found["output_throughput"].verdict.endswith("more")
    assert found["slo_attainment"].verdict == "no verdict: there is no difference"


def test_the_control_is_noise() -> None:
    control = [run("a", number, value) for number, value in enumerate((100, 104, 250), 1)]
    found = ratios([*REFERENCE, *SUBJECT], control)["median_ttft_ms"]
    assert found.noise == pytest.approx(250 / 101 - 1)
    assert not found.is_clear


def test_a_target_that_drops_requests_is_not_called_faster() -> None:
    failing = [run("b", number, 50, failed=3, completed=17, attainment=0.5) for number in (1, 2, 3)]
    found = ratios([*REFERENCE, *failing], [])
    assert found["median_ttft_ms"].verdict == "no verdict: 9 of 60 requests to b failed"
    assert found["slo_attainment"].verdict == "2.00x (2.00 - 2.00) less"
