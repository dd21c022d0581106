"""The targets of one benchmark, of which one at a time is measured while the others keep still.

Owns which target runs, is halted or is started anew. Knows no load. Many a server spins while it has nothing to do, and
would take the machine from the one that is measured: such targets are halted until it is their turn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from bench.targets.process import RunningTarget
from bench.targets.spec import Target
from wire.errors import InvalidSetting


class LineUp(Protocol):
    """Context manager; at its end nothing that it started is left."""

    def __enter__(self) -> LineUp: ...

    def __exit__(self, *_: object) -> None: ...

    def take_turn(self, name: str) -> RunningTarget:
        """The target, ready to be measured, with the others at rest. Raises `BatonError`."""
        ...

    def cpu_seconds(self) -> dict[str, float]:
        """By name, of the targets that were started here and run now."""
        ...

    def describe(self) -> list[dict[str, Any]]:
        """Every target: `name`, `command` or `url`, and `pinning` as far as it was started yet."""
        ...


class AllStarted:
    """All targets run from the beginning, so no start is measured; those named in `halted` rest between their turns."""

    def __init__(
        self, targets: Sequence[Target], halted: frozenset[str], ready_timeout_s: float, say: Callable[[str], None]
    ) -> None:
        self._targets = targets
        self._halted = halted
        self._pinning: dict[str, list[str]] = {}
        self._running: dict[str, RunningTarget] = {}
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            for target in targets:
                running = stack.enter_context(RunningTarget(target, ready_timeout_s, say))
                self._running[target.name] = running
                self._pinning[target.name] = running.pinning()
                if target.name in halted:
                    running.pause()
            self._stack = stack.pop_all()

    def __enter__(self) -> AllStarted:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def take_turn(self, name: str) -> RunningTarget:
        """Halt the others, continue this one."""
        for other in self._halted - {name}:
            self._running[other].pause()
        chosen = self._running[name]
        chosen.resume()
        chosen.await_answer()
        return chosen

    def cpu_seconds(self) -> dict[str, float]:
        """Of every target that was started here."""
        found = {name: running.cpu_seconds() for name, running in self._running.items()}
        return {name: cpu_s for name, cpu_s in found.items() if cpu_s is not None}

    def describe(self) -> list[dict[str, Any]]:
        """All of them."""
        return [{**target.describe(), "pinning": self._pinning[target.name]} for target in self._targets]


class OneAtATime:
    """A target is started when it is its turn, and ended when another's comes: for machines with little memory."""

    def __init__(self, targets: Sequence[Target], ready_timeout_s: float, say: Callable[[str], None]) -> None:
        self._targets = {target.name: target for target in targets}
        self._ready_timeout_s = ready_timeout_s
        self._say = say
        self._pinning: dict[str, list[str]] = {}
        self._chosen: RunningTarget | None = None

    def __enter__(self) -> OneAtATime:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def take_turn(self, name: str) -> RunningTarget:
        """End the one that runs, if it is another, and start this one."""
        if self._chosen is not None and self._chosen.target.name == name:
            self._chosen.await_answer()
            return self._chosen
        self._end()
        self._chosen = RunningTarget(self._targets[name], self._ready_timeout_s, self._say)
        self._pinning[name] = self._chosen.pinning()
        return self._chosen

    def cpu_seconds(self) -> dict[str, float]:
        """Of the one that runs."""
        cpu_s = None if self._chosen is None else self._chosen.cpu_seconds()
        return {} if self._chosen is None or cpu_s is None else {self._chosen.target.name: cpu_s}

    def describe(self) -> list[dict[str, Any]]:
        """All of them; `pinning` is [] before the first turn."""
        return [{**target.describe(), "pinning": self._pinning.get(name, [])} for name, target in self._targets.items()]

    def _end(self) -> None:
        if self._chosen is not None:
            self._chosen.close()
            self._chosen = None


class LineUpSettings(Protocol):
    """The settings of a command that say how its targets are kept."""

    @property
    def pause(self) -> tuple[str, ...] | None:
        """Names of the targets to halt, None for the default."""
        ...

    @property
    def one_at_a_time(self) -> bool:
        """Whether only the one that is measured runs."""
        ...

    @property
    def start_timeout_s(self) -> float:
        """Seconds until a target that is started must answer."""
        ...


def line_up_of(targets: Sequence[Target], settings: LineUpSettings, say: Callable[[str], None]) -> LineUp:
    """Start what has to run from the beginning. Raises `BatonError`."""
    if settings.one_at_a_time:
        return OneAtATime(targets, settings.start_timeout_s, say)
    return AllStarted(targets, names_to_halt(targets, settings.pause), settings.start_timeout_s, say)


def names_to_halt(targets: Sequence[Target], asked: Sequence[str] | None) -> frozenset[str]:
    """`asked`, or without it every target that is started here and is no Baton, which rests by itself.

    Raises `InvalidSetting` for a name that is no target or a target that is not started here.
    """
    if asked is None:
        return frozenset(target.name for target in targets if target.is_started and not target.is_baton)
    started = {target.name for target in targets if target.is_started}
    for name in asked:
        if name not in started:
            known = ", ".join(sorted(started)) or "none"
            raise InvalidSetting(f"--pause {name!r:.40} is not a target that is started here (those are: {known})")
    return frozenset(asked)
