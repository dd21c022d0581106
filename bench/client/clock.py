"""Waiting for a moment of `time.monotonic()`, on any event loop."""

from __future__ import annotations

import asyncio
import time

_TIMER_STEP_S = 0.001


async def sleep_until(due_s: float) -> None:
    """Return at `due_s` or up to a timer step after it, never before. Other tasks get a turn even when it is past."""
    await asyncio.sleep(0)
    left_s = due_s - time.monotonic()
    while left_s > 0:
        # loops round a delay to their timers' step, some of them down: there may be a rest that is less than a step
        await asyncio.sleep(max(left_s, _TIMER_STEP_S))
        left_s = due_s - time.monotonic()
