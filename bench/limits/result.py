"""What `baton bench limits` finds: ceilings of the machine, and ratios of Baton to them.

Owns the two shapes, their JSON, and how samples become them. Does not know what was measured or how.
Invariant: every ratio has its `value`; where it is noisy, people are not shown it and files keep it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.stats import NOISY_SPREAD, median, paired_ratio, spread


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What the machine can do. `spread`: between the 10th and 90th percentile of the rounds, over their median."""

    name: str
    value: float
    unit: str
    spread: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class Ratio:
    """What Baton does of it. `low` and `high`: of the pairs; `unit` "" for a plain ratio; `goal` "" where none is set.

    `case` says at which size or load ("batch 8, context 1024"). `noisy`: the value says nothing, as the yardstick
    itself moved too much, and is not shown to people.
    """

    name: str
    case: str
    value: float
    low: float
    high: float
    unit: str = ""
    goal: str = ""
    noisy: bool = False
    note: str = ""


def ceiling_of(name: str, samples: Sequence[float], unit: str, note: str = "") -> Ceiling:
    """The median of a yardstick's rounds. Raises `ValueError` without samples."""
    return Ceiling(name, median(samples), unit, spread(samples), note)


def ratio_of(
    name: str,
    case: str,
    subject: Sequence[float],
    ceiling: Sequence[float],
    *,
    unit: str = "",
    goal: str = "",
    note: str = "",
) -> Ratio:
    """Of values measured in turns, subject over ceiling; noisy when the ceiling spreads by more than `NOISY_SPREAD`.

    Raises `ValueError` for different numbers of them.
    """
    pairs = paired_ratio(subject, ceiling)
    noisy = spread(ceiling) > NOISY_SPREAD
    if noisy:
        note = ", ".join(filter(None, (note, f"the ceiling spread by {spread(ceiling):.0%}")))
    return Ratio(name, case, pairs.of_medians, pairs.low, pairs.high, unit, goal, noisy, note)


def as_json(ceilings: Sequence[Ceiling], ratios: Sequence[Ratio]) -> dict[str, Any]:
    """{"ceilings": [...], "ratios": [...]}, every field by its name."""
    return {"ceilings": [asdict(one) for one in ceilings], "ratios": [asdict(one) for one in ratios]}
