"""One supervised process: how it is started, what it says, and how it ends.

Owns the process, its pipes and the three threads that turn them into events. Does not know about other children or when
to restart. A child tells its state on stdout, one JSON object a line (`{"event": "ready", ...}`); what it writes to
stderr is for people and is passed on with the child's name in front.
Invariants: the child leads a session of its own, so a terminal's Ctrl-C does not reach it; `Exited` is reported exactly
once, is the last event of a process, and comes when nothing of its process group is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from launch.console import GRAPHS, WEIGHTS, Console

MAX_LINE_BYTES = 64 * 1024
"""A longer line is passed on in pieces."""
DRAIN_TIMEOUT_S = 1.0
"""How long a dead child's pipes are read, should something outside its process group keep them open."""
ERROR_PREFIX = "error: "
TETHER = Path(__file__).with_name("tether.py")


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run: `python -m module *arguments` with exactly `environment`."""

    name: str
    module: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    stops_last: bool = False


@dataclass(frozen=True, slots=True)
class Ready:
    """The child does its work now. `address` is where it listens, "" when it did not say."""

    name: str
    address: str


@dataclass(frozen=True, slots=True)
class Loading:
    """How far a stage of the start is: bytes of "weights", or recorded CUDA "graphs"."""

    name: str
    done: int
    total: int
    stage: str = WEIGHTS


@dataclass(frozen=True, slots=True)
class Exited:
    """The process is gone. `error` is the `error: ...` line it wrote before it was ready, without the prefix, or ""."""

    name: str
    status: int
    error: str

    def describe(self) -> str:
        """How it ended, in words."""
        if self.error:
            return self.error
        if self.status >= 0:
            return f"exited with status {self.status}"
        try:
            return f"was killed by {signal.Signals(-self.status).name}"
        except ValueError:
            return f"was killed by signal {-self.status}"


ChildEvent = Ready | Loading | Exited


class ChildProcess:
    """A running child. Construct it on the main thread: the kernel ties the child to the thread that started it."""

    def __init__(self, spec: ChildSpec, report: Callable[[ChildEvent], None], console: Console) -> None:
        self.spec = spec
        self._report = report
        self._console = console
        self._is_ready = False
        self._error = ""
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(TETHER), str(os.getpid()), spec.module, *spec.arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(spec.environment),
            start_new_session=True,
        )
        self._readers = [
            self._start_thread(self._read, self._process.stdout, self._take_output),
            self._start_thread(self._read, self._process.stderr, self._take_log),
        ]
        self._start_thread(self._wait)

    @property
    def pid(self) -> int:
        """Process id, and id of the process group the child leads."""
        return self._process.pid

    def terminate(self) -> None:
        """Ask the child to drain and exit."""
        self._process.terminate()

    def kill(self) -> None:
        """Kill the child and everything in its process group."""
        if self._process.returncode is None:
            self._kill_group()

    def _start_thread(self, target: Callable[..., None], *arguments: object) -> threading.Thread:
        name = f"{self.spec.name}:{target.__name__}"
        thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
        thread.start()
        return thread

    def _wait(self) -> None:
        status = self._process.wait()
        self._kill_group()
        for reader in self._readers:
            reader.join(DRAIN_TIMEOUT_S)
        self._report(Exited(self.spec.name, status, self._error))

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    @staticmethod
    def _read(stream: IO[bytes], take: Callable[[str], None]) -> None:
        with stream:
            while line := stream.readline(MAX_LINE_BYTES):
                take(line.decode(errors="replace").rstrip("\r\n"))

    def _take_output(self, line: str) -> None:
        event = parse_event(self.spec.name, line)
        if event is None:
            self._console.log(self.spec.name, line)
            return
        self._is_ready = self._is_ready or isinstance(event, Ready)
        self._report(event)

    def _take_log(self, line: str) -> None:
        if line.startswith(ERROR_PREFIX) and not self._is_ready:
            self._error = line.removeprefix(ERROR_PREFIX)  # shown once, by whoever handles `Exited`
        else:
            self._console.log(self.spec.name, line)


def parse_event(name: str, line: str) -> Ready | Loading | None:
    """The event in one line of a child's stdout, None when it is any other text."""
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    match fields:
        case {"event": "ready", "address": str(address)}:
            return Ready(name, address)
        case {"event": "ready"}:
            return Ready(name, "")
        case {"event": "loading", "done": int(done), "total": int(total), "stage": "graphs"}:
            return Loading(name, done, total, GRAPHS)
        case {"event": "loading", "done": int(done), "total": int(total)}:
            return Loading(name, done, total)
        case _:
            return None
