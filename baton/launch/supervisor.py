"""Keeps a fixed set of processes running: start all, watch, restart, stop all.

Owns the children and the signals of this process. Does not know what the children do beyond `ready` and `loading`.

Phases, each with its own end:
    starting   all children at once, until every one is ready; when a child exits here, `run` raises that child's error
    watching   until the first SIGINT or SIGTERM; a child that exits is started again, at once the first time, and after
               a growing delay when it does so again soon; after `MAX_FAILURES` in a row it is given up, and when a
               whole group of children was, `run` raises the last reason; one that has said that it was drained
               stays away, and when all were this ends
    stopping   one line that says so; SIGTERM to all but the children that stop last, then to those; SIGKILL when time
               is up or on a second signal

SIGHUP is passed on to the children that reload files on it, to one that is not ready as soon as it is. Without such a
child it asks to stop: a terminal was closed.

Invariants: everything happens on the main thread, in the order of one event queue; when `run` returns or raises no
child is left; a kill is always by process id.
"""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from baton.device.host_memory import GIB, SMALLER, read_host_memory
from baton.launch.backoff import FIRST_RESTART_DELAY_S, Backoff
from baton.launch.console import Console
from baton.launch.supervised import ChildReport, ChildSpec, Exited, Reported, SupervisedChild
from baton.runtime.events import WEIGHTS, Drained, Loading, Ready
from baton.runtime.exit_status import USAGE_STATUS
from baton.wire.errors import BatonError, InvalidSetting

MAX_FAILURES = 15
"""Ends in a row after which a child is given up: two minutes of delays."""
FAILED_START_PATIENCE_S = 1.0
"""The time between SIGTERM and SIGKILL for the others when one child could not start: they have no requests to
finish."""
LAST_PATIENCE_S = 2.0
"""The least time for the children that stop last, even when the others used up the time."""
KILL_TIMEOUT_S = 30.0
OWN_NAME = "baton"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Signalled:
    """This process was asked to stop."""

    number: int


@dataclass(frozen=True, slots=True)
class ReloadAsked:
    """This process was asked to have files read again."""


Event = ChildReport | Signalled | ReloadAsked


@dataclass(slots=True)
class _ChildState:
    """One child over its restarts. `process` is None between an exit and the next start, due at `restart_at`, and for
    good when it `is_given_up`. `must_reload`: it was asked to and has not been told yet. `is_drained`: it stays away.
    """

    spec: ChildSpec
    backoff: Backoff
    process: SupervisedChild | None = None
    is_ready: bool = False
    must_reload: bool = False
    is_drained: bool = False
    address: str = ""
    weights_bytes: int = 0
    restart_at: float | None = None
    is_given_up: bool = False


