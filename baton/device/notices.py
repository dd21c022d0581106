"""The notice thread, behind `Device.notify`: it makes calls once the device has reached a point in its work.

Owns the notices that wait, at most `MAX_NOTICES`, and their order. Knows no device, only events to wait for.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from baton.device.base import STEP_TIMEOUT_S, DeviceFailed
from baton.device.events import Event

MAX_NOTICES = 4096
_CLOSE_S = 5.0


class NoticeThread:
    """Makes the calls it was given, in order, each when its event is passed. When one fails, no later one is made.

    `begin` is called once, on the thread.
    """

    def __init__(self, begin: Callable[[], None]) -> None:
        self._begin = begin
        self._waiting: queue.Queue[tuple[Event, Callable[[], None]] | None] = queue.Queue(MAX_NOTICES)
        self._failure: BaseException | None = None
        self._num_added = 0
        self._num_called = 0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="device-notices", daemon=True)
        self._thread.start()

    def add(self, event: Event, call: Callable[[], None]) -> None:
        """Add a call; only the engine's thread may. Raises `DeviceFailed` when `MAX_NOTICES` wait."""
        try:
            self._waiting.put_nowait((event, call))
        except queue.Full:
            raise DeviceFailed(f"{MAX_NOTICES} notices wait for the device") from None
        self._num_added += 1

    def settle(self, timeout_s: float) -> None:
        """Wait until every call that was added has returned. Raises `DeviceFailed`."""
        with self._changed:
            is_done = self._changed.wait_for(
                lambda: self._failure is not None or self._num_called == self._num_added, timeout_s
            )
        if self._failure is not None:
            raise DeviceFailed(f"a notice of the device could not be given: {self._failure}") from self._failure
        if not is_done:
            raise DeviceFailed(f"notices of the device did not come within {timeout_s:g} s")

    def close(self) -> None:
        """End the thread after the calls that it still has."""
        if self._thread.is_alive() and self._failure is None:
            self._waiting.put(None, timeout=_CLOSE_S)
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        try:
            self._begin()
            while (notice := self._waiting.get()) is not None:
                event, call = notice
                event.wait(STEP_TIMEOUT_S)
                call()
                with self._changed:
                    self._num_called += 1
                    self._changed.notify_all()
        except BaseException as error:  # `settle` raises it, since no caller is above this thread
            with self._changed:
                self._failure = error
                self._changed.notify_all()
