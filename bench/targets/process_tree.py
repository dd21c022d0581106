"""A process and all that descend from it, by /proc: who they are, what they use, how they are halted and ended.

Owns the reading of /proc and the signals. The root itself is never in the tree: it is the warden, which stays awake to
end the others. Every signal goes to one process id that was read the moment before.
Invariant: `halt_tree` returns when nothing of the tree runs, not even a process that was forked meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from wire.errors import RequestFailed

_PROC = Path("/proc")
_LOOK_AGAIN_S = 0.01  # /proc tells nobody that it changed
_NUM_CLEAN_LOOKS = 2
_MAX_LABEL_WORDS = 3
_MIN_WORK_SHARE = 0.05
"""Of the busiest thread's CPU time: what used less is not where a process computes."""


@dataclass(frozen=True, slots=True)
class Process:
    """One entry of /proc. `cpu_s`: its own time and that of the children it has waited for."""

    pid: int
    parent: int
    state: str
    cpu_s: float

    @property
    def is_alive(self) -> bool:
        """False once only its exit status is left."""
        return self.state not in "ZX"


@dataclass(frozen=True, slots=True)
class Pinning:
    """On which cores those threads of a process may run that do its work."""

    process: str
    cores: tuple[int, ...]


def descendants(root: int) -> tuple[Process, ...]:
    """The living processes below `root`, parents first."""
    return tuple(process for process in _walk(root) if process.is_alive)


def cpu_seconds(root: int) -> float:
    """CPU time of all that is below `root`, user and system. What dies unseen by its parent is not counted."""
    return sum(process.cpu_s for process in _walk(root))


def pinning(root: int) -> tuple[Pinning, ...]:
    """Of every process below `root`."""
    found = []
    for process in descendants(root):
        with contextlib.suppress(OSError):
            found.append(Pinning(_label(process.pid), _cores(process.pid)))
    return tuple(found)


def halt_tree(root: int, timeout_s: float) -> None:
    """SIGSTOP to all below `root`, until none runs. Raises `RequestFailed`.

    A walk is not one moment: a process may fork after the folder was listed and halt before it is read. Its child is in
    the next listing, so the tree has to be found at rest twice in a row.
    """
    num_clean = 0

    def at_rest() -> bool:
        nonlocal num_clean
        running = [process for process in descendants(root) if process.state != "T"]
        _signal(running, signal.SIGSTOP)
        num_clean = 0 if running else num_clean + 1
        return num_clean == _NUM_CLEAN_LOOKS

    if not until(at_rest, timeout_s):
        raise RequestFailed(f"the processes below {root} could not be halted within {timeout_s:g} s")


def continue_tree(root: int) -> None:
    """SIGCONT to all below `root`: what is halted cannot fork, so one walk finds them."""
    _signal(descendants(root), signal.SIGCONT)


def end_tree(root: int, leader: int, patience_s: float, kill_s: float) -> bool:
    """End all below `root`; whether SIGTERM was enough. Raises `RequestFailed` when SIGKILL does not help either.

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

    def is_gone() -> bool:
        left = descendants(root)
        _signal(left, signal.SIGKILL)
        return not left

    if not until(is_gone, kill_s):
        left = ", ".join(str(process.pid) for process in descendants(root))
        raise RequestFailed(f"processes that cannot be killed: {left}")
    return False


def until(is_true: Callable[[], bool], timeout_s: float) -> bool:
    """Look again and again; False when the time is over. Looks once at least."""
    deadline_s = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(_LOOK_AGAIN_S)
    return True


def _walk(root: int) -> list[Process]:
    children: defaultdict[int, list[Process]] = defaultdict(list)
    for entry in os.listdir(_PROC):
        if entry.isdigit() and (process := _read(int(entry))):
            children[process.parent].append(process)
    found, parents = [], [root]
    while parents:
        below = children.pop(parents.pop(0), [])
        found.extend(below)
        parents.extend(process.pid for process in below)
    return found


def _read(pid: int) -> Process | None:
    """None when it has gone."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may hold spaces and brackets
    ticks = sum(int(value) for value in fields[11:15])  # utime, stime, cutime, cstime: see proc(5)
    return Process(pid, int(fields[1]), fields[0], ticks / os.sysconf("SC_CLK_TCK"))


def _signal(processes: list[Process] | tuple[Process, ...], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def _cores(pid: int) -> tuple[int, ...]:
    """Of the threads that work: an engine's are often bound one by one, while idle ones of libraries roam."""
    spent = [(_thread_ticks(pid, int(thread)), int(thread)) for thread in os.listdir(_PROC / str(pid) / "task")]
    least = _MIN_WORK_SHARE * max(ticks for ticks, _ in spent)
    working = [os.sched_getaffinity(thread) for ticks, thread in spent if ticks >= least]
    return tuple(sorted(set[int]().union(*working)))


def _thread_ticks(pid: int, thread: int) -> int:
    """CPU time of one thread, user and system."""
    stat = (_PROC / str(pid) / "task" / str(thread) / "stat").read_text(errors="replace")
    return sum(int(value) for value in stat.rpartition(")")[2].split()[11:13])


def _label(pid: int) -> str:
    """The first words of its command line, without flags, numbers and folders."""
    words = (_PROC / str(pid) / "cmdline").read_text(errors="replace").replace("\0", " ").split()
    told = [Path(word).name for word in words if not word.startswith("-") and not word.isdigit()]
    return " ".join(told[:_MAX_LABEL_WORDS])
