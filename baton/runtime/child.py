"""A child process that runs a module of Baton: started, waited for with a deadline, ended by its id.

Owns the process and its pipes. Does not know what the module does, apart from the events of its start
(`baton.runtime.events`).

Invariants: a child leads a session of its own, so a terminal's Ctrl-C does not reach it. It does not outlive its
parent: on Linux the kernel kills it when the *thread* that constructed the `Child` ends. When its end was noticed, by
`poll`, `wait`, `watch` or `end`, nothing of its process group is left. No signal is sent after the end was noticed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

from baton.runtime.events import Ready, parse_event
from baton.wire.errors import ChildFailed

PIPE, NOTHING = subprocess.PIPE, subprocess.DEVNULL
KILL_S = 30.0
"""The time that the kernel gets to end a process after SIGKILL."""
_TETHER = Path(__file__).with_name("tether.py")
_READ_BYTES = _WRITE_BYTES = 64 * 1024


class Child:
    """Runs `python -m module *arguments`. A context manager: at its end the child is killed. Raises `OSError` when the
    system cannot start a process.

    `environment` is the whole environment of the child, None: that of this process. `stdin`, `stdout` and `stderr` are
    `NOTHING`, `PIPE`, or a file descriptor; None shares the stream of this process. `pass_fds` stay open in the child.
    With `outlives_parent` the kernel leaves the child alone when its parent dies. That is for a module that ends by
    itself with its standard input, because it has to tidy up.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        stdin: int | None = NOTHING,
        stdout: int | None = NOTHING,
        stderr: int | None = None,
        pass_fds: Sequence[int] = (),
        outlives_parent: bool = False,
    ) -> None:
        self.module = module
        self._unread = bytearray()
        self._ending = threading.Lock()
        self._has_ended = False
        tether = [str(_TETHER), "0" if outlives_parent else str(os.getpid())]
        self._process = subprocess.Popen(
            [sys.executable, "-P", *tether, module, *arguments],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=None if environment is None else dict(environment),
            pass_fds=pass_fds,
            start_new_session=True,
        )

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def pid(self) -> int:
        """Process id, and id of the process group that the child leads."""
        return self._process.pid

    @property
    def stdin(self) -> IO[bytes]:
        """The child's standard input, opened with `PIPE`. Buffered: flush it."""
        return _piped(self._process.stdin)

    @property
    def stdout(self) -> IO[bytes]:
        """The child's standard output, opened with `PIPE`. A caller that reads from it must not call `read_line` or
        `wait_ready`."""
        return _piped(self._process.stdout)

    @property
    def stderr(self) -> IO[bytes]:
        """The child's standard error, opened with `PIPE`."""
        return _piped(self._process.stderr)

    def write(self, content: bytes, timeout_s: float) -> None:
        """Write to its standard input, which is not to be written to in any other way then.

        Raises `ChildFailed` when it has not taken all within `timeout_s`, or reads no more.
        """
        deadline_s = time.monotonic() + timeout_s
        descriptor, left = self.stdin.fileno(), memoryview(content)
        os.set_blocking(descriptor, False)
        while left:
            if not select.select([], [descriptor], [], max(0.0, deadline_s - time.monotonic()))[1]:
                raise ChildFailed(f"{self.module} took nothing within {timeout_s:g} s")
            try:
                left = left[os.write(descriptor, left[:_WRITE_BYTES]) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise ChildFailed(f"{self.module} reads no more: {error.strerror}") from None

    def read_line(self, timeout_s: float) -> bytes:
        """The next line of its standard output, without the newline.

        Raises `ChildFailed` when the line did not come within `timeout_s`, or when the output has ended.
        """
        deadline_s = time.monotonic() + timeout_s
        output = self.stdout.fileno()
        num_searched = 0
        while (end := self._unread.find(b"\n", num_searched)) < 0:
            num_searched = len(self._unread)
            if not select.select([output], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
                raise ChildFailed(f"{self.module} said nothing within {timeout_s:g} s")
            piece = os.read(output, _READ_BYTES)
            if not piece:
                raise ChildFailed(f"{self.module} {describe_end(self.wait(max(0.0, deadline_s - time.monotonic())))}")
            self._unread += piece
        line = bytes(self._unread[:end])
        del self._unread[: end + 1]
        return line

    def wait_ready(self, timeout_s: float) -> Ready:
        """Read the child's standard output up to the event that says it is ready. Raises as `read_line`."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            line = self.read_line(max(0.0, deadline_s - time.monotonic()))
            if isinstance(event := parse_event(line.decode(errors="replace")), Ready):
                return event

    def terminate(self) -> None:
        """Ask the child to finish: SIGTERM to the process alone."""
        self._process.terminate()

    def hang_up(self) -> None:
        """Ask the child to read its files again: SIGHUP to the process alone, which ends one that does not expect
        it."""
        self._process.send_signal(signal.SIGHUP)

    def kill(self) -> None:
        """Send SIGKILL to the child and to everything in its process group. Returns at once: `wait` notices the end."""
        with self._ending:
            if not self._has_ended:
                self._kill_group()

    def poll(self) -> int | None:
        """The exit status, -N after signal N; None while it runs."""
        status = self._process.poll()
        if status is not None:
            self._note_end()
        return status

    def wait(self, timeout_s: float) -> int | None:
        """The exit status, as of `poll`, once the child has ended; None when it runs after `timeout_s` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self.poll()

    def watch(self) -> int:
        """The child's exit status, however long it runs: for a thread that does nothing else."""
        status = self._process.wait()
        self._note_end()
        return status

    def end(self, patience_s: float = 0.0) -> int | None:
        """End it and close its pipes: SIGTERM, then SIGKILL when it still runs after `patience_s`; 0: SIGKILL at once.

        Returns the exit status, None if even the kernel could not end it within `KILL_S`.
        """
        if patience_s > 0:
            self.terminate()
            self.wait(patience_s)
        self.kill()
        status = self.wait(KILL_S)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):  # the child can no longer read what was written and not flushed
                    pipe.close()
        return status

    def _note_end(self) -> None:
        with self._ending:
            if not self._has_ended:
                self._has_ended = True
                self._kill_group()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def describe_end(status: int | None) -> str:
    """An exit status in words: "exited with status 3", "was killed by SIGSEGV"."""
    if status is None:
        return "closed its output"
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def is_stopped(pid: int) -> bool:
    """Whether the process of this machine is stopped, as by SIGSTOP."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False


def _piped(stream: IO[bytes] | None) -> IO[bytes]:
    if stream is None:
        raise ValueError("this stream of the child was not opened with PIPE")
    return stream
