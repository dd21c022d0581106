"""The watchdog of a program: it notices when a part of it stands, says so, and ends a program that cannot go on.

Owns one thread, which looks at named beats once a second. A part of the program that turns in a circle (a loop, a
thread) touches its beat each time round. One that has been still for a quarter of its limit is a `complaint`, which
health and metrics show; at its limit the program ends with one line in the log that names the part and where it stands,
so that whoever supervises it starts another one.

Time in which the watchdog itself did not run (the whole process was stopped, or the machine gave it no processor)
counts for no beat. A part that stands and holds the interpreter's lock lets nothing of Python run, this thread
included: that a small process beside this one notices (`interpreter_watchdog`), on Linux.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

EXIT_STATUS = 70
LOOK_INTERVAL_S = 1.0
INTERPRETER_WATCHDOG = Path(__file__).with_name("interpreter_watchdog.py")
_INTERPRETER_END_S = 3.0
_log = logging.getLogger(__name__)


class Beat:
    """One part of a program. It is watched from its first `touch` on, until it `rest`s."""

    def __init__(self, name: str, limit_s: float, clock: Callable[[], float]) -> None:
        self.name = name
        self.limit_s = limit_s
        self._clock = clock
        self._touched_s: float | None = None
        self._thread = 0

    def touch(self) -> None:
        """The part goes on. Always to be called on the same thread."""
        if self._touched_s is None:
            self._thread = threading.get_ident()
        self._touched_s = self._clock()

    def rest(self) -> None:
        """The part has ended, as it should."""
        self._touched_s = None

    def age_s(self, now_s: float) -> float:
        """The seconds for which the part has been still, at `now_s`."""
        touched_s = self._touched_s
        return 0.0 if touched_s is None else max(0.0, now_s - touched_s)

    def excuse(self, pause_s: float) -> None:
        """Do not count `pause_s` seconds as still."""
        touched_s = self._touched_s
        if touched_s is not None:
            self._touched_s = touched_s + pause_s

    def place(self) -> str:
        """The place of the part's thread in the code, as file, line and function."""
        frame = sys._current_frames().get(self._thread)
        if frame is None:
            return "its thread is gone"
        return f"in {Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"


class _InterpreterWatchdog:
    """The process that ends this one when its interpreter stands still. A program goes on without it where it cannot be
    started, or was killed: a line of the log says so."""

    def __init__(self, thread_id: int, limit_s: float) -> None:
        arguments = [str(INTERPRETER_WATCHDOG), str(os.getpid()), str(thread_id), f"{limit_s:g}"]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._pipe: IO[bytes] = self._process.stdin  # type: ignore[assignment]  # it was asked for
        os.set_blocking(self._pipe.fileno(), False)
        self._is_gone = False

    def beat(self) -> None:
        """The interpreter goes on."""
        if self._is_gone:
            return
        try:
            os.write(self._pipe.fileno(), b".")
        except OSError:
            self._is_gone = True
            _log.warning("nobody notices any more when the interpreter of this program stands still")

    def close(self) -> None:
        """The program ends."""
        self._pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_INTERPRETER_END_S)


def _interpreter_watchdog(thread_id: int, limit_s: float) -> _InterpreterWatchdog | None:
    if sys.platform != "linux":
        return None
    try:
        if not faulthandler.is_enabled():
            faulthandler.enable()
        return _InterpreterWatchdog(thread_id, limit_s)
    except (OSError, RuntimeError) as error:  # no process, or nowhere to write
        _log.warning("nobody will notice when the interpreter of this program stands still: %s", error)
        return None


class Watchdog(Collector):
    """Watches the parts of a program by the beats they touch. `end` gets the reason when the program cannot go on;
    `clock` is in seconds."""

    def __init__(self, end: Callable[[str], None] | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._end = end or end_process
        self._clock = clock
        self._beats: list[Beat] = []
        self._looked_s = clock()
        self._interpreter: _InterpreterWatchdog | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def beat(self, name: str, limit_s: float) -> Beat:
        """A part to watch. `limit_s`: how long it may be still, 0: for ever."""
        beat = Beat(name, limit_s or float("inf"), self._clock)
        self._beats.append(beat)
        return beat

    def start(self, interpreter_limit_s: float = 0.0) -> None:
        """Begin to look. `interpreter_limit_s`: for how long nothing of Python may run, 0: for ever."""
        self._looked_s = self._clock()
        self._thread.start()
        if interpreter_limit_s and self._thread.native_id is not None:
            self._interpreter = _interpreter_watchdog(self._thread.native_id, interpreter_limit_s)

    def close(self) -> None:
        """Look no more: the program ends."""
        self._is_over.set()
        if self._interpreter is not None:
            self._thread.join(_INTERPRETER_END_S)
            self._interpreter.close()

    @property
    def complaint(self) -> str:
        """Which parts have been still for too long, "" when all go on."""
        now_s = self._clock()
        late = [beat for beat in self._beats if beat.age_s(now_s) > beat.limit_s / 4]
        return "; ".join(f"the {beat.name} has been still for {beat.age_s(now_s):.0f} s" for beat in late)

    def collect(self) -> Iterable[Metric]:
        """For each part the seconds since its last beat."""
        doc = "For how long a part of the program has been still"
        still = GaugeMetricFamily("baton:watchdog_still_seconds", doc, labels=["part"])
        now_s = self._clock()
        for beat in self._beats:
            still.add_metric([beat.name], beat.age_s(now_s))
        yield still

    def look(self) -> None:
        """Look at every beat, `LOOK_INTERVAL_S` after the last time."""
        now_s = self._clock()
        pause_s, self._looked_s = now_s - self._looked_s - LOOK_INTERVAL_S, now_s
        for beat in self._beats:
            if pause_s > 0:
                beat.excuse(pause_s)
            age_s = beat.age_s(now_s)
            if age_s > beat.limit_s:
                self._end(f"the {beat.name} has been still for {age_s:.0f} s, {beat.place()}")

    def _run(self) -> None:
        while not self._is_over.wait(LOOK_INTERVAL_S):
            if self._interpreter is not None:
                self._interpreter.beat()
            self.look()


def end_process(reason: str) -> None:
    """End this process at once, whatever its other threads do."""
    _log.critical("%s: this process cannot go on and ends", reason)
    logging.shutdown()
    os._exit(EXIT_STATUS)
