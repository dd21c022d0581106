"""A router as a process of its own, with the demo model's tokenizer: started, asked for its CPU time, ended by its id.

Owns the process. On Linux the kernel ends it when this process goes, however that happens.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time

from bench.child import ROOT
from wire.errors import RequestFailed

_TETHER = ROOT / "program" / "tether.py"
_READY_S = 30.0
_LEAVE_S = 5.0
_CPUCLOCK_SCHED = 2


class RouterProcess:
    """Ready once it is made. Context manager. Raises `RequestFailed` when it does not get ready."""

    def __init__(self) -> None:
        flags = ("--port=0", "--control-port=0", "--shutdown-timeout-s=1", "--log-level=warning")
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_TETHER), str(os.getpid()), "router", *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            process_group=0,
        )
        try:
            ready = json.loads(self._first_line())
        except BaseException:
            self.close()
            raise
        self.url = str(ready["address"])
        self.control_address = str(ready["control_address"])

    def __enter__(self) -> RouterProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def cpu_s(self) -> float:
        """Seconds of CPU that all its threads have used so far."""
        # clock_getcpuclockid(3), which Python does not have: nanoseconds, where /proc has hundredths of a second
        return time.clock_gettime((~self._process.pid << 3) | _CPUCLOCK_SCHED)

    def close(self) -> None:
        """End it."""
        self._process.terminate()
        try:
            self._process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _first_line(self) -> bytes:
        output = self._process.stdout
        if output is None or not select.select([output], [], [], _READY_S)[0]:
            raise RequestFailed(f"the router was not ready within {_READY_S:g} s")
        line = output.readline()
        if not line:
            raise RequestFailed(f"the router did not start (status {self._process.wait(_LEAVE_S)})")
        return line
