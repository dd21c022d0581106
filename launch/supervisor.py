"""Keeps a fixed set of processes running: start all, watch, restart, stop all.

Owns the children and the signals of this process. Does not know what the children do beyond `ready` and `loading`.

Phases, each with its own end:
    starting   all children at once, until every one is ready; one that exits here ends the whole with its own error
    watching   until the first SIGINT, SIGTERM or SIGHUP; a child that exits is started again after a growing delay
    stopping   SIGTERM to all but the children that stop last, then to those; SIGKILL when time is up or on a second
               signal

Invariants: everything happens on the main thread, in the order of one event queue; when `run` returns or raises no
child is left; a kill is always by process id.
"""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from launch.console import Console
from launch.supervised import ChildReport, ChildSpec, Exited, Said, SupervisedChild
from program.events import Loading, Ready
from wire.errors import BatonError

FIRST_RESTART_DELAY_S = 0.5
MAX_RESTART_DELAY_S = 10.0
STABLE_AFTER_S = 30.0
"""A child that lived this long starts again with the first delay."""
FAILED_START_PATIENCE_S = 1.0
"""What the others get between SIGTERM and SIGKILL when one child could not start: they have no requests to finish."""
LAST_PATIENCE_S = 2.0
"""What the children that stop last get at least, even when the others used up the time."""
KILL_TIMEOUT_S = 5.0
OWN_NAME = "baton"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Signalled:
    """This process was asked to stop."""

    number: int


Event = ChildReport | Signalled


@dataclass(slots=True)
class _Place:
    """One child over its restarts. `process` is None between an exit and the next start, due at `restart_at`."""

    spec: ChildSpec
    process: SupervisedChild | None = None
    is_ready: bool = False
    address: str = ""
    started_at: float = 0.0
    restart_at: float | None = None
    delay_s: float = field(default=FIRST_RESTART_DELAY_S)


class Supervisor:
    """Runs `specs`. `start_timeout_s` bounds the starting phase, `stop_timeout_s` the time to drain."""

    def __init__(
        self, specs: Sequence[ChildSpec], console: Console, *, start_timeout_s: float, stop_timeout_s: float
    ) -> None:
        self._places = {spec.name: _Place(spec) for spec in specs}
        self._console = console
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._signals: list[int] = []

    def run(self, on_ready: Callable[[Mapping[str, str]], None]) -> int:
        """Run until a signal; returns the exit status. Call it on the main thread.

        `on_ready` gets the addresses by child name once every child is ready. The status is 0 after SIGTERM, 130 after
        SIGINT, 128 + the number after a second signal, 1 when a child did not stop in time.
        Raises `BatonError` with the child's own error when one cannot start.
        """
        with self._signals_as_events():
            try:
                if self._start_all():
                    on_ready({name: place.address for name, place in self._places.items()})
                    self._watch()
                has_drained = self._stop(self._stop_timeout_s)
            except BatonError:
                self._stop(FAILED_START_PATIENCE_S)
                raise
            finally:
                self._kill_all()
        return self._exit_status(has_drained)

    # --- phases

    def _start_all(self) -> bool:
        """Whether all children became ready; False when a signal came first."""
        deadline = time.monotonic() + self._start_timeout_s
        for place in self._places.values():
            try:
                self._start(place)
            except OSError as error:
                raise BatonError(f"cannot start {place.spec.name}: {error}") from None
        while waiting := [name for name, place in self._places.items() if not place.is_ready]:
            match event := self._next_event(deadline):
                case None:
                    raise BatonError(f"not ready after {self._start_timeout_s:g} s: {', '.join(waiting)}")
                case Said(name, Loading() as loading):
                    self._console.loading(name, loading.done, loading.total, loading.stage)
                case Exited():
                    self._console.close_bar()
                    raise BatonError(f"{event.name}: {event.describe()}")
                case Signalled():
                    self._console.close_bar()
                    return False
                case Said():
                    pass
        self._console.close_bar()
        return True

    def _watch(self) -> None:
        while True:
            due = [place.restart_at for place in self._places.values() if place.restart_at is not None]
            match event := self._next_event(min(due, default=None)):
                case None:
                    self._restart_due()
                case Exited():
                    self._schedule_restart(self._places[event.name], event.describe())
                case Said(name, Ready()):
                    self._console.log(OWN_NAME, f"{name} is ready again")
                case Signalled():
                    return
                case Said():
                    pass

    def _stop(self, patience_s: float) -> bool:
        """Whether all children exited by themselves."""
        deadline = time.monotonic() + patience_s
        first = [place for place in self._places.values() if not place.spec.stops_last]
        last = [place for place in self._places.values() if place.spec.stops_last]
        has_drained = self._terminate(first, deadline)
        return self._terminate(last, max(deadline, time.monotonic() + LAST_PATIENCE_S)) and has_drained

    # --- children

    def _start(self, place: _Place) -> None:
        place.restart_at = None
        place.started_at = time.monotonic()
        place.process = SupervisedChild(place.spec, self._events.put, self._console)

    def _schedule_restart(self, place: _Place, reason: str) -> None:
        if time.monotonic() - place.started_at >= STABLE_AFTER_S:
            place.delay_s = FIRST_RESTART_DELAY_S
        self._console.log(OWN_NAME, f"{place.spec.name} stopped: {reason}; starting it again in {place.delay_s:g} s")
        place.restart_at = time.monotonic() + place.delay_s
        place.delay_s = min(2 * place.delay_s, MAX_RESTART_DELAY_S)

    def _restart_due(self) -> None:
        for place in self._places.values():
            if place.restart_at is not None and place.restart_at <= time.monotonic():
                try:
                    self._start(place)
                except OSError as error:  # out of processes or memory: may pass
                    self._schedule_restart(place, str(error))

    def _terminate(self, places: Sequence[_Place], deadline: float) -> bool:
        running = [place for place in places if place.process is not None]
        if len(self._signals) > 1:
            return not running
        for place in running:
            if place.process is not None:
                place.process.terminate()
        while left := [place.spec.name for place in running if place.process is not None]:
            event = self._next_event(deadline)
            if event is None:
                self._console.log(OWN_NAME, f"did not stop in time, killed now: {', '.join(left)}")
            if event is None or isinstance(event, Signalled):
                self._kill(running)
                return False
        return True

    def _kill_all(self) -> None:
        self._kill(list(self._places.values()))

    def _kill(self, places: Sequence[_Place]) -> None:
        for place in places:
            if place.process is not None:
                place.process.kill()
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while any(place.process is not None for place in places) and time.monotonic() < deadline:
            self._next_event(deadline)

    # --- events

    def _next_event(self, deadline: float | None) -> Event | None:
        """The next event, already noted in its child's place; None once `deadline` (monotonic seconds) has passed."""
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            event = self._events.get(timeout=timeout)
        except queue.Empty:
            return None
        match event:
            case Said(name, Ready(address=address)):
                self._places[name].is_ready = True
                self._places[name].address = address
            case Exited():
                self._places[event.name].process = None
                self._places[event.name].is_ready = False
            case Signalled():
                self._signals.append(event.number)
            case Said():
                pass
        return event

    @contextmanager
    def _signals_as_events(self) -> Iterator[None]:
        def put(number: int, _frame: FrameType | None) -> None:
            self._events.put(Signalled(number))

        previous = {number: signal.signal(number, put) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _exit_status(self, has_drained: bool) -> int:
        if len(self._signals) > 1:
            return 128 + self._signals[1]
        if not has_drained:
            return 1
        return 128 + signal.SIGINT if self._signals == [signal.SIGINT] else 0
