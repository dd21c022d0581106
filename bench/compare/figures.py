"""What is reported of a comparison: medians over the rounds, and ratios to the first target. Pure, from runs of a file.

Owns the list of metrics. A value that is 0 has no ratio, so an entry may be missing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.compare.verdict import MAX_FAILED_SHARE, Wording, compare
from bench.stats import median

Runs = Sequence[Mapping[str, Any]]
"""Entries of `runs` or `control_runs`: target, round, rate, result."""
_LATENCY = Wording("slower", "faster")
_AMOUNT = Wording("more", "less")


@dataclass(frozen=True, slots=True)
class Metric:
    """`name` in a run's result. `counts_failures`: a failed request is in it, so it can be compared in spite of it."""

    name: str
    label: str
    wording: Wording
    counts_failures: bool = False


METRICS = (
    Metric("median_ttft_ms", "TTFT p50 ms", _LATENCY),
    Metric("p90_ttft_ms", "TTFT p90 ms", _LATENCY),
    Metric("p99_ttft_ms", "TTFT p99 ms", _LATENCY),
    Metric("median_tpot_ms", "TPOT p50 ms", _LATENCY),
    Metric("p99_tpot_ms", "TPOT p99 ms", _LATENCY),
    Metric("p99_itl_ms", "ITL p99 ms", _LATENCY),
    Metric("p99_max_itl_ms", "max ITL p99 ms", _LATENCY),
    Metric("median_e2el_ms", "E2E p50 ms", _LATENCY),
    Metric("p99_e2el_ms", "E2E p99 ms", _LATENCY),
    Metric("output_throughput", "output tok/s", _AMOUNT),
    Metric("slo_attainment", "attainment", _AMOUNT, counts_failures=True),
    Metric("request_goodput", "goodput req/s", _AMOUNT, counts_failures=True),
)


def medians_of(targets: Sequence[str], runs: Runs) -> list[dict[str, Any]]:
    """Per rate and target, over its rounds: every metric's median (None without values), `failed`, `num_requests`."""
    found = []
    for rate, target in _points(targets, runs):
        results = _results(runs, rate, target)
        found.append(
            {
                "rate": rate,
                "target": target,
                "rounds": len(results),
                **{metric.name: _median(results, metric.name) for metric in METRICS},
                "failed": sum(result["failed"] for result in results),
                "num_requests": sum(result["failed"] + result["completed"] for result in results),
            }
        )
    return found


def ratios_of(targets: Sequence[str], runs: Runs, control_runs: Runs) -> list[dict[str, Any]]:
    """Per rate, target and metric against the first target, over the rounds that both were measured in."""
    reference = targets[0]
    found = []
    for rate, target in _points(targets, runs):
        if target == reference:
            continue
        rounds = sorted(_by_round(runs, rate, target).keys() & _by_round(runs, rate, reference).keys())
        subjects = [_by_round(runs, rate, target)[number] for number in rounds]
        references = [_by_round(runs, rate, reference)[number] for number in rounds]
        again = _by_round(control_runs, rate, reference)
        controls = [again[number] for number in rounds] if again.keys() >= set(rounds) else []
        failing = _failing({target: subjects, reference: references})
        for metric in METRICS:
            values = [_values(results, metric.name) for results in (subjects, references, controls)]
            if rounds and values[0] and values[1]:
                obstacle = "" if metric.counts_failures else failing
                compared = compare(values[0], values[1], values[2], metric.wording, obstacle)
                found.append(
                    {
                        "rate": rate,
                        "target": target,
                        "against": reference,
                        "metric": metric.name,
                        **dataclasses.asdict(compared),
                    }
                )
    return found


def _points(targets: Sequence[str], runs: Runs) -> list[tuple[Any, str]]:
    rates = dict.fromkeys(run["rate"] for run in runs)
    measured = {(run["rate"], run["target"]) for run in runs}
    return [(rate, target) for rate in rates for target in targets if (rate, target) in measured]


def _results(runs: Runs, rate: Any, target: str) -> list[Mapping[str, Any]]:
    return list(_by_round(runs, rate, target).values())


def _by_round(runs: Runs, rate: Any, target: str) -> dict[int, Mapping[str, Any]]:
    return {run["round"]: run["result"] for run in runs if run["rate"] == rate and run["target"] == target}


def _median(results: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Of the runs with an answer: without one every latency is 0, which nobody measured."""
    values = [result[name] for result in results if result["completed"] and result.get(name) is not None]
    return median(values) if values else None


def _values(results: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """[] unless every run has a value above 0."""
    values = [result.get(name) for result in results]
    return [value for value in values if value] if all(values) else []


def _failing(results: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Which targets dropped so many requests that the others say little; "" for none."""
    found = []
    for target, runs in results.items():
        num_failed = sum(run["failed"] for run in runs)
        num_requests = num_failed + sum(run["completed"] for run in runs)
        if num_failed > MAX_FAILED_SHARE * num_requests:
            found.append(f"{num_failed} of {num_requests} requests to {target} failed")
    return ", ".join(found)
