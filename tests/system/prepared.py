"""Programs, and the processes that run tests, without the seconds of processor time that imports take.

Owns a process that has imported what its children import and does nothing but fork: each program is a process of
its own, with its own arguments, environment and files, as if it had been started; only the imports are done already.
Tests of starts and ends (`tests/launch`, `test_baton_serve.py`) start programs as users do. A run of the whole suite
has one such process (`fork_workers`): it forks the processes that run tests, and then the programs for which these ask
(`prepared_python`). Where there is none, each process that asks has one of its own.

Invariants: the process that forks has one thread, and neither torch nor a library below it has computed anything yet.
It ends with the process that started it, and its children end with it, and with those that asked for them: `close`
ends and reaps them at that process's exit, and the kernel or the process that forks does where there is no exit. A
child that has ended by itself has joined its threads and called what is registered with `atexit`, and leaves its memory
to the kernel, as those of `multiprocessing` do: freeing all that was imported takes a quarter of a second.
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
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, Any, NoReturn, cast

ROOT = Path(__file__).resolve().parents[2]
NODE_MODULES = ("baton.node.process", "baton.prefill_node.node", "baton.decode_node.node")
ROUTER_MODULES = (
    "baton.router.app",
    "baton.router.nodes.control",
    "baton.router.requests.relay",
    "baton.router.http.served_model",
    "baton.router.http.serving.server",
)
"""Those that bring in nearly all that a node, or a router, imports."""
_SHARED = "BATON_TEST_PREPARED"
"""The environment's name for the address of the process that forks for a whole run."""
_WORKER = "--worker"
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
    """Asks the process that forks for programs: that of the whole run, or one of its own that imports `modules`."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        if _SHARED in os.environ:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._socket.connect(os.environ[_SHARED])
        else:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._process = _start(theirs, modules)
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
                has_ended = self._process is not None and self._process.poll() is not None
                if time.monotonic() > deadline_s or has_ended:
                    raise AssertionError("the process that forks programs does not answer")
                self._receive(_POLL_S)
            return PreparedProcess(self, self._pids.pop())

    def close(self) -> None:
        """End every program that still runs, and wait until they have ended."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(_END_TIMEOUT_S)
        else:
            self._socket.shutdown(socket.SHUT_WR)
            self._socket.settimeout(_END_TIMEOUT_S)
            while self._socket.recv(_MESSAGE_BYTES):  # until all have been reaped
                pass
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


def fork_workers(specs: Iterable[Any], modules: Sequence[str]) -> None:
    """Let the processes that run tests be forked, those of `specs` (execnet's), and the programs that they ask for,
    once `modules` are imported. To be called once, on the main thread of the process that starts them."""
    folder = tempfile.TemporaryDirectory(prefix="baton-tests-")
    address = os.environ[_SHARED] = os.path.join(folder.name, "prepared")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen()
    process = _start(listener, modules)

    def close() -> None:
        process.kill()
        process.wait(_END_TIMEOUT_S)
        folder.cleanup()

    atexit.register(close)
    for spec in specs:
        spec.python = f"{sys.executable} -S {__file__} {_WORKER} {address} {spec.id}"


