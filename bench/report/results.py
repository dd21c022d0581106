"""What result files say, by kind, ready to be shown. Knows neither JSON nor how anything is shown.

A *run* is one target at one rate, once. A *point* is all runs of one target at one rate: its figures are medians over
them, with their range. Figures keep the names that `baton bench serve` writes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.facts import Facts
from bench.kv.measure import Results
from bench.stats import median


@dataclass(frozen=True, slots=True)
class Run:
    """One run; `rate` is requests/s, infinite when all were sent at once. `figures` is the whole result."""

    target: str
    rate: float
    round: int
    figures: Mapping[str, Any]

    def number(self, name: str) -> float | None:
        """A figure by its name, dots leading into members (`schedule_delay.p99_ms`); None where there is none."""
        found: Any = self.figures
        for part in name.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        is_number = isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found)
        return float(found) if is_number else None

    @property
    def pace(self) -> str:
        """How requests came, in words: `4 requests/s`."""
        if math.isfinite(self.rate):
            return f"{self.rate:g} request{'' if self.rate == 1 else 's'}/s"
        if self.part("arrival").get("process") == "trace":
            return "as the trace says"
        limit = self.figures.get("max_concurrency")
        return f"{limit} at a time" if isinstance(limit, int) else "all at once"

    def part(self, name: str) -> Mapping[str, Any]:
        """A member that is a map, {} where there is none."""
        found = self.figures.get(name)
        return found if isinstance(found, Mapping) else {}

    def row(self, name: str) -> Sequence[Any]:
        """A member that is a list, empty where there is none (a result that was saved without details)."""
        found = self.figures.get(name)
        return found if isinstance(found, list) else ()


@dataclass(frozen=True, slots=True)
class Point:
    """All runs of one target at one rate, at least one."""

    target: str
    rate: float
    runs: tuple[Run, ...]

    @property
    def pace(self) -> str:
        """How requests came, in words."""
        return self.runs[0].pace

    @property
    def label(self) -> str:
        """`Baton P/D, 4/s`."""
        return f"{self.target}, {f'{self.rate:g}/s' if math.isfinite(self.rate) else self.pace}"

    def total(self, name: str) -> float | None:
        """The sum over the runs; None where no run has the figure."""
        values = self.values(name)
        return sum(values) if values else None

    def values(self, name: str) -> list[float]:
        """A figure of each run that has it."""
        return [value for run in self.runs if (value := run.number(name)) is not None]

    def middle(self, name: str) -> float | None:
        """The median over the runs."""
        values = self.values(name)
        return median(values) if values else None

    def ends(self, name: str) -> tuple[float, float] | None:
        """The lowest and the highest of the runs; None with less than two."""
        values = self.values(name)
        return (min(values), max(values)) if len(values) > 1 else None


def points_of(runs: Iterable[Run], targets: Sequence[str] = ()) -> tuple[Point, ...]:
    """Runs by target and rate: `targets` first, in that order, then others as they come; rates rising."""
    grouped: dict[tuple[str, float], list[Run]] = {}
    for run in runs:
        grouped.setdefault((run.target, run.rate), []).append(run)
    order = {
        target: place for place, target in enumerate(dict.fromkeys([*targets, *(target for target, _ in grouped)]))
    }
    keys = sorted(grouped, key=lambda key: (order[key[0]], key[1]))
    return tuple(Point(target, rate, tuple(grouped[target, rate])) for target, rate in keys)


@dataclass(frozen=True, slots=True)
class Target:
    """What was measured: its command or URL, and the cores of its processes as far as they are known."""

    name: str
    command: str
    pinning: str


@dataclass(frozen=True, slots=True)
class Ratio:
    """`target` over `against` in one metric at one rate: ratio of medians, range of the pairs, and what follows.

    `noise` 0.1 is 10 %. `is_clear`: `verdict` says that they differ, and not why nothing can be said.
    """

    rate: float
    target: str
    against: str
    metric: str
    ratio: float
    low: float
    high: float
    noise: float | None
    is_clear: bool
    verdict: str


@dataclass(frozen=True, slots=True)
class RunFile:
    """Results of `baton bench serve`: one run, or several that were appended to one file."""

    name: str
    facts: Facts
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class CompareFile:
    """A result of `baton bench compare`."""

    name: str
    facts: Facts
    targets: tuple[Target, ...]
    num_rounds: int
    runs: tuple[Run, ...]
    ratios: tuple[Ratio, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Configuration:
    """One configuration of a sweep; `goodput_rate` is None when no rate met the SLO often enough."""

    target: Target
    goodput_rate: float | None


@dataclass(frozen=True, slots=True)
class SweepFile:
    """A result of `baton bench sweep`; the runs' targets are the configurations' names. `slo` in ms, `goal` a share."""

    name: str
    facts: Facts
    slo: Mapping[str, float]
    goal: float
    configurations: tuple[Configuration, ...]
    runs: tuple[Run, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What the machine can do; `spread` is (p90 - p10) / median of the samples."""

    name: str
    value: float
    unit: str
    spread: float | None
    note: str


@dataclass(frozen=True, slots=True)
class LimitRatio:
    """How near something comes to a ceiling. `value` is None where the ceiling was too unsteady to say."""

    name: str
    case: str
    value: float | None
    low: float | None
    high: float | None
    unit: str
    goal: str
    is_noisy: bool
    note: str


@dataclass(frozen=True, slots=True)
class LimitsFile:
    """A result of `baton bench limits`."""

    name: str
    facts: Facts
    setup: Mapping[str, Any]
    ceilings: tuple[Ceiling, ...]
    ratios: tuple[LimitRatio, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KvFile:
    """A result of `baton bench kv`; `missing` says why a transport was not measured."""

    name: str
    facts: Facts
    results: Results
    missing: Mapping[str, str]


ResultFile = RunFile | CompareFile | SweepFile | LimitsFile | KvFile
