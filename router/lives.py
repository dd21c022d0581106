"""One life of the router after the other, each forked from a process that has prepared everything.

Whoever prepares has imported all modules and loaded the tokenizers, listens with inherited sockets and does nothing
else, so there is nothing in it that could fail. When a life ends that was not told to, the next begins in the time that
it takes to open its sockets, and memory is shared until it is written. Owns the signals of the process that waits.

Invariants: a life does not outlive this process. One that ended within `SHORTEST_LIFE_S`, and the `MAX_SHORT_LIVES`-th
in a row that ended within `STABLE_AFTER_S`, is not followed by another here, but ends this process with its status:
whoever supervises it decides when to try again.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from types import FrameType

from baton.runtime.child import describe_end
from baton.runtime.tether import die_with

SHORTEST_LIFE_S = 1.0
STABLE_AFTER_S = 30.0
MAX_SHORT_LIVES = 5
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_log = logging.getLogger(__name__)


class Lives:
    """Forks one life after the other, and waits for its end. To be used on the main thread, before there is any
    other."""

    def __init__(self, run: Callable[[], int]) -> None:
        """`run` is one life; it returns an exit status."""
        self._run = run
        self._pid = 0
        self._is_stopping = False

    def run(self) -> int:
        """Live until told to stop; the exit status."""
        gc.freeze()  # so that a look for garbage does not write to what is shared
        for number in _SIGNALS:
            signal.signal(number, self._pass_on)
        num_short = 0
        while True:
            begun_s = time.monotonic()
            status = self._live()
            age_s = time.monotonic() - begun_s
            num_short = num_short + 1 if age_s < STABLE_AFTER_S else 0
            has_failed = age_s < SHORTEST_LIFE_S or num_short >= MAX_SHORT_LIVES
            if status == 0 or self._is_stopping or has_failed:
                return status if status >= 0 else 128 - status
            _log.error("the router %s: the next one begins", describe_end(status))

    def _live(self) -> int:
        """One life; its exit status, -N after signal N."""
        parent = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        self._pid = os.fork()
        if not self._pid:
            self._begin(parent)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        _, status = os.waitpid(self._pid, 0)
        self._pid = 0
        return os.waitstatus_to_exitcode(status)

    def _begin(self, parent: int) -> None:
        """The life itself. Does not return."""
        status = 1
        try:
            for number in _SIGNALS:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            die_with(parent)
            status = self._run()
        except BaseException:  # the edge of this process: nothing above it may run twice
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._is_stopping |= number != signal.SIGHUP
        if self._pid:
            os.kill(self._pid, number)
