"""Stopping: the first SIGTERM or SIGINT asks a program to finish its requests, the second one to end now.

The router may ask it to finish, too; then the first signal changes nothing.
"""

from __future__ import annotations

import signal
import socket
import time
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopper:
    """Turns signals into a flag, a deadline and a readable socket.

    A context manager, to be entered on the main thread: within it, SIGTERM and SIGINT of this process come here.
    """

    def __init__(self, timeout_s: float) -> None:
        self.is_asked = False
        self.stays_away = False
        """Whether the router wants that nobody starts this program again."""
        self._num_signals = 0
        self.wakeup, self._signal = socket.socketpair()
        self.wakeup.setblocking(False)
        self._signal.setblocking(False)
        self._timeout_s = timeout_s
        self._deadline_s = 0.0

    def __enter__(self) -> Stopper:
        self._wakeup_before = signal.set_wakeup_fd(self._signal.fileno(), warn_on_full_buffer=False)
        self._handlers_before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self.wakeup.close()
        self._signal.close()

    def is_overdue(self, now_s: float) -> bool:
        """Whether the time to finish is over."""
        return self.is_asked and now_s >= self._deadline_s

    def time_left_s(self, now_s: float) -> float:
        """The seconds until it has to end, once it was asked to."""
        return self._deadline_s - now_s

    def ask(self, now_s: float, *, starts_again: bool) -> None:
        """Ask to finish, as the first signal does."""
        self.stays_away = not starts_again
        if not self.is_asked:
            self.is_asked, self._deadline_s = True, now_s + self._timeout_s

    def drain(self) -> None:
        """Empty the wake-up socket."""
        try:
            while self.wakeup.recv(64):
                pass
        except BlockingIOError:
            return

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._num_signals += 1
        if self._num_signals > 1:
            self._deadline_s = 0.0
        elif not self.is_asked:
            self._deadline_s = time.monotonic() + self._timeout_s
        self.is_asked = True
