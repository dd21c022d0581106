from __future__ import annotations

import asyncio
import time

from baton.bench.client.driver import SelfCheck
from baton.bench.client.outcome import Outcome


async def test_a_loop_that_is_held_up_is_seen() -> None:
    async with SelfCheck() as check:
        await asyncio.sleep(0)
        time.sleep(0.2)  # noqa: ASYNC251 - what is measured
        await asyncio.sleep(0.001)
        figures = check.figures([])
    assert figures.loop_lag_max_ms > 150
    assert figures.loop_lag_p50_ms <= figures.loop_lag_p99_ms <= figures.loop_lag_max_ms


async def test_late_is_more_than_ten_milliseconds() -> None:
    delays_s = (0.0, 0.009, 0.011, 0.5)
    outcomes = [Outcome(0, 0, "", 100.0, sent_s=100.0 + delay_s) for delay_s in delays_s]
    async with SelfCheck() as check:
        assert check.figures(outcomes).num_late == 2
