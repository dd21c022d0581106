"""The parent of a started server: a process of its own, so that a server never outlives the benchmark.

Runs `PATIENCE_S COMMAND...`. Owns the server's process and all that descends from it. It adopts orphans
(PR_SET_CHILD_SUBREAPER), so a server's workers are below it whatever session they made, and whether or not their own
parent still lives. Its input ends with the benchmark, however that went: then the server is ended. The server dies with
it in turn. It leaves when nothing of the server is left, and nobody talks to it: the output is the server's alone.
"""

from __future__ import annotations

import ctypes
import functools
import os
import select
import subprocess
import sys

from baton.bench.targets.process import descendants, end_tree
from baton.runtime.child import KILL_S
from baton.runtime.tether import die_with

_PR_SET_CHILD_SUBREAPER = 36
_LOOK_AGAIN_S = 0.1


def main(patience_s: float, command: list[str]) -> None:
    """Run the server until it and all that it left behind have gone, or until the input ends."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=functools.partial(die_with, os.getpid()),  # this process has no threads, so that is safe
    )
    # to look for what a leader left behind costs time that a measured server needs: only when the leader has gone
    while server.poll() is None or descendants(os.getpid()):
        if select.select([sys.stdin], [], [], _LOOK_AGAIN_S)[0]:
            end_tree(os.getpid(), server.pid, patience_s, KILL_S)
            return


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
