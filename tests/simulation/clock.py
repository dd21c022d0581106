"""Virtual time: a clock that jumps to whatever is due next, and an asyncio event loop that runs on it.

Owns the order of everything that happens in a simulation. Nothing here sleeps, and nothing reads the time of the
machine, so a schedule with the same seed happens in the same way again.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from typing import Any


class VirtualClock:
    """The time in seconds, and what is to happen when. What is due at the same moment happens in the order in which it
    was asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self.num_asked = 0

    def __call__(self) -> float:
        """The time, as `time.monotonic` gives it."""
        return self.now_s

    def at(self, when_s: float, happen: Callable[[], None]) -> None:
        """Let something happen then."""
        self.num_asked += 1
        heapq.heappush(self._due, (when_s if when_s > self.now_s else self.now_s, self.num_asked, happen))

    def after(self, delay_s: float, happen: Callable[[], None]) -> None:
        """Let something happen so many seconds from now."""
        self.at(self.now_s + delay_s, happen)

    def step(self) -> bool:
        """Jump to what is due next, and let it happen. False when nothing is."""
        if not self._due:
            return False
        self.now_s, _, happen = heapq.heappop(self._due)
        happen()
        return True


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop whose time is a `VirtualClock`. Whoever owns it calls `run_due` when `next_s` has come.

    A descriptor is readable as ZMQ's are: once for what has come, and not any more as soon as its socket was used. The
    order of things is that of `BaseEventLoop`, without its waiting: descriptors, then timers, then what was ready.
    """

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock
        self._ready: deque[asyncio.Handle]
        self._scheduled: list[asyncio.TimerHandle]
        self._timer_cancelled_count: int
        self._clock_resolution = 1e-9
        self.errors: list[BaseException] = []
        self.signalled: set[int] = set()
        self._readers: dict[int, tuple[Callable[..., None], tuple[Any, ...]]] = {}
        self.set_exception_handler(self._note_error)

    def time(self) -> float:
        """See `AbstractEventLoop.time`."""
        return self._clock.now_s

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        """See `AbstractEventLoop.add_reader`."""
        self._readers[fd] = (callback, args)

    def remove_reader(self, fd: Any) -> bool:
        """See `AbstractEventLoop.remove_reader`."""
        return self._readers.pop(fd, None) is not None

    @property
    def next_s(self) -> float | None:
        """When `run_due` has something to do; None for never."""
        if self._ready or (self.signalled and not self.signalled.isdisjoint(self._readers)):
            return self._clock.now_s
        scheduled = self._scheduled
        while scheduled and scheduled[0]._cancelled:
            self._drop_timer()
        return scheduled[0].when() if scheduled else None

    @property
    def num_timers(self) -> int:
        """Timers that wait."""
        return sum(not handle.cancelled() for handle in self._scheduled)

    def run_due(self) -> None:
        """Run everything that is due now, and what follows from it at once."""
        ready, scheduled, now_s = self._ready, self._scheduled, self._clock.now_s
        asyncio._set_running_loop(self)
        try:
            while True:
                if self.signalled:
                    self._call_readers()
                while scheduled and (scheduled[0]._cancelled or scheduled[0].when() <= now_s):
                    timer = self._drop_timer()
                    if not timer._cancelled:
                        ready.append(timer)
                if not ready:
                    return
                for _ in range(len(ready)):
                    handle = ready.popleft()
                    if not handle._cancelled:
                        handle._run()
        finally:
            asyncio._set_running_loop(None)

    def _drop_timer(self) -> asyncio.TimerHandle:
        timer = heapq.heappop(self._scheduled)
        self._timer_cancelled_count -= timer._cancelled
        timer._scheduled = False  # type: ignore[attr-defined]
        return timer

    def _call_readers(self) -> None:
        for fd in [fd for fd in self._readers if fd in self.signalled]:
            self.signalled.remove(fd)
            callback, args = self._readers[fd]
            self.call_soon(callback, *args)

    def run_in(self, call: Callable[[], Any]) -> Any:
        """Call something as code of this loop."""
        asyncio._set_running_loop(self)
        try:
            return call()
        finally:
            asyncio._set_running_loop(None)

    def _note_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.errors.append(context.get("exception") or RuntimeError(context["message"]))