def _start(asking: socket.socket, modules: Sequence[str]) -> subprocess.Popen[bytes]:
    """The process that forks for who connects to this socket, if it listens, or for its other end."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    with asking:
        return subprocess.Popen(
            [sys.executable, str(Path(__file__)), str(asking.fileno()), *modules],
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
            env=environment,
            pass_fds=[asking.fileno()],
            preexec_fn=die_with_parent,
        )


@dataclass(slots=True)
class _Owner:
    """Who asks for programs by a connection; `pids` of those that have not been reaped."""

    connection: socket.socket
    pids: set[int] = field(default_factory=set)
    is_gone: bool = False


class _Forker:
    """Forks what is asked for and tells what has ended, until nobody can ask any more."""

    def __init__(self, asking: socket.socket) -> None:
        self._listener = asking if asking.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) else None
        self._owners = [] if self._listener is not None else [_Owner(asking)]
        self._ended, self._woken = os.pipe()
        os.set_blocking(self._woken, False)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)

    def run(self) -> None:
        """See the class. A child does not return from it."""
        while self._listener is not None or self._owners:
            asking = [owner.connection for owner in self._owners if not owner.is_gone]
            if self._listener is not None:
                asking.append(self._listener)
            ready, _, _ = select.select([self._ended, *(each.fileno() for each in asking)], [], [])
            if self._ended in ready:
                os.read(self._ended, 4096)
            for owner in [owner for owner in self._owners if owner.connection.fileno() in ready]:
                self._serve(owner)
            if self._listener is not None and self._listener.fileno() in ready:
                self._owners.append(_Owner(self._listener.accept()[0]))
            self._reap()

    def _serve(self, owner: _Owner) -> None:
        content, fds, _, _ = socket.recv_fds(owner.connection, _MESSAGE_BYTES, 3)
        if content:
            self._fork(owner, json.loads(content), fds)
            return
        owner.is_gone = True
        for pid in owner.pids:
            os.kill(pid, signal.SIGKILL)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = found
                for owner in [owner for owner in self._owners if pid in owner.pids]:
                    owner.pids.remove(pid)
                    self._tell(owner, {"pid": pid, "status": os.waitstatus_to_exitcode(status)})
        for owner in [owner for owner in self._owners if owner.is_gone and not owner.pids]:
            self._owners.remove(owner)
            owner.connection.close()

    @staticmethod
    def _tell(owner: _Owner, message: dict[str, int]) -> None:
        with contextlib.suppress(ConnectionError):  # it has just gone
            owner.connection.send(json.dumps(message).encode())

    def _fork(self, owner: _Owner, request: dict[str, Any], fds: list[int]) -> None:
        pid = os.fork()
        if pid:
            for fd in fds:
                os.close(fd)
            owner.pids.add(pid)
            self._tell(owner, {"pid": pid})
            return
        die_with_parent()
        self._let_go()
        for fd, target in zip(reversed(fds), (2, 1, 0), strict=False):
            os.dup2(fd, target)
            os.close(fd)
        os.environ.clear()
        os.environ.update(request["environment"])
        _end(_work(request["worker"]) if "worker" in request else _run(request["arguments"]))

    def _let_go(self) -> None:
        """Leave a child nothing of the process that forks."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.close(self._ended)
        os.close(self._woken)
        for owner in self._owners:
            owner.connection.close()
        if self._listener is not None:
            self._listener.close()


def _run(arguments: list[str]) -> int:
    """Run a module or a script as `__main__`; the exit status."""
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as ended:
        if isinstance(ended.code, str):
            sys.stderr.write(f"{ended.code}\n")
            return 1
        return ended.code or 0
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def _work(name: str) -> int:
    """Run the tests that execnet gives to this process: what it starts in others by the source of a module, which is
    its first line, is there already."""
    from execnet.gateway_base import get_execmodel, init_popen_io, serve

    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv = ["-c"]
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdin.readline()
    gateway = init_popen_io(get_execmodel("main_thread_only"))
    gateway.write(b"1")
    serve(cast(Any, gateway), id=f"{name}-worker")
    return 0


def _end(status: int) -> NoReturn:
    """See the invariants."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def _ask_for_worker(address: str, name: str) -> int:
    """Stand for a forked process, with this one's files, until it has ended; its exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(address)
        request = {"worker": name, "environment": dict(os.environ)}
        socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
        for target in (0, 1):  # its other end must see when the forked process closes them
            os.close(target)
        while content := connection.recv(_MESSAGE_BYTES):
            message = json.loads(content)
            if "status" in message:
                return abs(int(message["status"]))
    return 1


if __name__ == "__main__":
    if sys.argv[1] == _WORKER:
        sys.exit(_ask_for_worker(*sys.argv[2:4]))  # execnet adds what it says to any Python
    for _module in sys.argv[2:]:
        __import__(_module)
    gc.collect()
    gc.freeze()
    _Forker(socket.socket(fileno=int(sys.argv[1]))).run()
