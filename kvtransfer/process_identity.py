"""Identifies processes of this host, so that a receiver knows which process could still write into shared memory."""

from __future__ import annotations

import os
from pathlib import Path

from baton.kvtransfer.messages import ProcessIdentity


def this_process() -> ProcessIdentity:
    """The identity of the calling process."""
    return ProcessIdentity(_host_identity(), os.getpid(), _start_ticks(os.getpid()))


def shares_memory(mine: ProcessIdentity, theirs: ProcessIdentity) -> bool:
    """Whether both see the same /dev/shm and the same process table."""
    return bool(mine.host) and mine.host == theirs.host


def shares_processes(mine: ProcessIdentity, theirs: ProcessIdentity) -> bool:
    """Whether both are known to see the same process table."""
    return bool(mine.host) and _processes_of(mine) == _processes_of(theirs)


def is_elsewhere(mine: ProcessIdentity, theirs: ProcessIdentity) -> bool:
    """Whether the two are known to see different process tables: on two machines, or in two containers of one
    machine."""
    return bool(mine.host) and bool(theirs.host) and _processes_of(mine) != _processes_of(theirs)


def is_gone(process: ProcessIdentity) -> bool:
    """Whether a process of this host has ended for good.

    A stopped (frozen) process is not gone, and neither is one whose state cannot be read now. A process counts as a
    possible writer until its end is proven.
    """
    try:
        return _start_ticks(process.pid) != process.start_ticks or _is_zombie(process.pid)
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False


def _host_identity() -> str:
    """Boot id, process namespace and shared-memory mount; empty where the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}:{os.stat('/dev/shm').st_dev}"
    except OSError:
        return ""


def _processes_of(process: ProcessIdentity) -> list[str]:
    return process.host.split(":")[:2]


def _stat_fields(pid: int) -> list[str]:
    # the command name in parentheses may contain spaces: fields are counted after it
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _start_ticks(pid: int) -> int:
    return int(_stat_fields(pid)[19])


def _is_zombie(pid: int) -> bool:
    return _stat_fields(pid)[0] in ("Z", "X")
