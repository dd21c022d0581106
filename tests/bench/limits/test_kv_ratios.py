from __future__ import annotations

import pytest
from bench.limits.kv_ratios import kv_ratios

from bench.kv.measure import Case


def test_rates_are_compared_and_times_subtracted() -> None:
    case = Case("shm", "xxh3", 2**20, 8, memcpy_s=[0.001, 0.001], wall_s=[0.002, 0.004], let_go_s=[0.003])
    rate, overhead = kv_ratios(case)
    assert (rate.name, rate.case) == ("kv_bw_ratio", "8 blocks of 1024 KiB")
    assert rate.value == pytest.approx(1 / 3)
    assert (rate.low, rate.high) == pytest.approx((0.25, 0.5))
    assert (overhead.name, overhead.unit) == ("kv_overhead_us", "us")
    assert overhead.value == pytest.approx(2000)
