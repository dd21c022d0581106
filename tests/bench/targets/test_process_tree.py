from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

import psutil

from baton.bench.targets.process import continue_tree, descendants, halt_tree
from tests.bench.targets.processes import WAIT_S, status_of, wait_for

FORKS = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for _ in range(5000):
    if os.fork() == 0:
        time.sleep(0.3)
        os._exit(0)
    time.sleep(0.002)
"""


@contextlib.contextmanager
def shell_over(program: str) -> Iterator[int]:
    """The pid of a process whose only child runs `program`."""
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {program!r}])"
    with subprocess.Popen([sys.executable, "-S", "-c", script]) as root:
        try:
            wait_for(lambda: bool(descendants(root.pid)))
            yield root.pid
        finally:
            halt_tree(root.pid, WAIT_S)  # or a fork could be missed
            for process in descendants(root.pid):
                process.kill()
            root.kill()


def test_a_tree_that_forks_all_the_time_is_halted_whole() -> None:
    with shell_over(FORKS) as root:
        wait_for(lambda: len(descendants(root)) > 5)
        halt_tree(root, WAIT_S)
        first = descendants(root)
        assert {process.status() for process in first} == {psutil.STATUS_STOPPED}
        assert descendants(root) == first
        continue_tree(root)
        wait_for(lambda: all(status_of(process.pid) != psutil.STATUS_STOPPED for process in first))
