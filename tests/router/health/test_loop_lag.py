"""The router says how late its event loop is."""

from __future__ import annotations

import asyncio
import time

from prometheus_client import CollectorRegistry

from baton.router.health.loop_lag import SAMPLE_S, LoopLag


async def test_work_that_does_not_give_way_is_lag() -> None:
    lag = LoopLag()
    registry = CollectorRegistry()
    registry.register(lag)
    lag.start()
    await asyncio.sleep(SAMPLE_S * 2)
    time.sleep(0.3)  # noqa: ASYNC251
    await asyncio.sleep(SAMPLE_S * 3)
    lag.stop()
    assert lag.worst_s >= 0.3 - SAMPLE_S
    assert registry.get_sample_value("baton:event_loop_lag_max_seconds") == lag.worst_s
    count = registry.get_sample_value("baton:event_loop_lag_seconds_count")
    below = registry.get_sample_value("baton:event_loop_lag_seconds_bucket", {"le": "0.2"})
    assert count is not None
    assert below is not None
    assert count > below
    assert lag.worst_own_s < 0.2  # it slept: another program could have had the processor
