"""How late the event loop runs what is due: the one measure of whether one request makes the others wait.

Owns a timer that is due every `SAMPLE_S` and notes how much later it was run. What makes it late is work that does not
give way: that of the loop itself, which is the part that its thread's processor time covers, or other threads and
programs. Lives on one event loop.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate

from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from baton.runtime.watchdog import Beat

SAMPLE_S = 0.02
_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


class LoopLag(Collector):
    """Samples the lag of the event loop, in seconds, from `start` to `stop`. Its metrics are a histogram, and the worst
    since the start."""

    def __init__(self) -> None:
        self.worst_s = 0.0
        self.worst_own_s = 0.0
        self._cpu_s = 0.0
        self._counts = [0] * (len(_BUCKETS) + 1)
        self._sum_s = 0.0
        self._beat: Beat | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self, beat: Beat | None = None) -> None:
        """Begin to sample the running loop, which `beat` is of."""
        self._beat = beat
        self._cpu_s = time.thread_time()
        self._schedule(asyncio.get_running_loop())

    def stop(self) -> None:
        """End sampling."""
        if self._timer is not None:
            self._timer.cancel()

    def collect(self) -> Iterable[Metric]:
        """The lags as a histogram, the worst one, and the worst that the loop itself was to blame for."""
        bounds = [*map(floatToGoString, _BUCKETS), "+Inf"]
        buckets = [*zip(bounds, accumulate(self._counts), strict=True)]
        doc = "How late the event loop ran a timer"
        yield HistogramMetricFamily("baton:event_loop_lag_seconds", doc, buckets, self._sum_s)
        yield GaugeMetricFamily("baton:event_loop_lag_max_seconds", f"{doc}, at worst", self.worst_s)
        own = f"{doc} because of the loop's own work, at worst"
        yield GaugeMetricFamily("baton:event_loop_own_lag_max_seconds", own, self.worst_own_s)

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        due_s = loop.time() + SAMPLE_S
        self._timer = loop.call_at(due_s, self._sample, loop, due_s)

    def _sample(self, loop: asyncio.AbstractEventLoop, due_s: float) -> None:
        lag_s = max(0.0, loop.time() - due_s)
        self._counts[bisect_left(_BUCKETS, lag_s)] += 1
        self._sum_s += lag_s
        self.worst_s = max(self.worst_s, lag_s)
        cpu_s = time.thread_time()
        self.worst_own_s = max(self.worst_own_s, min(lag_s, cpu_s - self._cpu_s))
        self._cpu_s = cpu_s
        if self._beat is not None:
            self._beat.touch()
        self._schedule(loop)
