"""Which tests run which lines: plugins of pytest, for the process that runs tests.

`Tracing` notes, for each test that passes, the lines of the chosen files that ran during it, its fixtures included, in
all threads of the process; what child processes run is not seen. `Chosen` runs some tests in a given order, and knows
the first that failed.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import hypothesis
import pytest

_OVER_TIME = "Failed: Timeout"
"""What pytest-timeout says."""


@dataclass
class Traced:
    """Of each test that passed: its seconds, and the lines it ran. Lines by file and number; tests by their number."""

    tests: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    lines: dict[str, dict[int, list[int]]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)


class Tracing:
    """Fills a `Traced`."""

    def __init__(self, root: Path, files: Collection[str]) -> None:
        self.traced = Traced()
        # some folders are imported by a link
        self._files = {str(path): file for file in files for path in (root / file, root / "baton" / file)}
        self._lines: dict[str, set[int]] = {}
        self._failed = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """One test, with its fixtures."""
        self._lines, self._failed = {file: set() for file in self._files.values()}, False
        begin_s = time.perf_counter()
        threading.settrace(self._call)
        sys.settrace(self._call)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)
            self._note(item.nodeid, time.perf_counter() - begin_s)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """See pytest."""
        self._failed |= report.outcome != "passed"

    def _note(self, test: str, seconds: float) -> None:
        if self._failed:
            self.traced.failed.append(test)
            return
        number = len(self.traced.tests)
        self.traced.tests.append(test)
        self.traced.seconds.append(seconds)
        for file, lines in self._lines.items():
            known = self.traced.lines.setdefault(file, {})
            for line in tuple(lines):
                known.setdefault(line, []).append(number)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        file = self._files.get(frame.f_code.co_filename)
        if file is None:
            return None
        lines = self._lines[file]

        def line(frame: FrameType, event: str, argument: Any) -> Any:
            lines.add(frame.f_lineno)
            return line

        return line


class Chosen:
    """Runs these tests only, in this order, with the same random examples each time; those that are not there are left
    out."""

    def __init__(self, tests: Sequence[str]) -> None:
        self._places = {test: place for place, test in enumerate(tests)}
        self.first_failed, self.has_hung = "", False
        self.num_found = 0

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Iterator[None]:
        """Behind `tests/conftest.py`, which loads the suite's profile. A failure is not made smaller: that it fails is
        all that counts."""
        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        hypothesis.settings.register_profile("mutation", phases=phases, derandomize=True, database=None)
        hypothesis.settings.load_profile("mutation")
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Iterator[None]:
        """Behind `tests/conftest.py`, which has an order of its own."""
        yield
        items[:] = sorted(
            (each for each in items if each.nodeid in self._places), key=lambda item: self._places[item.nodeid]
        )
        self.num_found = len(items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """See pytest."""
        if report.outcome == "failed" and not self.first_failed:
            self.first_failed, self.has_hung = report.nodeid, _OVER_TIME in report.longreprtext
