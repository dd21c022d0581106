"""A plugin of pytest: says how every test went as a line of JSON for `bench.gpu_check.run`.

Owns how a test becomes a row. A test may record the properties `value`, `unit`, `bound`, `note` and `num_cases`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from bench.gpu_check.rows import Row, Verdict


def pytest_sessionstart(session: Any) -> None:
    """Called by pytest, once it has a terminal to write to."""
    session.config.pluginmanager.register(_RowWriter(session.config.get_terminal_writer()))


class _RowWriter:
    """The hooks. A message is {"begun": name}, {"row": ...}, or {"done": number of tests}."""

    def __init__(self, terminal: Any) -> None:
        self._terminal = terminal
        self._num_tests = 0

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._say({"begun": nodeid.rpartition("::")[2]})

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._say({"row": row_of(report.nodeid, "failed", _crash(report), "collect", {}).as_json()})

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or not report.passed:
            self._num_tests += 1
            reason = str(report.longrepr[2]).removeprefix("Skipped: ") if report.skipped else _crash(report)
            row = row_of(report.nodeid, report.outcome, reason, report.when, dict(report.user_properties))
            self._say({"row": row.as_json()})

    def pytest_sessionfinish(self) -> None:
        self._say({"done": self._num_tests})

    def _say(self, message: dict[str, Any]) -> None:
        self._terminal.line("\n" + json.dumps(message))


def row_of(nodeid: str, outcome: str, reason: str, when: str, properties: Mapping[str, Any]) -> Row:
    """The row of a test. One that fails by an assertion is wrong; one that fails otherwise could not be finished."""
    name, _, case = nodeid.rpartition("::")[2].removesuffix("]").partition("[")
    verdict = {"passed": Verdict.OK, "skipped": Verdict.NOT_RUN}.get(outcome, Verdict.FAILED)
    if verdict == Verdict.FAILED and when == "call" and reason.startswith(("AssertionError", "assert")):
        verdict = Verdict.WRONG
    value = properties.get("value")
    return Row(
        name=name.removeprefix("test_").replace("_", " "),
        case=case,
        value=value if value is not None and math.isfinite(value) else None,
        unit=properties.get("unit", ""),
        bound=properties.get("bound"),
        target=None,
        verdict=verdict,
        note=properties.get("note", "") if verdict == Verdict.OK else reason,
        num_cases=properties.get("num_cases", 1),
    )


def _crash(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return " ".join((crash.message if crash else str(report.longrepr or "")).split())
