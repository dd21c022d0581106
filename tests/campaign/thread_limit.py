"""A process that gets no more threads and no more children: it is put into a control group that has as many as it has.

RLIMIT_NPROC does not bind root, and counts all processes of a user. Needs the "pids" controller of control groups
(version 1) and the right to make a group; `is_possible` says whether they are there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup/pids")
_PROCESSES = "cgroup.procs"


def is_possible() -> bool:
    """Whether processes can be limited here."""
    return os.access(_ROOT / _PROCESSES, os.W_OK)


@contextlib.contextmanager
def no_more_threads(pid: int) -> Iterator[None]:
    """Let the process have the threads that it has now, and no other, while the block runs. Raises `OSError` when it
    is gone."""
    home, group = _home_of(pid), _ROOT / f"baton-campaign-{pid}"
    group.mkdir(exist_ok=True)
    try:
        _write(group / _PROCESSES, pid)
        _write(group / "pids.max", (group / "pids.current").read_text())
        yield
    finally:
        for left in (group / _PROCESSES).read_text().split():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                _write(home / _PROCESSES, left)
        with contextlib.suppress(OSError):  # one that is ending is still in it: an empty group costs nothing
            group.rmdir()


def _home_of(pid: int) -> Path:
    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    return _ROOT / next(line.rpartition(":")[2] for line in lines if ":pids:" in line).lstrip("/")


def _write(file: Path, value: object) -> None:
    file.write_text(f"{value}")
