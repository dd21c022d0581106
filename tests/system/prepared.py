"""Programs without the two seconds of processor time that each start of Python with torch takes.

Owns one process that has imported what every program imports and does nothing but fork: each program is a process of
its own, with its own arguments, environment and files, as if it had been started; only the imports are done already.
Tests of starts and ends (`tests/launch`, `test_baton_serve.py`) start programs as users do.

Invariant: the process that forks has one thread, and neither torch nor a library below it has computed anything yet. It
ends with the process that asked for it, and its children end with it: `close` ends and reaps it at that process's exit,
and the kernel does where there is no exit.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
NODE_MODULES = ("node.process", "prefill_node.node", "decode_node.node")
ROUTER_MODULES = ("router.app", "router.control", "router.relay", "router.served_model", "router.http.server")
"""Those that bring in nearly all that a node, or a router, imports."""
_PR_SET_PDEATHSIG = 1
_MESSAGE_BYTES = 2**20
_START_TIMEOUT_S = 120.0
_END_TIMEOUT_S = 10.0
_POLL_S = 0.02
_LIBC = ctypes.CDLL(None)


def die_with_parent() -> None:
    """The kernel kills this process when the one that started it ends, however it ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class PreparedProcess:
    """A forked program, with as much of `subprocess.Popen` as tests use."""

    def __init__(self, python: PreparedPython, pid: int) -> None:
        self.pid = pid
        self._python = python

    @property
    def returncode(self) -> int | None:
        """The exit status, negative for a signal; None while it runs or nobody has asked."""
        return self._python.status_of(self.pid)

    def poll(self) -> int | None:
        """The exit status, None while it runs."""
        self._python.receive()
        return self.returncode

    def wait(self, timeout: float) -> int:
        """The exit status. Raises `subprocess.TimeoutExpired`."""
        deadline_s = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline_s:
                raise subprocess.TimeoutExpired("a forked program", timeout)
            time.sleep(_POLL_S)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal unless it has ended."""
        if self.poll() is None:
            # the one that reaps it may be ahead of what it tells
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


class PreparedPython:
    """The process that forks, once it has imported `modules`."""

    def __init__(self, modules: Sequence[str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__)), str(theirs.fileno()), *modules],
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env=environment,
                pass_fds=[theirs.fileno()],
                preexec_fn=die_with_parent,
            )
        self._socket = ours
        self._lock = threading.Lock()
        self._statuses: dict[int, int] = {}
        self._pids: list[int] = []

    def start(
        self, arguments: Sequence[str], environment: Mapping[str, str], out: IO[bytes], err: IO[bytes]
    ) -> PreparedProcess:
        """Run `python *arguments`, where they begin with `-m MODULE` or with the path of a script."""
        with self._lock:
            request = json.dumps({"arguments": list(arguments), "environment": dict(environment)}).encode()
            socket.send_fds(self._socket, [request], [out.fileno(), err.fileno()])
            deadline_s = time.monotonic() + _START_TIMEOUT_S
            while not self._pids:
                if time.monotonic() > deadline_s or self._process.poll() is not None:
                    raise AssertionError("the process that forks programs does not answer")
                self._receive(_POLL_S)
            return PreparedProcess(self, self._pids.pop())

    def close(self) -> None:
        """End it, and with it every program that still runs, and wait until it has ended."""
        self._process.kill()
        self._process.wait(_END_TIMEOUT_S)
        self._socket.close()

    def status_of(self, pid: int) -> int | None:
        """The exit status of a program as far as it was received."""
        return self._statuses.get(pid)

    def receive(self) -> None:
        """Take in what was told."""
        with self._lock:
            self._receive(0)

    def _receive(self, timeout_s: float) -> None:
        while select.select([self._socket], [], [], timeout_s)[0]:
            message = json.loads(self._socket.recv(_MESSAGE_BYTES) or b"{}")
            if "pid" not in message:
                return
            if "status" in message:
                self._statuses[message["pid"]] = message["status"]
            else:
                self._statuses.pop(message["pid"], None)
                self._pids.append(message["pid"])
            timeout_s = 0


@cache
def prepared_python(*modules: str) -> PreparedPython:
    """The one of this process that has imported `modules`. Ask on the main thread: the kernel ties it to the thread
    that started it."""
    python = PreparedPython(modules)
    atexit.register(python.close)
    return python


def _serve(connection: socket.socket, modules: Sequence[str]) -> None:
    """Fork what is asked for and tell what ended, until nobody asks any more."""
    for module in modules:
        __import__(module)
    gc.collect()
    gc.freeze()
    ended, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    while True:
        ready, _, _ = select.select([connection.fileno(), ended], [], [])
        if ended in ready:
            os.read(ended, 4096)
            _tell_ended(connection)
        if connection.fileno() in ready:
            content, fds, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 2)
            if not content:
                return
            _fork(connection, json.loads(content), fds)


def _tell_ended(connection: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = found
            connection.send(json.dumps({"pid": pid, "status": os.waitstatus_to_exitcode(status)}).encode())


def _fork(connection: socket.socket, request: dict[str, Any], fds: list[int]) -> None:
    pid = os.fork()
    if pid:
        for fd in fds:
            os.close(fd)
        connection.send(json.dumps({"pid": pid}).encode())
        return
    die_with_parent()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    connection.close()
    for fd, target in zip(fds, (1, 2), strict=True):
        os.dup2(fd, target)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["environment"])
    _run(request["arguments"])
    # what follows is the end of any Python program
    sys.exit()


def _run(arguments: list[str]) -> None:
    """Run a module or a script as `__main__`."""
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as asking:
        _serve(asking, sys.argv[2:])
