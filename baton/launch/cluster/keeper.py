"""What watches over one member on its machine: starts its program, says how it is, and does not outlive it.

Owns the child process, and the cluster key that it gets. Does not know who asks: on Ray this is what an actor does.

Invariants: the key is in memory only, where this user's processes on this machine can read it; it is on no command line
and in no environment, and is gone with this process. The program is tied to the thread that calls `start`, and dies
with it.
"""

from __future__ import annotations

import os
import queue
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

from baton.launch.cluster.backend import Phase, Program, Report
from baton.launch.console import Console
from baton.launch.settings import child_environment
from baton.launch.supervised import ChildReport, ChildSpec, Exited, Reported, SupervisedChild
from baton.router.http.access.keys import KEY_VARIABLE
from baton.runtime.events import Ready
from baton.wire.errors import ChildFailed
from baton.wire.keys import ROUTER

_ANYWHERE = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class Secrets:
    """The secrets that the programs of a deployment share: the text of its cluster key, and an API key of the router,
    "" for none. The repr hides both."""

    cluster_key: str
    api_key: str = ""

    def __repr__(self) -> str:
        return "Secrets(...)"


class Keeper:
    """Keeps the program of one member, on the machine called `machine`, whose programs listen at `address`. Used by one
    thread, which has to live as long as the program."""

    def __init__(self, machine: str, address: str, console: Console) -> None:
        self._address = address
        self._console = console
        self._events: queue.SimpleQueue[ChildReport] = queue.SimpleQueue()
        self._child: SupervisedChild | None = None
        self._key_file = -1
        self._waiting: socket.socket | None = None
        self._report = Report(Phase.PLACING, machine)

    def meeting_place(self) -> str:
        """HOST:PORT at which a program here waits for those on further machines. The port is kept for it, and for the
        next program here, so that they find it again."""
        if self._waiting is None:
            self._waiting = socket.socket()
            # who listens there has to set this, too
            self._waiting.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._waiting.bind((self._address, 0))
        return f"{self._address}:{self._waiting.getsockname()[1]}"

    def start(self, program: Program, secrets: Secrets, dials: str = "") -> None:
        """Run `program`, unless it runs. `dials`: where it finds the member that it belongs to."""
        self._take_events()
        if self._child is not None:
            return
        known = Report(Phase.STARTING, self._report.machine, arguments=program.arguments)
        try:
            self._child = SupervisedChild(self._spec(program, secrets, dials), self._events.put, self._console)
            self._report = replace(known, pid=self._child.pid)
        except OSError as error:
            self._report = replace(known, phase=Phase.EXITED, reason=f"cannot be started: {error}")

    def terminate(self) -> None:
        """Ask the program to finish what it has and to exit."""
        self._take_events()
        if self._child is not None:
            self._child.terminate()
            self._report = replace(self._report, phase=Phase.STOPPING)

    def report(self) -> Report:
        """The state of the program now."""
        self._take_events()
        return self._report

    def close(self) -> None:
        """End the program and everything in its process group. Raises `ChildFailed` when that takes too long."""
        if self._waiting is not None:
            self._waiting.close()
            self._waiting = None
        if self._child is None:
            return
        self._child.kill()
        try:
            while self._child is not None:
                self._take(self._events.get(timeout=10.0))
        except queue.Empty:
            raise ChildFailed("the program did not end although it was killed") from None

    def _take_events(self) -> None:
        while not self._events.empty():
            self._take(self._events.get())

    def _take(self, event: ChildReport) -> None:
        if isinstance(event, Exited):
            self._child = None
            self._report = replace(self._report, phase=Phase.EXITED, reason=event.describe())
        elif isinstance(event, Reported) and isinstance(event.event, Ready):
            ready = event.event
            self._report = replace(
                self._report,
                phase=Phase.READY if self._report.phase == Phase.STARTING else self._report.phase,
                address=self._reachable(ready.address),
                control_address=ready.control_address,
            )

    def _reachable(self, address: str) -> str:
        """A program that listens at every address of its machine is reached at this one."""
        host = urlsplit(address).hostname
        if host not in _ANYWHERE:
            return address
        return address.replace(f"[{host}]" if ":" in host else host, self._address)

    def _spec(self, program: Program, secrets: Secrets, dials: str) -> ChildSpec:
        environment = {**child_environment(os.environ), **program.environment, "PYTHONUNBUFFERED": "1"}
        if program.module == ROUTER and secrets.api_key:
            environment[KEY_VARIABLE] = secrets.api_key
        return ChildSpec(program.name, program.module, tuple(self._arguments(program, secrets, dials)), environment)

    def _arguments(self, program: Program, secrets: Secrets, dials: str) -> Sequence[str]:
        found = [f"{flag}={self._address}" for flag in program.host_flags]
        if program.wait_flag:
            found.append(f"{program.wait_flag}={self.meeting_place().rpartition(':')[2]}")
        if program.dial_flag:
            found.append(f"{program.dial_flag}={dials}")
        return [*program.arguments, *found, f"--cluster-key={self._key_path(secrets.cluster_key)}"]

    def _key_path(self, text: str) -> str:
        """A file in memory, under a name that every child can open as long as this process lives."""
        if self._key_file < 0:
            self._key_file = os.memfd_create("baton-cluster-key")
            os.fchmod(self._key_file, 0o600)
            os.write(self._key_file, text.encode())
        return f"/proc/{os.getpid()}/fd/{self._key_file}"