class Supervisor:
    """Runs `specs`. `start_timeout_s` bounds the starting phase, `stop_timeout_s` the time to drain.

    `restart_delay_s`: from the second end of a child in a row to its next start; doubled each time after that.
    `max_failures`: ends in a row after which it is given up.
    """

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        console: Console,
        *,
        start_timeout_s: float,
        stop_timeout_s: float,
        restart_delay_s: float = FIRST_RESTART_DELAY_S,
        max_failures: int = MAX_FAILURES,
    ) -> None:
        self._children = {spec.name: _ChildState(spec, Backoff(restart_delay_s)) for spec in specs}
        self._max_failures = max_failures
        self._console = console
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._signals: list[int] = []

    def run(self, on_ready: Callable[[Mapping[str, str]], None]) -> int:
        """Run until a signal; returns the exit status. Call it on the main thread. `on_ready` gets the addresses by
        child name once every child is ready.

        The status is 0 when all children stopped as they were asked to, whichever signal asked. It is 128 + the number
        after a second signal, and 1 when a child did not stop in time. Raises `BatonError` with the child's own error
        when one cannot start, or when a group was given up.
        """
        with self._signals_as_events():
            try:
                if self._start_all():
                    on_ready({name: child.address for name, child in self._children.items()})
                    self._watch()
                self._console.log(
                    OWN_NAME, f"stopping, within {self._stop_timeout_s:g} s; a second signal ends all at once"
                )
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
        for child in self._children.values():
            try:
                self._start(child)
            except OSError as error:
                raise BatonError(f"cannot start {child.spec.name}: {error}") from None
        while waiting := [name for name, child in self._children.items() if not child.is_ready]:
            match event := self._next_event(deadline):
                case None:
                    raise BatonError(f"not ready after {self._start_timeout_s:g} s: {', '.join(waiting)}")
                case Reported(name, Loading() as loading):
                    self._children[name].weights_bytes = loading.total if loading.stage == WEIGHTS else 0
                    self._console.loading(name, loading.done, loading.total, loading.stage)
                case Exited():
                    self._console.close_bar()
                    kind = InvalidSetting if event.status == USAGE_STATUS else BatonError
                    raise kind(f"{event.name}: {event.describe()}{self._of_memory(event)}")
                case Signalled():
                    self._console.close_bar()
                    return False
                case Reported() | ReloadAsked():
                    pass
        self._console.close_bar()
        return True

    def _watch(self) -> None:
        while True:
            due = [child.restart_at for child in self._children.values() if child.restart_at is not None]
            match event := self._next_event(min(due, default=None)):
                case None:
                    self._restart_due()
                case Exited() if self._children[event.name].is_drained:
                    self._console.log(OWN_NAME, f"{event.name} was drained, and stays away")
                    if all(child.is_drained for child in self._children.values()):
                        return
                case Exited():
                    self._schedule_restart(self._children[event.name], event.describe())
                case Reported(name, Ready()):
                    self._console.log(OWN_NAME, f"{name} is ready again at {self._children[name].address}")
                case Signalled():
                    return
                case Reported() | ReloadAsked():
                    pass

    def _stop(self, patience_s: float) -> bool:
        """Whether all children exited by themselves."""
        deadline = time.monotonic() + patience_s
        first = [child for child in self._children.values() if not child.spec.stops_last]
        last = [child for child in self._children.values() if child.spec.stops_last]
        has_drained = self._terminate(first, deadline)
        return self._terminate(last, max(deadline, time.monotonic() + LAST_PATIENCE_S)) and has_drained

    # --- children

    def _start(self, child: _ChildState) -> None:
        child.restart_at = None
        child.backoff.start(time.monotonic())
        child.process = SupervisedChild(child.spec, self._events.put, self._console)

    def _schedule_restart(self, child: _ChildState, reason: str) -> None:
        delay_s = child.backoff.fail(time.monotonic())
        if child.backoff.num_failures >= self._max_failures:
            self._give_up(child, reason)
            return
        when = f"in {delay_s:g} s" if delay_s else "now"
        self._console.log(OWN_NAME, f"{child.spec.name} stopped: {reason}; starting it again {when}")
        child.restart_at = time.monotonic() + delay_s

    def _give_up(self, child: _ChildState, reason: str) -> None:
        """Start it no more. Raises `BatonError` when no other child of its group is left."""
        child.is_given_up = True
        verdict = f"{child.spec.name} stopped {child.backoff.num_failures} times in a row and is given up: {reason}"
        group = [each for each in self._children.values() if each.spec.group == child.spec.group]
        if child.spec.group and all(each.is_given_up for each in group):
            raise BatonError(verdict)
        self._console.log(OWN_NAME, verdict)

    def _restart_due(self) -> None:
        for child in self._children.values():
            if child.restart_at is not None and child.restart_at <= time.monotonic():
                try:
                    self._start(child)
                except OSError as error:  # out of processes or memory, which may be temporary
                    self._schedule_restart(child, str(error))

    def _of_memory(self, event: Exited) -> str:
        """What to think of a child that was killed while it started: nobody but the system does that."""
        if event.error or event.status != -signal.SIGKILL:
            return ""
        weights_bytes = self._children[event.name].weights_bytes
        needs = f" of nodes that load {weights_bytes / GIB:.2f} GiB of weights each" if weights_bytes else ""
        return (
            f" while it started, which systems do to processes{needs} when memory runs out: {read_host_memory()} now; "
            f"try {SMALLER} (--prefill, --decode)"
        )

    def _reload(self) -> None:
        """Pass SIGHUP on to the children that have yet to reload and are ready: before that it would end them."""
        for child in self._children.values():
            if child.must_reload and child.is_ready and child.process is not None:
                self._console.log(OWN_NAME, f"SIGHUP: {child.spec.name} reads its files again")
                child.process.reload()
                child.must_reload = False

    def _terminate(self, children: Sequence[_ChildState], deadline: float) -> bool:
        running = [child for child in children if child.process is not None]
        if len(self._signals) > 1:
            return not running
        for child in running:
            if child.process is not None:
                child.process.terminate()
        while left := [child.spec.name for child in running if child.process is not None]:
            event = self._next_event(deadline)
            if event is None:
                self._console.log(OWN_NAME, f"did not stop in time, killed now: {', '.join(left)}")
            if event is None or isinstance(event, Signalled):
                self._kill(running)
                return False
        return True

    def _kill_all(self) -> None:
        self._kill(list(self._children.values()))

    def _kill(self, children: Sequence[_ChildState]) -> None:
        for child in children:
            if child.process is not None:
                child.process.kill()
        deadline = time.monotonic() + KILL_TIMEOUT_S
        while any(child.process is not None for child in children) and time.monotonic() < deadline:
            self._next_event(deadline)

    # --- events

    def _next_event(self, deadline: float | None) -> Event | None:
        """The next event, already recorded in the state of its child; None once `deadline` (monotonic seconds) has
        passed."""
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            event = self._events.get(timeout=timeout)
        except queue.Empty:
            return None
        match event:
            case Reported(name, Ready(address=address)):
                self._children[name].is_ready = True
                self._children[name].address = address
                self._reload()
            case Reported(name, Drained()):
                self._children[name].is_drained = True
            case Exited():
                self._children[event.name].process = None
                self._children[event.name].is_ready = False
            case Signalled():
                self._signals.append(event.number)
            case ReloadAsked():
                for child in self._children.values():
                    child.must_reload = child.spec.reloads
                self._reload()
            case Reported():
                pass
        return event

    @contextmanager
    def _signals_as_events(self) -> Iterator[None]:
        has_reloads = any(child.spec.reloads for child in self._children.values())

        def put(number: int, _frame: FrameType | None) -> None:
            self._events.put(ReloadAsked() if has_reloads and number == signal.SIGHUP else Signalled(number))

        previous = {number: signal.signal(number, put) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _exit_status(self, has_drained: bool) -> int:
        if len(self._signals) > 1:
            return 128 + self._signals[1]
        return 0 if has_drained else 1
