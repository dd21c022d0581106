from __future__ import annotations

from pathlib import Path

import pytest
from bench.limits.receivers import Received
from bench.limits.router_path import RouterPlan, RouterSamples, Way, measure_router_path, router_ratios
from bench.limits.router_process import RouterProcess


def samples() -> RouterSamples:
    """Two rounds of two requests of three tokens: 500 us through the router, 100 without, the last token later."""
    found = RouterSamples(2, 3, cpu_s=[0.006, 0.012])
    for _ in range(2):
        made_s = [10.1, 10.2]
        for way, late_s in ((found.routed, 500e-6), (found.direct, 100e-6)):
            first_s = 10.0 + 2 * late_s
            way.add([Received(10.0, [first_s, 10.1 + late_s, 10.2 + late_s]) for _ in range(2)], made_s)
    return found


def test_a_token_counts_from_its_step_and_the_first_from_its_request() -> None:
    way = Way()
    way.add([Received(1.0, [1.5, 2.25, 3.5])], [2.0, 3.0])
    assert way.first_us == [[pytest.approx(0.5e6)]]
    assert way.token_us == [[pytest.approx(0.25e6), pytest.approx(0.5e6)]]


def test_a_missing_token_is_no_measurement() -> None:
    with pytest.raises(ValueError, match="zip"):
        Way().add([Received(1.0, [1.5, 2.25])], [2.0, 3.0])


def test_the_router_costs_what_the_bare_way_does_not() -> None:
    found = {(ratio.name, ratio.case): ratio for ratio in router_ratios(samples())}
    for percent in (50, 99):
        assert found["router_us_per_token", f"concurrency 2, p{percent}"].value == pytest.approx(400)
        assert found["router_ttft_us", f"concurrency 2, p{percent}"].value == pytest.approx(800)
    cpu = found["router_cpu_s_per_1000_tokens", "concurrency 2"]
    assert (cpu.low, cpu.value, cpu.high) == pytest.approx((1.0, 1.5, 2.0))


def test_a_real_router_passes_every_token_on() -> None:
    plan = RouterPlan(concurrencies=(1, 3), num_rounds=2, num_tokens=12, interval_s=0.005, num_prompt_tokens=20)
    found = measure_router_path(plan, lambda _: None)
    assert [each.concurrency for each in found] == [1, 3]
    for each in found:
        for way in (each.routed, each.direct):
            assert [len(of_round) for of_round in way.token_us] == [each.concurrency * 11] * 2
            assert min(map(min, way.token_us + way.first_us)) > 0
        assert min(each.cpu_s) > 0


def test_the_router_process_ends_with_its_context() -> None:
    with RouterProcess() as router:
        pid = router.pid
        assert Path(f"/proc/{pid}").exists()
        before_s = router.cpu_s()
    assert before_s > 0
    assert not Path(f"/proc/{pid}").exists()
