"""Whether the client itself was the bottleneck: its processor time, how late its event loop runs, how late it sends.

Knows nothing of requests but when they should have been sent and when they were.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.client.clock import sleep_until
from bench.client.outcome import Outcome
from bench.stats import percentile

LATE_S = 0.010
_PERIOD_S = 0.020


@dataclass(frozen=True, slots=True)
class ClientFigures:
    """`cpu_share` 1.0 is one core. `num_late`: requests sent more than 10 ms after they should have been."""

    cpu_s: float
    wall_s: float
    cpu_share: float
    loop_lag_p50_ms: float
    loop_lag_p99_ms: float
    loop_lag_max_ms: float
    num_late: int
    max_in_flight: int


class SelfCheck:
    """Watches this process and this event loop while a load runs. Async context manager, used once."""

    def __init__(self) -> None:
        self._lags_s = array("d")
        self._num_in_flight = 0
        self._max_in_flight = 0
        self._begin_s = self._begin_cpu_s = 0.0

    async def __aenter__(self) -> SelfCheck:
        self._begin_s, self._begin_cpu_s = time.monotonic(), time.process_time()
        self._sampler = asyncio.create_task(self._sample(), name="loop-lag")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._sampler.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._sampler

    @contextlib.contextmanager
    def in_flight(self) -> Iterator[None]:
        """Around one request."""
        self._num_in_flight += 1
        self._max_in_flight = max(self._max_in_flight, self._num_in_flight)
        try:
            yield
        finally:
            self._num_in_flight -= 1

    def figures(self, outcomes: Sequence[Outcome]) -> ClientFigures:
        """From the beginning until this call."""
        wall_s, cpu_s = time.monotonic() - self._begin_s, time.process_time() - self._begin_cpu_s
        lags_ms = [lag_s * 1e3 for lag_s in self._lags_s] or [0.0]
        return ClientFigures(
            cpu_s=cpu_s,
            wall_s=wall_s,
            cpu_share=cpu_s / wall_s,
            loop_lag_p50_ms=percentile(lags_ms, 50),
            loop_lag_p99_ms=percentile(lags_ms, 99),
            loop_lag_max_ms=max(lags_ms),
            num_late=sum(outcome.sent_s - outcome.scheduled_s > LATE_S for outcome in outcomes),
            max_in_flight=self._max_in_flight,
        )

    async def _sample(self) -> None:
        while True:
            due_s = time.monotonic() + _PERIOD_S
            await sleep_until(due_s)
            self._lags_s.append(time.monotonic() - due_s)
