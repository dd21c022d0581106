"""Stopping: SIGTERM and SIGINT ask a program to finish what it has, a second one to end now."""

from __future__ import annotations

import signal
import socket
import time
from types import FrameType


class Stopper:
    """Turns signals into a flag, a deadline and a readable socket. Install it on the main thread."""

    def __init__(self, timeout_s: float) -> None:
        self.is_asked = False
        self.wakeup, self._signal = socket.socketpair()
        self.wakeup.setblocking(False)
        self._signal.setblocking(False)
        self._timeout_s = timeout_s
        self._deadline_s = 0.0

    def install(self) -> None:
        """Take over SIGTERM and SIGINT of this process."""
        signal.set_wakeup_fd(self._signal.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    def ask(self) -> None:
        """As one signal does."""
        self._deadline_s = 0.0 if self.is_asked else time.monotonic() + self._timeout_s
        self.is_asked = True

    def is_overdue(self, now_s: float) -> bool:
        """Whether the time to finish is over."""
        return self.is_asked and now_s >= self._deadline_s

    def drain(self) -> None:
        """Empty the wake-up socket."""
        try:
            while self.wakeup.recv(64):
                pass
        except BlockingIOError:
            return

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.ask()
