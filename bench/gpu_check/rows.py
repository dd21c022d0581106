"""The rows of the table, and what makes a row right, wrong or slow.

Owns the verdicts and the exit status. Knows no device and no check: whoever measured hands over numbers.

A row about *correctness* has a bound that its value must keep. A row about *speed* has a bound that the machine sets
(the floor of a time, the ceiling of a rate), measured in the same run, and perhaps a target that Baton sets itself.
Invariants: what is not a number is never right; a value that beats the machine's own limit is doubted, not praised;
a check that crashed, hung or was not reached is a failure, never an omission.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

DOUBTED_SHARE = 1.05
"""A speed above this share of the machine's limit says that the limit or the clock is wrong."""


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

    `num_cases`: how many cases of its check the row stands for. `is_speed`: it means nothing where no GPU is.
    """

    name: str
    case: str
    value: float | None
    unit: str
    bound: float | None
    target: float | None
    verdict: Verdict
    note: str = ""
    num_cases: int = 1
    is_speed: bool = False

    @property
    def share(self) -> float | None:
        """Of a speed: how much of the machine's limit was reached. None where the row has no such limit."""
        if not self.is_speed or not self.value or not self.bound:
            return None
        return self.value / self.bound if _is_rate(self.unit) else self.bound / self.value

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
        """What `as_json` wrote. Raises `ValueError` and `TypeError` for anything else."""
        known = {name: value for name, value in fields.items() if name != "share"}
        return cls(**{**known, "verdict": Verdict(known["verdict"])})


def error_row(
    name: str, case: str, error: float, bound: float, unit: str = "", *, num_cases: int = 1, note: str = ""
) -> Row:
    """Correctness: an error that must not be above `bound`. What is not a number is wrong."""
    verdict = Verdict.OK if error <= bound else Verdict.WRONG
    return Row(name, case, _number(error), unit, bound, None, verdict, note or _doubt(error), num_cases)


def count_row(name: str, case: str, num_wrong: int, num_all: int, *, num_cases: int = 1, note: str = "") -> Row:
    """Correctness: how many of `num_all` things were wrong. None may be, and nothing compared is a failure."""
    if num_all < 1:
        return failed_row(name, case, "nothing was compared", num_cases=num_cases)
    verdict = Verdict.OK if num_wrong == 0 else Verdict.WRONG
    unit = f"wrong of {num_all}"
    return Row(name, case, float(num_wrong), unit, 0.0, None, verdict, note, num_cases)


def time_row(name: str, case: str, value: float, unit: str, floor: float, share: float = 0.0, note: str = "") -> Row:
    """Speed: a time against the least that the machine needs. Target: `floor / share`; `share` 0 sets none."""
    target = floor / share if share else None
    return _speed_row(name, case, value, unit, floor, target, note)


def rate_row(name: str, case: str, value: float, unit: str, ceiling: float, share: float = 0.0, note: str = "") -> Row:
    """Speed: a rate ("GB/s", "tok/s") against the most that the machine does. Target: `ceiling * share`."""
    target = ceiling * share if share else None
    return _speed_row(name, case, value, unit, ceiling, target, note)


def limit_row(name: str, case: str, value: float, unit: str, most: float, note: str = "") -> Row:
    """Speed: a time or share that is to stay below `most`, with no floor of its own."""
    return _speed_row(name, case, value, unit, None, most, note)


def least_row(name: str, case: str, value: float, unit: str, least: float, note: str = "") -> Row:
    """Speed: a ratio that is to reach `least`."""
    verdict = Verdict.OK if value >= least else Verdict.BELOW
    return Row(name, case, _number(value), unit, None, least, verdict, note or _doubt(value), is_speed=True)


def figure_row(name: str, case: str, value: float, unit: str, note: str = "") -> Row:
    """Speed: measured, and held against nothing."""
    return Row(name, case, _number(value), unit, None, None, Verdict.MEASURED, note, is_speed=True)


def worst_of(errors: Iterable[float]) -> float:
    """The largest error; NaN when one of them is, or when there are none."""
    found = list(errors)
    return max(found) if found and not any(map(math.isnan, found)) else math.nan


def missing_row(name: str, case: str, reason: str, *, num_cases: int = 1) -> Row:
    """What cannot be checked on this machine, and why."""
    return Row(name, case, None, "", None, None, Verdict.NOT_RUN, reason, num_cases)


def failed_row(name: str, case: str, reason: str, *, num_cases: int = 1) -> Row:
    """A check that crashed, hung, was not reached, or compared nothing."""
    return Row(name, case, None, "", None, None, Verdict.FAILED, reason, num_cases)


def exit_status(rows: Iterable[Row], *, strict: bool) -> int:
    """1 when a row is bad, or when there are no rows at all."""
    verdicts = [row.verdict for row in rows]
    bad = _STRICTLY_BAD if strict else _ALWAYS_BAD
    return 1 if not verdicts or bad & set(verdicts) else 0


def _speed_row(
    name: str, case: str, value: float, unit: str, bound: float | None, target: float | None, note: str
) -> Row:
    row = Row(name, case, _number(value), unit, bound, target, Verdict.MEASURED, note or _doubt(value), is_speed=True)
    share = row.share
    if row.value is None or (share is not None and share > DOUBTED_SHARE):
        verdict = Verdict.DOUBTED
    elif target is None:
        verdict = Verdict.MEASURED
    else:
        reached = value >= target if _is_rate(unit) else value <= target
        verdict = Verdict.OK if reached else Verdict.BELOW
    return dataclasses.replace(row, verdict=verdict)


def _is_rate(unit: str) -> bool:
    return unit.endswith("/s")


def _number(value: float) -> float | None:
    """JSON has no NaN."""
    return float(value) if math.isfinite(value) else None


def _doubt(value: float) -> str:
    return "" if math.isfinite(value) else f"the value is {value}"
