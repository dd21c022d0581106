from __future__ import annotations

import asyncio
import time

from baton.bench.client.driver import SelfCheck, sleep_until
from baton.bench.client.outcome import Outcome


async def test_work_of_the_client_itself_is_seen() -> None:
    async with SelfCheck() as idle:
        await sleep_until(time.monotonic() + 0.2)
        figures_idle = idle.figures([])
    async with SelfCheck() as busy:
        end_s = time.process_time() + 0.2
        while time.process_time() < end_s:
            pass
        figures_busy = busy.figures([])
    assert figures_busy.cpu_s >= 0.2
    assert figures_busy.cpu_share == figures_busy.cpu_s / figures_busy.wall_s
    assert figures_idle.cpu_share < figures_busy.cpu_share / 2


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


async def test_nobody_wakes_too_early() -> None:
    for delay_s in (-1.0, 0.0, 0.0001, 0.0015, 0.02):
        due_s = time.monotonic() + delay_s
        await sleep_until(due_s)
        assert time.monotonic() >= due_s
