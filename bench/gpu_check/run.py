"""Runs the checks: one process for each group, a deadline for each, and a row for whatever happens.

Owns the processes of the groups and the time. Knows no check: what a process answers is rows.

Invariants: every check of the plan gives at least one row, and its rows stand for all its cases; a process that
crashed, hung or raised costs the check that it was at, the next check gets a new process; a group never outlives its
limit by more than the time to kill it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.child import Child
from bench.gpu_check.plan import Check, Group
from bench.gpu_check.rows import Row, failed_row, missing_row
from wire.errors import RequestFailed

_MODULE = "bench.gpu_check.worker_process"
UNAVAILABLE = "not available: "
"""How the answer of a process begins when a machine lacks what a check needs."""


@dataclass(frozen=True, slots=True)
class GroupResult:
    """The rows of one group, and what it took."""

    group: Group
    rows: tuple[Row, ...]
    taken_s: float
    limit_s: float


class GroupRun:
    """One group while it runs. `module` is the process that answers; another one in tests."""

    def __init__(self, group: Group, device: str, *, quick: bool, limit_s: float = 0.0, module: str = _MODULE) -> None:
        self._group = group
        self._spec = {"group": group.name, "device": device, "quick": quick}
        self._is_gpu = device != "cpu"
        self._limit_s = limit_s or group.limit_s(quick=quick)
        self._module = module
        self._child: Child | None = None
        self._deadline_s = 0.0

    def run(self, say: Callable[[str], None]) -> GroupResult:
        """Do all checks of the group; `say` hears which one is next."""
        begin_s = time.monotonic()
        self._deadline_s = begin_s + self._limit_s
        rows: list[Row] = []
        try:
            for check in self._group.checks:
                say(f"{self._group.name}: {check.name}")
                rows += self._run_check(check)
        finally:
            self._end()
        if not self._is_gpu:
            rows = [row.where_no_gpu_is() for row in rows]
        return GroupResult(self._group, tuple(rows), time.monotonic() - begin_s, self._limit_s)

    def _run_check(self, check: Check) -> list[Row]:
        name = self._group.name
        if self._left_s <= 0:
            reason = f"not reached within the {self._limit_s:g} s of this group"
            return [failed_row(name, check.name, reason, num_cases=check.num_cases)]
        try:
            child = self._started()
            child.tell("check", name=check.name)
            rows = [Row.from_json(fields) for fields in child.hear(max(self._left_s, 0.0))]
        except RequestFailed as error:
            self._end()
            reason = str(error)
            if reason.startswith(UNAVAILABLE):
                return [missing_row(name, check.name, reason.removeprefix(UNAVAILABLE), num_cases=check.num_cases)]
            return [failed_row(name, check.name, reason, num_cases=check.num_cases)]
        except (TypeError, ValueError, KeyError) as error:
            self._end()
            return [failed_row(name, check.name, f"rows that cannot be read: {error}", num_cases=check.num_cases)]
        return rows + uncovered(name, check, rows)

    @property
    def _left_s(self) -> float:
        return self._deadline_s - time.monotonic()

    def _started(self) -> Child:
        """The process of the group: a new one at first, and after a failure."""
        if self._child is None:
            self._child = Child(self._module, self._spec)
            self._child.hear(max(self._left_s, 0.0))
        return self._child

    def _end(self) -> None:
        """End the process and those that it has started, without asking it: it may be inside of the driver."""
        child, self._child = self._child, None
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.close()


def uncovered(group: str, check: Check, rows: Sequence[Row]) -> list[Row]:
    """A failure when rows do not stand for all cases of their check."""
    num_covered = sum(row.num_cases for row in rows)
    if rows and num_covered >= check.num_cases:
        return []
    reason = f"only {num_covered} of {check.num_cases} cases were run" if rows else "no row came of it"
    return [failed_row(group, check.name, reason, num_cases=check.num_cases - num_covered)]
