"""What is reported of a comparison: medians over the rounds, and ratios to the first target. Pure, from runs of a file.

A value that is 0 has no ratio, so a ratio may be missing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from bench.compare.verdict import MAX_FAILED_SHARE, compare
from bench.runs import COMPARED, Metric, Point, Ratio, Run, points_of, rate_as_json


def medians_of(targets: Sequence[str], runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Per rate and target, over its rounds: every metric's median (None without values), `failed`, `num_requests`."""
    return [
        {
            "rate": rate_as_json(point.rate),
            "target": point.target,
            "rounds": len(point.runs),
            **{metric.name: point.middle(metric.name) for metric in COMPARED},
            "failed": point.num_failed,
            "num_requests": point.num_requests,
        }
        for point in _points(targets, runs)
    ]


def ratios_of(targets: Sequence[str], runs: Sequence[Run], control_runs: Sequence[Run]) -> list[Ratio]:
    """Per rate, target and metric against the first target, over the rounds that both were measured in."""
    points = _points(targets, runs)
    references = {point.rate: point for point in points if point.target == targets[0]}
    controls = {point.rate: point for point in points_of(control_runs)}
    found = []
    for point in points:
        reference = references.get(point.rate)
        if reference is None or point.target == reference.target:
            continue
        rounds = {run.round for run in point.runs} & {run.round for run in reference.runs}
        if not rounds:
            continue
        subject, reference = _of_rounds(point, rounds), _of_rounds(reference, rounds)
        control = _of_rounds(controls[point.rate], rounds) if point.rate in controls else None
        if control is not None and len(control.runs) < len(rounds):
            control = None
        compared = (_compared(metric, subject, reference, control) for metric in COMPARED)
        found += [ratio for ratio in compared if ratio is not None]
    return found


def _points(targets: Sequence[str], runs: Sequence[Run]) -> list[Point]:
    """Rates rising, targets in their order."""
    return sorted(points_of(runs, targets), key=lambda point: point.rate)


def _of_rounds(point: Point, rounds: set[int]) -> Point:
    runs = sorted((run for run in point.runs if run.round in rounds), key=lambda run: run.round)
    return dataclasses.replace(point, runs=tuple(runs))


def _compared(metric: Metric, subject: Point, reference: Point, control: Point | None) -> Ratio | None:
    values, others = _values(subject, metric), _values(reference, metric)
    if not (values and others):
        return None
    again = _values(control, metric) if control else []
    wording = ("more", "less") if metric.is_better_high else ("slower", "faster")
    obstacle = "" if metric.counts_failures else _failing(subject, reference)
    compared = compare(values, others, again, wording, obstacle)
    return Ratio(subject.rate, subject.target, reference.target, metric.name, **dataclasses.asdict(compared))


def _values(point: Point, metric: Metric) -> list[float]:
    """[] unless every run has a value above 0."""
    values = [value for value in point.values(metric.name) if value]
    return values if len(values) == len(point.runs) else []


def _failing(*points: Point) -> str:
    """Which targets dropped so many requests that the others say little; "" for none."""
    return ", ".join(
        f"{point.num_failed} of {point.num_requests} requests to {point.target} failed"
        for point in points
        if point.num_failed > MAX_FAILED_SHARE * point.num_requests
    )
