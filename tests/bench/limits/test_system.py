"""The parts of this half for real, small: processes are started, asked and ended."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from baton.bench.kv.measure import Case
from baton.bench.limits.command import kv_ratios, system_limits
from baton.bench.limits.result import Found, LimitsSettings
from baton.bench.targets.process import descendants
from baton.wire.errors import RequestFailed


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before, cores = {process.pid for process in descendants(os.getpid())}, os.sched_getaffinity(0)
    yield
    assert {process.pid for process in descendants(os.getpid())} <= before
    assert os.sched_getaffinity(0) == cores


def measured(only: str, say: Callable[[str], None] = lambda _: None, **more: Any) -> Found:
    found = Found()
    system_limits(LimitsSettings(quick=True, only=only, **more), found, say)
    assert all(ratio.low <= ratio.high for ratio in found.ratios)
    return found


def test_only_what_is_wanted_is_measured() -> None:
    heard: list[str] = []
    found = measured("zmq_round_trip,kv_overhead_us", heard.append)
    assert [(ceiling.name, ceiling.value > 0) for ceiling in found.ceilings] == [("zmq round trip", True)]
    assert {ratio.name for ratio in found.ratios} == {"kv_overhead_us"}
    assert not any("starting" in text for text in heard)


def test_only_the_cores_that_were_given_are_used() -> None:
    core = min(os.sched_getaffinity(0))
    seen: list[set[int]] = []
    found = measured("zmq_round_trip", lambda _: seen.append(os.sched_getaffinity(0)), cores=str(core))
    assert seen == [{core}]
    assert "any cores" in found.ceilings[0].note


def test_the_handoff_is_measured_in_a_real_system() -> None:
    found = measured("exposed_ratio,handover_us")
    assert [ratio.name for ratio in found.ratios] == ["exposed_ratio", "handover_us"]
    assert found.ratios[1].value > 0


def test_an_error_in_the_middle_ends_the_processes() -> None:
    def fail(text: str) -> None:
        assert len(descendants(os.getpid())) >= 2
        raise RequestFailed(f"{text}: as the test says")

    with pytest.raises(RequestFailed, match="1 requests at once: as the test says"):
        measured("router_us_per_token", fail)


def test_rates_of_handoffs_are_compared_and_times_subtracted() -> None:
    case = Case("shm", "xxh3", 2**20, 8, memcpy_s=[0.001, 0.001], wall_s=[0.002, 0.004], let_go_s=[0.003])
    rate, overhead = kv_ratios(case)
    assert (rate.name, rate.case) == ("kv_bw_ratio", "8 blocks of 1024 KiB")
    assert rate.value == pytest.approx(1 / 3)
    assert (rate.low, rate.high) == pytest.approx((0.25, 0.5))
    assert (overhead.name, overhead.unit) == ("kv_overhead_us", "us")
    assert overhead.value == pytest.approx(2000)
