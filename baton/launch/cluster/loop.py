"""The thread in which a controller runs, and the two questions that others ask it: how is it, and please stop.

Owns the thread, the pace, and what happens when a round fails: it is logged, counted and shown, and the next round
comes. Invariants: only this thread touches the controller; a status is a whole one, of the end of a round.
"""

from __future__ import annotations

import dataclasses
import logging
import threading

from baton.launch.cluster.controller import Controller
from baton.launch.cluster.status import Status

TICK_S = 1.0
_log = logging.getLogger(__name__)


class ControllerLoop:
    """Runs `controller` from its construction until everything has been taken down. `tick_s` lies between rounds."""

    def __init__(self, controller: Controller, tick_s: float = TICK_S) -> None:
        self._controller = controller
        self._tick_s = tick_s
        self._status = controller.status()
        self._num_errors = 0
        self._is_stop_asked = threading.Event()
        self._thread = threading.Thread(target=self._run, name="controller", daemon=True)
        self._thread.start()

    def status(self) -> Status:
        """The status as of the last round."""
        return self._status

    def stop(self) -> None:
        """Take everything down. Returns at once."""
        self._is_stop_asked.set()

    def join(self, timeout_s: float) -> bool:
        """Whether everything was taken down within `timeout_s`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        pause = threading.Event()
        while not self._status.is_over:
            problem = ""
            try:
                if self._is_stop_asked.is_set():
                    self._controller.stop()
                self._controller.tick()
            except Exception as error:  # the edge of the loop: what fails now may work in the next round
                self._num_errors += 1
                problem = f"the last round failed: {error}"
                _log.exception("a round of the controller failed")
            status = self._controller.status()
            self._status = dataclasses.replace(status, num_errors=self._num_errors, problem=problem or status.problem)
            pause.wait(self._tick_s)
