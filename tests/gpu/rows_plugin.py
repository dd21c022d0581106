"""A plugin of pytest: says how every test went, see `baton.bench.gpu_check.rows.say`; run it with `-s`.

Owns how a test becomes a row. A test may record the properties `value`, `unit`, `bound`, `note` and `num_cases`.
"""

from __future__ import annotations

import math
from typing import Any

from baton.bench.gpu_check.rows import Row, Verdict, say, say_row

_VERDICTS = {"passed": Verdict.OK, "skipped": Verdict.NOT_RUN}


def pytest_runtest_logstart(nodeid: str) -> None:
    say({"begun": nodeid.rpartition("::")[2]})


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        say_row(_row_of(report, _crash(report), "collect", {}))


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or not report.passed:
        reason = str(report.longrepr[2]).removeprefix("Skipped: ") if report.skipped else _crash(report)
        say_row(_row_of(report, reason, report.when, dict(report.user_properties)))


def pytest_sessionfinish() -> None:
    say({"done": True})


def _row_of(report: Any, reason: str, when: str, properties: dict[str, Any]) -> Row:
    """One that fails by an assertion is wrong; one that fails otherwise could not be finished."""
    name, _, case = report.nodeid.rpartition("::")[2].removesuffix("]").partition("[")
    verdict = _VERDICTS.get(report.outcome, Verdict.FAILED)
    if verdict == Verdict.FAILED and when == "call" and reason.startswith(("AssertionError", "assert")):
        verdict = Verdict.WRONG
    note = properties.pop("note", "") if verdict == Verdict.OK else reason
    known = {key: properties[key] for key in ("value", "unit", "bound", "num_cases") if key in properties}
    if not math.isfinite(known.get("value") or 0.0):
        known["value"] = None
    return Row(name.removeprefix("test_").replace("_", " "), case, verdict, note=note, **known)


def _crash(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return " ".join((crash.message if crash else str(report.longrepr or "")).split())
