"""A process and all that descend from it: who they are, what they use, how they are halted and ended.

Owns the walk and the signals; psutil reads the system, and signals nobody who has got another's id. The root itself is
never in the tree: it is the warden, which stays awake to end the others.
Invariant: `halt_tree` returns when nothing of the tree runs, not even a process that was forked meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path

import psutil

from wire.errors import RequestFailed

_LOOK_AGAIN_S = 0.01  # nobody is told that a process halted or went
_NUM_CLEAN_LOOKS = 2
_MAX_LABEL_WORDS = 3
_MIN_WORK_SHARE = 0.05
"""Of the busiest thread's CPU time: what used less is not where a process computes."""
_GONE = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def descendants(root: int) -> list[psutil.Process]:
    """The living processes below `root`, parents first."""
    return [process for process in _walk(root) if _status(process) not in _GONE]


def cpu_seconds(root: int) -> float:
    """CPU time of all that is below `root`, user and system. What dies unseen by its parent is not counted."""
    found = 0.0
    for process in _walk(root):
        with contextlib.suppress(psutil.Error):
            found += sum(process.cpu_times()[:4])  # user, system, and both of the children that it has waited for
    return found


def pinning(root: int) -> list[str]:
    """Every process below `root` with the cores that its working threads may run on: "name on 0,1".

    The name is the first words of its command line, without flags, numbers and folders. An engine's threads are often
    bound one by one, while idle ones of libraries roam: those do not count.
    """
    found = []
    for process in descendants(root):
        with contextlib.suppress(psutil.Error, OSError):
            spent_s = {thread.id: thread.user_time + thread.system_time for thread in process.threads()}
            least_s = _MIN_WORK_SHARE * max(spent_s.values())
            working = [os.sched_getaffinity(thread) for thread, used_s in spent_s.items() if used_s >= least_s]
            words = " ".join(process.cmdline()).split()
            names = [Path(word).name for word in words if not word.startswith("-") and not word.isdigit()]
            cores = ",".join(map(str, sorted(set().union(*working))))
            found.append(f"{' '.join(names[:_MAX_LABEL_WORDS])} on {cores}")
    return found


def halt_tree(root: int, timeout_s: float) -> None:
    """SIGSTOP to all below `root`, until none runs. Raises `RequestFailed`.

    A walk is not one moment: a process may fork after the folder was listed and halt before it is read. Its child is in
    the next listing, so the tree has to be found at rest twice in a row.
    """
    num_clean = 0

    def at_rest() -> bool:
        nonlocal num_clean
        running = [process for process in descendants(root) if _status(process) != psutil.STATUS_STOPPED]
        _signal(running, signal.SIGSTOP)
        num_clean = 0 if running else num_clean + 1
        return num_clean == _NUM_CLEAN_LOOKS

    if not until(at_rest, timeout_s):
        raise RequestFailed(f"the processes below {root} could not be halted within {timeout_s:g} s")


def continue_tree(root: int) -> None:
    """SIGCONT to all below `root`: what is halted cannot fork, so one walk finds them."""
    _signal(descendants(root), signal.SIGCONT)


def end_tree(root: int, leader: int, patience_s: float, kill_s: float) -> bool:
    """End all below `root`; whether SIGTERM was enough.

    `leader` is asked first and may end the others in its own order; what is left without it is asked next. When
    `patience_s` is over the rest is killed.
    """
    deadline_s = time.monotonic() + patience_s
    continue_tree(root)
    _signal([process for process in descendants(root) if process.pid == leader], signal.SIGTERM)
    until(lambda: all(process.pid != leader for process in descendants(root)), patience_s)
    _signal(descendants(root), signal.SIGTERM)
    if until(lambda: not descendants(root), deadline_s - time.monotonic()):
        return True
    until(lambda: not _signal(descendants(root), signal.SIGKILL), kill_s)
    return False


def until(is_true: Callable[[], bool], timeout_s: float) -> bool:
    """Look again and again; False when the time is over. Looks once at least."""
    deadline_s = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(_LOOK_AGAIN_S)
    return True


def _walk(root: int) -> list[psutil.Process]:
    try:
        return psutil.Process(root).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _status(process: psutil.Process) -> str:
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_DEAD


def _signal(processes: Collection[psutil.Process], number: signal.Signals) -> int:
    """The number of processes that there were to signal."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
    return len(processes)
