"""Run a module of Baton as `python -m` does, as a child that does not outlive its parent.

`python -P tether.py PARENT_PID MODULE ARGUMENT...`, started by `baton.runtime.child`. On Linux the kernel kills this
process when the thread that started it ends, however it ends; elsewhere only the module runs. PARENT_PID 0 means no
tether. This is a file of its own because the request to the kernel has to come from the child, and a parent that has
threads must not run Python between fork and exec.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1


def die_with(parent_pid: int) -> None:
    """Ask the kernel for SIGKILL when the parent dies; exit now when it already has."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        sys.exit(1)


def main() -> None:
    """Tie this process to its parent, then become MODULE."""
    parent_pid, module = int(sys.argv[1]), sys.argv[2]
    if parent_pid:
        die_with(parent_pid)
    # -P keeps the working directory off the path, which may contain another `baton`; Baton's folder comes
    # first.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
