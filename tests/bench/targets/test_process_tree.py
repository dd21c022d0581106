from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from baton.bench.targets.process import continue_tree, descendants, halt_tree, pinning
from tests.bench.targets.processes import WAIT_S, state_of, wait_for

FORKS = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for _ in range(5000):
    if os.fork() == 0:
        time.sleep(0.3)
        os._exit(0)
    time.sleep(0.002)
"""
WORKS = "while True: pass"


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
        wait_for(lambda: all(state_of(process.pid) != "T" for process in first))


@pytest.mark.parametrize(
    "before",
    ["import os", "import os, threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"],
)
def test_it_is_said_on_which_cores_a_process_works(before: str) -> None:
    core = max(os.sched_getaffinity(0))
    with shell_over(f"import os, threading\n{before}\nos.sched_setaffinity(0, {{{core}}})\n{WORKS}") as root:
        wait_for(lambda: descendants(root)[0].cpu_times().user > 0.3)
        (found,) = pinning(root)
        assert found.startswith("python")
        assert found.endswith(f" on {core}")
