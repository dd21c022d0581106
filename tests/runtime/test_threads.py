from __future__ import annotations

import threading
from unittest import mock

from baton.runtime.threads import StartedThreads


def test_a_pool_that_was_started_starts_no_thread_when_work_comes() -> None:
    with StartedThreads(3, "pool") as pool:
        pool.start()
        with mock.patch.object(threading.Thread, "start", side_effect=MemoryError):
            together = threading.Barrier(3)
            assert len({each.result(10) for each in [pool.submit(together.wait, 10) for _ in range(3)]}) == 3
