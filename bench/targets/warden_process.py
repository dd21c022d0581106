"""The parent of a started server: a process of its own, so that a server never outlives the benchmark.

Owns the server's process and all that descends from it. It adopts orphans (PR_SET_CHILD_SUBREAPER), so a server's
workers are below it whatever session they made, and whether or not their own parent still lives. Its input ends with
the benchmark, however that went: then the server is ended. The server dies with it in turn (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import tempfile
from typing import Any

from bench.child import serve_parent
from bench.targets.process_tree import end_tree
from wire.errors import InvalidSetting

KILL_S = 10.0
"""What the kernel gets to clear it away after SIGKILL."""
_MAX_OUTPUT_BYTES = 64 * 1024
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class Warden:
    """Starts a command.

    `spec`: its `command`, its whole `environment`, and how many seconds it gets to leave after SIGTERM, `patience_s`.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        self._patience_s = spec["patience_s"]
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._output, path = tempfile.mkstemp(prefix="baton-bench-")
        os.unlink(path)  # it stays as long as it is open, and nothing of it is left whatever happens
        try:
            self._server = subprocess.Popen(
                spec["command"],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                env=spec["environment"],
                start_new_session=True,
                preexec_fn=_die_with_parent,  # this process has no threads, so that is safe
            )
        except OSError as error:
            raise InvalidSetting(f"{spec['command'][0]}: {error.strerror}") from None

    def wait(self, timeout_s: float) -> int | None:
        """The server's exit status; None when it still runs after `timeout_s`."""
        try:
            return self._server.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        self.end()

    def output(self) -> str:
        """The end of what the server said, read beside the file's place, which the server writes at."""
        begin = max(0, os.fstat(self._output).st_size - _MAX_OUTPUT_BYTES)
        return os.pread(self._output, _MAX_OUTPUT_BYTES, begin).decode(errors="replace")

    def end(self) -> bool:
        """End the server; whether it left by itself."""
        return end_tree(os.getpid(), self._server.pid, self._patience_s, KILL_S)


def _die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


if __name__ == "__main__":
    serve_parent(Warden)
