"""A pool of threads that are all there before the first work comes.

`ThreadPoolExecutor` starts a thread when work is handed in. CPython then waits for the new thread to say that it runs,
without a deadline; one that finds no memory says nothing, and whoever handed in the work stands for ever. On an event
loop that would be everybody.

Made before a fork and started after it: threads do not survive one.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

_START_S = 30.0


class StartedThreads(ThreadPoolExecutor):
    """A `ThreadPoolExecutor` whose threads all run once `start` was called. `num_threads`: None for the executor's
    default."""

    def __init__(self, num_threads: int | None, name: str) -> None:
        self._num_threads = num_threads or min(32, (os.cpu_count() or 1) + 4)
        super().__init__(self._num_threads, name)

    def start(self) -> None:
        """Start every thread, and wait until all of them run. Raises `BrokenBarrierError` when they do not."""
        all_run = threading.Barrier(self._num_threads + 1)
        for _ in range(self._num_threads):
            self.submit(all_run.wait, _START_S)
        all_run.wait(_START_S)
