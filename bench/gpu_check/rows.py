"""The rows of the tables, what makes a row right, wrong or slow, how rows travel, and the tables for people.

Owns the verdicts, the exit status and the formats. Knows no device and no check: whoever measured hands over numbers.

A row about *correctness* is a test of `tests/gpu`, with a bound where it has one. A row about *speed* has a bound that
the machine sets (the floor of a time, the ceiling of a rate), measured in the same run, and perhaps a target that Baton
sets itself. Invariants: what is not a number is never right; a value that beats the machine's own limit is doubted, not
praised; what crashed, hung or was not reached is a failure, never an omission.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.bench.report.document import aligned

CORRECTNESS = "correctness"
"""Name of the row that says why the tests of a group were not run."""
_DOUBTED_SHARE = 1.05
"""A speed above this share of the machine's limit says that the limit or the clock is wrong."""
_HEADINGS = ("check", "case", "value", "limit", "share", "target", "verdict", "note")
_MOST_NOTE = 110


class Verdict(enum.StrEnum):
    """What a row says. The first two end the command with status 1, the next two only under `--strict`."""

    WRONG = "WRONG"
    FAILED = "FAILED"
    BELOW = "below target"
    DOUBTED = "doubted"
    OK = "ok"
    MEASURED = "measured"
    MEANINGLESS = "meaningless here"
    NOT_RUN = "not run"


_ALWAYS_BAD = frozenset({Verdict.WRONG, Verdict.FAILED})
_STRICTLY_BAD = _ALWAYS_BAD | {Verdict.BELOW, Verdict.DOUBTED}


@dataclass(frozen=True, slots=True)
class Row:
    """One line. `value`, `bound` and `target` are in `unit`; None where there is none.

    `num_cases`: how many cases the row stands for. `is_speed`: it means nothing where no GPU is.
    """

    name: str
    case: str
    verdict: Verdict
    value: float | None = None
    unit: str = ""
    bound: float | None = None
    target: float | None = None
    note: str = ""
    num_cases: int = 1
    is_speed: bool = False

    @property
    def share(self) -> float | None:
        """Of a speed: how much of the machine's limit was reached. None where the row has no such limit."""
        if not self.is_speed or not self.value or not self.bound:
            return None
        return self.value / self.bound if _is_more_better(self.unit) else self.bound / self.value

    def where_no_gpu_is(self) -> Row:
        """The same row from a machine where speeds mean nothing."""
        if not self.is_speed or self.verdict in (*_ALWAYS_BAD, Verdict.NOT_RUN):
            return self
        return dataclasses.replace(self, verdict=Verdict.MEANINGLESS)

    def as_json(self) -> dict[str, Any]:
        """Every field by its name, and `share`."""
        return {**dataclasses.asdict(self), "verdict": str(self.verdict), "share": self.share}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Row:
        """What `as_json` wrote. Raises `KeyError`, `ValueError` and `TypeError` for anything else."""
        known = {name: value for name, value in fields.items() if name != "share"}
        return cls(**{**known, "verdict": Verdict(known["verdict"])})


def speed_row(
    name: str,
    case: str,
    value: float,
    unit: str,
    note: str = "",
    *,
    bound: float | None = None,
    target: float | None = None,
) -> Row:
    """A speed. A rate ("GB/s") or a multiple ("times") has a ceiling as its `bound` and is to reach its `target`.

    Anything else, like a time, has a floor and is to stay below its target. Without a target it is only measured.
    """
    found = float(value) if math.isfinite(value) else None  # JSON has no NaN
    note = note or f"the value is {value}" * (found is None)
    row = Row(name, case, Verdict.MEASURED, found, unit, bound, target, note, is_speed=True)
    if found is None or (row.share or 0.0) > _DOUBTED_SHARE:
        return dataclasses.replace(row, verdict=Verdict.DOUBTED)
    if target is None:
        return row
    reached = found >= target if _is_more_better(unit) else found <= target
    return dataclasses.replace(row, verdict=Verdict.OK if reached else Verdict.BELOW)


def missing_row(name: str, case: str, reason: str) -> Row:
    """What cannot be checked on this machine, and why."""
    return Row(name, case, Verdict.NOT_RUN, note=reason)


def failed_row(name: str, case: str, reason: str) -> Row:
    """What crashed, hung, or was not reached."""
    return Row(name, case, Verdict.FAILED, note=reason)


def exit_status(rows: Iterable[Row], *, strict: bool) -> int:
    """1 when a row is bad, or when there are no rows at all."""
    verdicts = {row.verdict for row in rows}
    return 1 if not verdicts or verdicts & (_STRICTLY_BAD if strict else _ALWAYS_BAD) else 0


def say(message: Mapping[str, Any]) -> None:
    """How a process tells `baton.bench.gpu_check.command` {"row": ...}, {"begun": what comes next} or {"done":
    true}."""
    sys.stdout.write("\n" + json.dumps(message) + "\n")
    sys.stdout.flush()


def say_row(row: Row) -> None:
    say({"row": row.as_json()})


def render(groups: Sequence[tuple[str, Sequence[Row]]]) -> str:
    """A table for each group under its title, the counts, and whether correctness was checked at all."""
    rows = [row for _, of_group in groups for row in of_group]
    text = [f"{title}\n{aligned(_HEADINGS, list(map(_cells, of_group)))}\n" for title, of_group in groups]
    found = Counter(row.verdict for row in rows)
    text.append(", ".join(f"{found[verdict]} {verdict}" for verdict in Verdict if found[verdict]) or "no rows")
    unchecked = {row.case: row.note for row in rows if row.name == CORRECTNESS}
    if unchecked:
        text.append(f"Correctness was NOT checked ({', '.join(unchecked)}): {'; '.join(set(unchecked.values()))}")
    return "\n".join(text)


def _cells(row: Row) -> tuple[str, ...]:
    value = "" if row.value is None else f"{_number(row.value)} {row.unit}".strip()
    note = row.note if len(row.note) <= _MOST_NOTE else row.note[: _MOST_NOTE - 3] + "..."
    share = "" if row.share is None else f"{row.share:.0%}"
    return (row.name, row.case, value, _number(row.bound), share, _number(row.target), str(row.verdict), note)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value == int(value) and abs(value) < 1e6 else f"{value:.4g}"


def _is_more_better(unit: str) -> bool:
    return unit == "times" or unit.endswith("/s")
