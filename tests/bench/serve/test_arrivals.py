from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean, pvariance
from typing import Any

import pytest

from baton.bench.serve.arrivals import RampStrategy, arrivals_of, from_trace, poisson_or_gamma, process_of, ramp
from baton.bench.serve.settings import ServeBenchSettings
from baton.bench.workload.dataset_settings import DatasetSettings, Prompt
from baton.wire.errors import InvalidSetting

PROMPTS = [Prompt((1, 2), "", 4, arrival_s) for arrival_s in (10.0, 11.0, 13.0)]
RAMP = {"ramp_up_strategy": "linear", "ramp_up_start_rps": 1.0, "ramp_up_end_rps": 2.0}


@pytest.mark.parametrize(
    ("changes", "dataset_name", "process"),
    [
        ({}, "random", "all at once"),
        ({"max_concurrency": 4}, "random", "closed loop"),
        ({"request_rate": 2.0}, "random", "poisson"),
        ({"request_rate": 2.0, "max_concurrency": 4}, "random", "poisson"),
        ({"request_rate": 2.0, "arrival": "constant"}, "random", "constant"),
        ({}, "mooncake", "trace"),
        ({"max_concurrency": 4}, "azure", "closed loop"),
        ({"max_concurrency": 4, "arrival": "trace"}, "azure", "trace"),
        ({"request_rate": 2.0}, "azure", "poisson"),
        (RAMP, "mooncake", "ramp"),
    ],
)
def test_the_process_follows_from_what_is_asked(changes: dict[str, Any], dataset_name: str, process: str) -> None:
    assert process_of(ServeBenchSettings(**changes), DatasetSettings(dataset_name=dataset_name)) == process


@pytest.mark.parametrize(
    "changes",
    [{"arrival": "trace", "request_rate": 2.0}, {"arrival": "constant"}, {"arrival": "constant", "max_concurrency": 2}],
)
def test_settings_that_contradict_each_other_are_an_error(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting, match="--arrival"):
        process_of(ServeBenchSettings(**changes), DatasetSettings())


def test_every_process_gives_each_prompt_its_time() -> None:
    def offsets(name: str, **changes: Any) -> tuple[float, ...] | None:
        dataset = DatasetSettings(dataset_name=name, time_scale=0.5)
        return arrivals_of(ServeBenchSettings(**changes), dataset, PROMPTS)[0]

    assert offsets("random") == (0.0, 0.0, 0.0)
    assert offsets("random", max_concurrency=2) is None
    assert offsets("random", request_rate=2.0, arrival="constant") == (0.5, 1.0, 1.5)
    assert offsets("mooncake") == (0.0, 0.5, 1.5)
    assert (offsets("random", request_rate=2.0) or ())[-1] == pytest.approx(1.5)
    assert len(offsets("random", **RAMP) or ()) == 3


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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: from_trace(stamped(None), 1.0), "this dataset has no time stamps"),
        (lambda: from_trace(stamped(2.0, 1.0), 1.0), "not in order"),
    ],
)
def test_what_cannot_be_made_is_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        make()
