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

    def do(self, command: str, arguments: dict[str, Any]) -> Any:
        """`wait`: the server's exit status, None when it runs after `timeout_s`. `output`: the end of what it said.

        `end`: whether it left by itself.
        """
        if command == "end":
            return self._end()
        if command == "output":
            return self._last_output()
        try:
            return self._server.wait(arguments["timeout_s"])
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """End the server."""
        self._end()

    def _last_output(self) -> str:
        """Read beside the file's place, which the server writes at."""
        begin = max(0, os.fstat(self._output).st_size - _MAX_OUTPUT_BYTES)
        return os.pread(self._output, _MAX_OUTPUT_BYTES, begin).decode(errors="replace")

    def _end(self) -> bool:
        return end_tree(os.getpid(), self._server.pid, self._patience_s, KILL_S)


def _die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


if __name__ == "__main__":
    serve_parent(Warden)
