"""The parts of this half for real, small: processes are started, asked and ended."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from bench.limits.system import system_limits

from bench.limits.isolation import ARRANGEMENTS, IsolationPlan, isolation_ratio, measure_isolation
from bench.limits.result import Ratio
from bench.limits.settings import LimitsSettings
from bench.targets.process_tree import descendants
from wire.errors import RequestFailed


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before, cores = descendants(os.getpid()), os.sched_getaffinity(0)
    yield
    assert [process.pid for process in descendants(os.getpid())] == [process.pid for process in before]
    assert os.sched_getaffinity(0) == cores


def quick(only: str) -> LimitsSettings:
    return LimitsSettings(quick=True, only=only)


def ignore(text: str) -> None:
    """See `say`."""


def named(ratios: list[Ratio]) -> set[str]:
    assert all(ratio.low <= ratio.high for ratio in ratios)
    return {ratio.name for ratio in ratios}


def test_only_what_is_wanted_is_measured() -> None:
    heard: list[str] = []
    ceilings, ratios = system_limits(quick("zmq_round_trip,kv_overhead_us"), heard.append)
    assert [(ceiling.name, ceiling.value > 0) for ceiling in ceilings] == [("zmq round trip", True)]
    assert named(ratios) == {"kv_overhead_us"}
    assert not any("starting" in text for text in heard)


def test_only_the_cores_that_were_given_are_used() -> None:
    core = min(os.sched_getaffinity(0))
    seen: list[set[int]] = []
    settings = LimitsSettings(quick=True, only="zmq_round_trip", cores=str(core))
    (ceiling,), _ = system_limits(settings, lambda _: seen.append(os.sched_getaffinity(0)))
    assert seen == [{core}]
    assert "any cores" in ceiling.note


def test_the_handoff_is_measured_in_a_real_system() -> None:
    ceilings, ratios = system_limits(quick("exposed_ratio,handover_us"), ignore)
    assert (ceilings, named(ratios)) == ([], {"exposed_ratio", "handover_us"})
    assert all(ratio.value > 0 for ratio in ratios if ratio.name == "handover_us")


def test_isolation_is_measured_in_a_real_system() -> None:
    plan = IsolationPlan("", 32, num_rounds=1, phase_s=0.05, ready_timeout_s=50.0, arrangements=ARRANGEMENTS[1:2])
    (samples,) = measure_isolation(plan, ignore)
    ratio = isolation_ratio(samples)
    assert (ratio.name, ratio.case) == ("itl_isolation", "colocated")
    assert ratio.value > 0
    assert samples.ttft_ms


def test_an_error_in_the_middle_ends_the_processes() -> None:
    def fail(text: str) -> None:
        assert len(descendants(os.getpid())) >= 2
        raise RequestFailed(f"{text}: as the test says")

    with pytest.raises(RequestFailed, match="1 requests at once: as the test says"):
        system_limits(quick("router_us_per_token"), fail)
