"""The rows of the table, and what makes a row right, wrong or slow.

Owns the verdicts and the exit status. Knows no device and no check: whoever measured hands over numbers.

A row about *correctness* is a test of `tests/gpu`, with a bound where it has one. A row about *speed* has a bound that
the machine sets (the floor of a time, the ceiling of a rate), measured in the same run, and perhaps a target that Baton
sets itself. Invariants: what is not a number is never right; a value that beats the machine's own limit is doubted, not
praised; what crashed, hung or was not reached is a failure, never an omission.
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

    `num_cases`: how many cases the row stands for. `is_speed`: it means nothing where no GPU is.
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
        """What `as_json` wrote. Raises `KeyError`, `ValueError` and `TypeError` for anything else."""
        known = {name: value for name, value in fields.items() if name != "share"}
        return cls(**{**known, "verdict": Verdict(known["verdict"])})


def time_row(name: str, case: str, value: float, unit: str, floor: float, share: float = 0.0, note: str = "") -> Row:
    """Speed: a time against the least that the machine needs. Target: `floor / share`; `share` 0 sets none."""
    return _speed_row(name, case, value, unit, floor, floor / share if share else None, note)


def rate_row(name: str, case: str, value: float, unit: str, ceiling: float, note: str = "") -> Row:
    """Speed: a rate ("GB/s", "tok/s") against the most that the machine does."""
    return _speed_row(name, case, value, unit, ceiling, None, note)


def limit_row(name: str, case: str, value: float, unit: str, most: float, note: str = "") -> Row:
    """Speed: a time or share that is to stay below `most`, with no floor of its own."""
    return _speed_row(name, case, value, unit, None, most, note)


def least_row(name: str, case: str, value: float, unit: str, least: float) -> Row:
    """Speed: a ratio that is to reach `least`."""
    verdict = Verdict.OK if value >= least else Verdict.BELOW
    return Row(name, case, _number(value), unit, None, least, verdict, _doubt(value), is_speed=True)


def figure_row(name: str, case: str, value: float, unit: str, note: str = "") -> Row:
    """Speed: measured, and held against nothing."""
    return _speed_row(name, case, value, unit, None, None, note)


def missing_row(name: str, case: str, reason: str) -> Row:
    """What cannot be checked on this machine, and why."""
    return Row(name, case, None, "", None, None, Verdict.NOT_RUN, reason)


def failed_row(name: str, case: str, reason: str) -> Row:
    """What crashed, hung, or was not reached."""
    return Row(name, case, None, "", None, None, Verdict.FAILED, reason)


def exit_status(rows: Iterable[Row], *, strict: bool) -> int:
    """1 when a row is bad, or when there are no rows at all."""
    verdicts = {row.verdict for row in rows}
    return 1 if not verdicts or verdicts & (_STRICTLY_BAD if strict else _ALWAYS_BAD) else 0


def _speed_row(
    name: str, case: str, value: float, unit: str, bound: float | None, target: float | None, note: str
) -> Row:
    row = Row(name, case, _number(value), unit, bound, target, Verdict.MEASURED, note or _doubt(value), is_speed=True)
    share = row.share
    if row.value is None or (share is not None and share > DOUBTED_SHARE):
        return dataclasses.replace(row, verdict=Verdict.DOUBTED)
    if target is None:
        return row
    reached = value >= target if _is_rate(unit) else value <= target
    return dataclasses.replace(row, verdict=Verdict.OK if reached else Verdict.BELOW)


def _is_rate(unit: str) -> bool:
    return unit.endswith("/s")


def _number(value: float) -> float | None:
    """JSON has no NaN."""
    return float(value) if math.isfinite(value) else None


def _doubt(value: float) -> str:
    return "" if math.isfinite(value) else f"the value is {value}"
