"""How fast the machine is beside a campaign, so that no bound of it depends on who else computes.

Owns a process that ticks (`ticker`), what it has told, and how late the campaign's own event loop was, which stamps all
tokens and carries all proxies.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

_TICKER = str(Path(__file__).with_name("ticker.py"))
_MARGIN_S = 1.0
_LOOK_S = 0.02


class Pace:
    """What was measured. `add` and `add_lag` take measurements, in the order of time."""

    def __init__(self) -> None:
        self._told: list[tuple[float, float]] = []
        self._lags: list[tuple[float, float]] = []

    def add(self, moment_s: float, lost_s: float) -> None:
        """Until this moment, since the last one, so much was lost to others."""
        self._told.append((moment_s, lost_s))

    def add_lag(self, moment_s: float, late_s: float) -> None:
        """Here the event loop came so late."""
        self._lags.append((moment_s, late_s))

    def stretch(self, begun_s: float, ended_s: float) -> float:
        """How many times as long as on an idle machine things took in this time and a second before; 1 at least."""
        begun_s, whole_s, lost_s = begun_s - _MARGIN_S, 0.0, 0.0
        before_s = None
        for moment_s, each_s in self._told:
            if before_s is not None and moment_s > begun_s and before_s < ended_s:
                whole_s += moment_s - before_s
                lost_s += each_s
            before_s = moment_s
        return whole_s / max(whole_s - lost_s, 1e-3) if whole_s else 1.0

    def lag_s(self, begun_s: float, ended_s: float) -> float:
        """How late the event loop was in this time, in all."""
        return sum(late_s for moment_s, late_s in self._lags if begun_s < moment_s <= ended_s + _LOOK_S)


@contextlib.asynccontextmanager
async def measured(pace: Pace) -> AsyncIterator[None]:
    """Measure while the block runs."""
    command = (sys.executable, "-I", "-S", _TICKER)
    ticker = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    tasks = [asyncio.ensure_future(_listen(ticker, pace)), asyncio.ensure_future(_watch_loop(pace))]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(ProcessLookupError):
            ticker.kill()
        await ticker.wait()


async def _listen(ticker: asyncio.subprocess.Process, pace: Pace) -> None:
    assert ticker.stdout is not None
    async for line in ticker.stdout:
        moment_s, lost_s = map(float, line.split())
        pace.add(moment_s, lost_s)


async def _watch_loop(pace: Pace) -> None:
    while True:
        due_s = time.monotonic() + _LOOK_S
        await asyncio.sleep(_LOOK_S)
        now_s = time.monotonic()
        if now_s > due_s + _LOOK_S:
            pace.add_lag(now_s, now_s - due_s)
