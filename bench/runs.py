"""One target at one rate: what runs and their ratios say. The same types are written into result files and read back.

A *run* is one target at one rate, once. A *point* is all runs of one target at one rate: its figures are medians over
them, with their range. Figures keep the names that `baton bench serve` writes. Owns the list of figures that are shown.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator, Field

from baton.bench.numbers import median, number, percent, whole

FAMILIES = ("ttft", "tpot", "itl", "e2el", "max_itl", "ttst")
"""Metrics of which mean, median, deviation and percentiles are measured."""
_NEEDED = ("completed", "failed", "duration", "output_throughput", "median_ttft_ms")
_OF_ANSWERS = tuple(f"_{family}_ms" for family in FAMILIES)


def _with_figures(result: dict[str, Any]) -> dict[str, Any]:
    for name in _NEEDED:
        if not _is_number(result.get(name)):
            raise ValueError(f"{name} is missing or no number")
    return result


Result: TypeAlias = Annotated[dict[str, Any], AfterValidator(_with_figures)]
"""A run as `baton bench serve` writes it."""
Rate: TypeAlias = Annotated[float, Field(gt=0)]
"""Requests/s; infinite ("inf" in a file) where a trace decides or all are sent at once."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of a result that is shown; targets are held against each other in those with `is_compared`.

    `counts_failures`: a failed request is in it, so it can be compared in spite of it.
    """

    name: str
    label: str
    is_compared: bool
    form: Callable[[float | None], str] = number
    is_better_high: bool = False
    counts_failures: bool = False


METRICS = (
    Metric("median_ttft_ms", "TTFT p50 (ms)", True),
    Metric("p90_ttft_ms", "TTFT p90 (ms)", True),
    Metric("p99_ttft_ms", "TTFT p99 (ms)", True),
    Metric("median_tpot_ms", "TPOT p50 (ms)", True),
    Metric("p99_tpot_ms", "TPOT p99 (ms)", True),
    Metric("p99_itl_ms", "ITL p99 (ms)", True),
    Metric("p99_max_itl_ms", "max ITL of a request p99 (ms)", True),
    Metric("max_max_itl_ms", "ITL max (ms)", False),
    Metric("median_e2el_ms", "E2E p50 (ms)", True),
    Metric("p99_e2el_ms", "E2E p99 (ms)", True),
    Metric("output_throughput", "output tokens/s", True, is_better_high=True),
    Metric("request_throughput", "requests/s done", False, is_better_high=True),
    Metric("slo_attainment", "SLO attainment", True, percent, True, counts_failures=True),
    Metric("request_goodput", "goodput (requests/s)", True, number, True, counts_failures=True),
    Metric("schedule_delay.p99_ms", "schedule delay p99 (ms)", False),
    Metric("client.num_late", "sent over 10 ms late", False, whole),
    Metric("client.cpu_share", "client CPU", False, percent),
    Metric("tokens_per_step", "tokens per step", False),
    Metric("spec_decode_acceptance_rate", "drafts that were right (%)", False),
    Metric("chunks_per_token", "chunks per token", False),
    Metric("cached_tokens", "cached tokens", False, whole),
)
METRIC_OF = {metric.name: metric for metric in METRICS}
COMPARED = tuple(metric for metric in METRICS if metric.is_compared)


@dataclass(frozen=True, slots=True)
class Run:
    """`round` counts from 1."""

    target: str
    round: int
    rate: Rate
    result: Result

    def number(self, name: str) -> float | None:
        """A figure by its name, dots leading into members (`schedule_delay.p99_ms`); None where there is none.

        Without an answer every latency is 0 in the result, which nobody measured: that is None, too.
        """
        if not self.result["completed"] and name.endswith(_OF_ANSWERS):
            return None
        found: Any = self.result
        for part in name.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return float(found) if _is_number(found) and math.isfinite(found) else None

    @property
    def pace(self) -> str:
        """How requests came, in words: `4 requests/s`."""
        if math.isfinite(self.rate):
            return f"{self.rate:g} request{'' if self.rate == 1 else 's'}/s"
        if self.part("arrival").get("process") == "trace":
            return "as the trace says"
        limit = self.result.get("max_concurrency")
        return f"{limit} at a time" if isinstance(limit, int) else "all at once"

    def part(self, name: str) -> Mapping[str, Any]:
        """A member that is a map, {} where there is none."""
        found = self.result.get(name)
        return found if isinstance(found, Mapping) else {}

    def row(self, name: str) -> Sequence[Any]:
        """A member that is a list, empty where there is none (a result that was saved without details)."""
        found = self.result.get(name)
        return found if isinstance(found, list) else ()


@dataclass(frozen=True, slots=True)
class Point:
    """All runs of one target at one rate, at least one."""

    target: str
    rate: float
    runs: tuple[Run, ...]

    @property
    def pace(self) -> str:
        return self.runs[0].pace

    @property
    def label(self) -> str:
        """`Baton P/D, 4/s`."""
        return f"{self.target}, {f'{self.rate:g}/s' if math.isfinite(self.rate) else self.pace}"

    @property
    def num_failed(self) -> int:
        return sum(int(run.result["failed"]) for run in self.runs)

    @property
    def num_requests(self) -> int:
        return self.num_failed + sum(int(run.result["completed"]) for run in self.runs)

    def values(self, name: str) -> list[float]:
        """A figure of each run that has it."""
        return [value for run in self.runs if (value := run.number(name)) is not None]

    def middle(self, name: str) -> float | None:
        values = self.values(name)
        return median(values) if values else None

    def ends(self, name: str) -> tuple[float, float] | None:
        """The lowest and the highest of the runs; None with less than two."""
        values = self.values(name)
        return (min(values), max(values)) if len(values) > 1 else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """A ratio of medians, the lowest and highest of its pairs, and what follows. `noise` 0.1 is 10 %.

    `is_clear`: `verdict`, a few words, says how they differ, and not why nothing can be said.
    """

    ratio: float
    low: float
    high: float
    noise: float | None
    is_clear: bool
    verdict: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio(Comparison):
    """`target` over `against` in one metric at one rate."""

    rate: Rate
    target: str
    against: str
    metric: str


def points_of(runs: Iterable[Run], targets: Sequence[str] = ()) -> tuple[Point, ...]:
    """Runs by target and rate: targets in the order of `targets`, else as they come, rates rising."""
    grouped: dict[tuple[str, float], list[Run]] = {}
    for run in runs:
        grouped.setdefault((run.target, run.rate), []).append(run)
    order = list(dict.fromkeys([*targets, *(target for target, _ in grouped)]))
    keys = sorted(grouped, key=lambda key: (order.index(key[0]), key[1]))
    return tuple(Point(target, rate, tuple(grouped[target, rate])) for target, rate in keys)


def rate_as_json(rate: float) -> float | str:
    """`rate`, "inf" where it is infinite: JSON has no infinity."""
    return rate if math.isfinite(rate) else "inf"


def as_json(document: Any) -> dict[str, Any]:
    """A dataclass of results as a JSON object."""
    return dataclasses.asdict(
        document,
        dict_factory=lambda items: {name: rate_as_json(value) if name == "rate" else value for name, value in items},
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
