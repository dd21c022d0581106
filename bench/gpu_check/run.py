"""Runs the groups: one process for the tests of a group and one for each thing it measures, a deadline for each group,
and a row for whatever happens.

Owns the processes and the time. Knows no check: what a process says is rows, one line of JSON each; what else it says
goes on to stderr. Invariants: everything planned gives at least one row; a process that crashed, hung or raised costs
what it was at; a group never outlives its limit by more than the time to kill it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.child import ROOT
from bench.gpu_check.groups import Group
from bench.gpu_check.rows import Row, failed_row, missing_row
from program.child import PIPE, Child
from wire.errors import ChildFailed

MEASURE = "bench.gpu_check.measure_process"
TESTS = ROOT / "tests" / "gpu"
_PATIENCE_WITH_CPU = 3
"""Times the limit, where nothing is as fast as on a GPU."""
CORRECTNESS = "correctness"
"""Name of the row that says why the tests of a group were not run."""
_PYTEST_FLAGS = ("-p", "bench.gpu_check.pytest_rows", "-p", "no:cacheprovider", "-q", "--tb=short")


@dataclass(frozen=True, slots=True)
class GroupResult:
    """The rows of one group, and what it took."""

    group: Group
    rows: tuple[Row, ...]
    taken_s: float
    limit_s: float


class GroupRun:
    """One group while it runs. `tests` and `measure` are where things are; others in tests."""

    def __init__(self, group: Group, device: str, *, quick: bool, tests: Path = TESTS, measure: str = MEASURE) -> None:
        self._group = group
        self._device = device
        self._quick = quick
        self._tests = tests
        self._measure = measure
        self._limit_s = group.limit_s * (_PATIENCE_WITH_CPU if device == "cpu" else 1)
        self._deadline_s = 0.0

    def run(self, say: Callable[[str], None]) -> GroupResult:
        """Do all of the group; `say` hears what is next."""
        begin_s = time.monotonic()
        self._deadline_s = begin_s + self._limit_s
        rows: list[Row] = []
        if self._group.tests:
            say(f"{self._group.name}: {self._group.tests}")
            rows += self._run_tests()
        for name in self._group.measures:
            say(f"{self._group.name}: {name}")
            arguments = (self._group.name, self._device, "quick" if self._quick else "", name)
            rows += self._rows_of(name, self._measure, *arguments)
        if self._device == "cpu":
            rows = [row.where_no_gpu_is() for row in rows]
        return GroupResult(self._group, tuple(rows), time.monotonic() - begin_s, self._limit_s)

    def _run_tests(self) -> list[Row]:
        file = self._tests / self._group.tests
        if not file.is_file():
            return [missing_row(CORRECTNESS, self._group.name, "tests/gpu is part of a checkout, and this is none")]
        if any(importlib.util.find_spec(name) is None for name in ("pytest", "pytest_asyncio", "pytest_timeout")):
            return [missing_row(CORRECTNESS, self._group.name, "pip install pytest pytest-asyncio pytest-timeout")]
        return self._rows_of(self._group.tests, "pytest", *_PYTEST_FLAGS, str(file))

    def _rows_of(self, name: str, module: str, *arguments: str) -> list[Row]:
        if self._left_s <= 0:
            reason = f"not reached within the {self._limit_s:g} s of this group"
            return [failed_row(self._group.name, name, reason)]
        rows: list[Row] = []
        at = name
        try:
            with Child(module, *arguments, environment=self._environment(), stdout=PIPE) as child:
                for message in self._messages(child):
                    match message:
                        case {"row": dict(fields)}:
                            rows.append(Row.from_json(fields))
                        case _:
                            at = str(message["begun"])
        except ChildFailed as error:
            rows.append(failed_row(self._group.name, at, str(error)))
        except (TypeError, ValueError, KeyError) as error:
            rows.append(failed_row(self._group.name, at, f"a row that cannot be read: {error}"))
        return rows or [failed_row(self._group.name, name, "no row came of it")]

    def _messages(self, child: Child) -> Iterator[dict[str, Any]]:
        """What a process says of its rows, up to its "done". Raises `ChildFailed` when that does not come."""
        while True:
            line = child.read_line(max(0.0, self._left_s)).decode(errors="replace")
            if not line.startswith('{"'):
                sys.stderr.write(line + "\n" if line else "")
                continue
            message = json.loads(line)
            if "done" in message:
                return
            yield message

    def _environment(self) -> dict[str, str]:
        told = {"BATON_GPU_TESTS": self._device, "BATON_GPU_TESTS_QUICK": "1" if self._quick else ""}
        return {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", **os.environ, **told}

    @property
    def _left_s(self) -> float:
        return self._deadline_s - time.monotonic()
