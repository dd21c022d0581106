"""One supervised process: its start, its output and its end.

Owns the child and the three threads that turn its pipes into reports. Does not know about other children or when to
restart. A child reports its state on stdout (`baton.runtime.events`); its lines on stderr are for people, and are
passed on with the child's name in front. Invariant: `Exited` is reported exactly once, is the last report of a process,
and comes when nothing of its process group is left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO

from baton.launch.console import Console
from baton.runtime.child import PIPE, Child, describe_end
from baton.runtime.events import Event, Ready, parse_event

MAX_LINE_BYTES = 64 * 1024
"""A longer line is passed on in pieces."""
DRAIN_TIMEOUT_S = 1.0
"""The time for which a dead child's pipes are read, should a process outside its group keep them open."""
ERROR_PREFIX = "error: "


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """A program to run: `python -m module *arguments` with exactly `environment`.

    `reloads`: once it is ready, SIGHUP makes it read files again and does not end it. `inherited_fds`: descriptors that
    it gets under the same numbers. `group`: the deployment ends when all children of a group were given up; those of ""
    may all be.
    """

    name: str
    module: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    stops_last: bool = False
    reloads: bool = False
    inherited_fds: tuple[int, ...] = ()
    group: str = ""


@dataclass(frozen=True, slots=True)
class Reported:
    """The child called `name` reported an event of its start."""

    name: str
    event: Event


@dataclass(frozen=True, slots=True)
class Exited:
    """The process is gone. `error` is the `error: ...` line it wrote before it was ready, without the prefix, or ""."""

    name: str
    status: int
    error: str

    def describe(self) -> str:
        """The end of the process in words."""
        return self.error or describe_end(self.status)


ChildReport = Reported | Exited


class SupervisedChild:
    """A running child. Construct it on the main thread: the kernel ties the child to the thread that started it."""

    def __init__(self, spec: ChildSpec, report: Callable[[ChildReport], None], console: Console) -> None:
        self.spec = spec
        self._report = report
        self._console = console
        self._is_ready = False
        self._error = ""
        self._child = Child(
            spec.module,
            *spec.arguments,
            environment=spec.environment,
            stdout=PIPE,
            stderr=PIPE,
            pass_fds=spec.inherited_fds,
        )
        self._readers = [
            self._start_thread(self._read, self._child.stdout, self._take_output),
            self._start_thread(self._read, self._child.stderr, self._take_log),
        ]
        self._start_thread(self._wait)

    @property
    def pid(self) -> int:
        """The process id of the child."""
        return self._child.pid

    def terminate(self) -> None:
        """Ask the child to drain and exit."""
        self._child.terminate()

    def reload(self) -> None:
        """Ask a child that `reloads` to read its files again. Only for one that is ready."""
        self._child.hang_up()

    def kill(self) -> None:
        """Kill the child and everything in its process group."""
        self._child.kill()

    def _start_thread(self, target: Callable[..., None], *arguments: object) -> threading.Thread:
        name = f"{self.spec.name}:{target.__name__}"
        thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
        thread.start()
        return thread

    def _wait(self) -> None:
        status = self._child.watch()
        for reader in self._readers:
            reader.join(DRAIN_TIMEOUT_S)
        self._report(Exited(self.spec.name, status, self._error))

    @staticmethod
    def _read(stream: IO[bytes], take: Callable[[str], None]) -> None:
        with stream:
            while line := stream.readline(MAX_LINE_BYTES):
                take(line.decode(errors="replace").rstrip("\r\n"))

    def _take_output(self, line: str) -> None:
        event = parse_event(line)
        if event is None:
            self._console.log(self.spec.name, line)
            return
        self._is_ready = self._is_ready or isinstance(event, Ready)
        self._report(Reported(self.spec.name, event))

    def _take_log(self, line: str) -> None:
        if line.startswith(ERROR_PREFIX) and not self._is_ready:
            self._error = line.removeprefix(ERROR_PREFIX)  # shown once, where `Exited` is handled
        else:
            self._console.log(self.spec.name, line)
