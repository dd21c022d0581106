"""Whether a difference may be called one: the rule, the words for it, and what is reported of a comparison.

Two targets are measured in turns, a pair in each round. There is a verdict only when

  - at least three rounds are there,
  - no target failed more than one request in a hundred (what is left of a target that drops requests looks fast),
  - the ratios of all pairs lie on the same side of 1, and
  - the ratio of the medians is further from 1 than the noise.

Noise is the larger of two: how far apart the values of one target are over the rounds (highest over lowest), of both
targets together (root of the sum of squares, as errors of a quotient add up); and how far from 1 the ratio of the
reference to itself is, measured twice a round (the control). Distances are relative and the same in both directions: 2x
and 0.5x are both 100 % away from 1. Between two equal targets with independent noise, three rounds lead to a verdict in
2 % of cases with the control and 4 % without, five rounds in less than 0.2 % (simulated).

A value that is 0 has no ratio, so a ratio may be missing. All of it follows from the runs of a file.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.runs import COMPARED, Metric, Point, Ratio, Run, points_of, rate_as_json
from bench.stats import PairedRatio, paired_ratio

MIN_ROUNDS = 3
MAX_FAILED_SHARE = 0.01
RULE = (
    "A verdict needs 3 rounds, at most 1 % failed requests, pairs that all agree in direction, and a ratio further from"
    " 1 than the noise: the spread over the rounds (highest over lowest) of both targets, added as errors are, or what"
    " the first target differs from itself in the control, whichever is larger."
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """`ratio` of medians of subject over reference, `low` and `high` of the pairs; `noise` 0.1 is 10 %.

    `verdict` is one sentence; `is_clear` whether it says that they differ.
    """

    ratio: float
    low: float
    high: float
    noise: float
    is_clear: bool
    verdict: str


def compare(
    subject: Sequence[float],
    reference: Sequence[float],
    control: Sequence[float],
    wording: tuple[str, str],
    obstacle: str = "",
) -> Comparison:
    """Values above 0, one per round; `control` is () without one. `obstacle`: why there can be no verdict anyway.

    `wording`: what a target is called that has more of something, and one that has less.

    Raises `ValueError` for different numbers of values.
    """
    pairs = paired_ratio(subject, reference)
    noise = noise_of(subject, reference, control)
    difference = distance(pairs.of_medians)
    if obstacle:
        reason = obstacle
    elif len(subject) < MIN_ROUNDS:
        reason = f"{len(subject)} rounds are not enough, {MIN_ROUNDS} are needed"
    elif difference == 0:
        reason = "there is no difference"
    elif pairs.low <= 1 <= pairs.high:
        reason = f"the rounds disagree ({pairs.low:.2f} - {pairs.high:.2f})"
    elif difference <= noise:
        reason = f"noise {noise:.0%} is larger than the difference {difference:.0%}"
    else:
        return Comparison(pairs.of_medians, pairs.low, pairs.high, noise, True, _clear(pairs, wording))
    return Comparison(pairs.of_medians, pairs.low, pairs.high, noise, False, f"no verdict: {reason}")


def noise_of(subject: Sequence[float], reference: Sequence[float], control: Sequence[float]) -> float:
    """As the module says; 0.1 is 10 %."""
    spread = math.hypot(max(subject) / min(subject) - 1, max(reference) / min(reference) - 1)
    again = [distance(second / first) for second, first in zip(control, reference, strict=True)] if control else []
    return max(spread, *again) if again else spread


def distance(ratio: float) -> float:
    """How far from 1, the same for a ratio and its inverse."""
    return max(ratio, 1 / ratio) - 1


def _clear(pairs: PairedRatio, wording: tuple[str, str]) -> str:
    if pairs.of_medians > 1:
        return f"{pairs.of_medians:.2f}x ({pairs.low:.2f} - {pairs.high:.2f}) {wording[0]}"
    return f"{1 / pairs.of_medians:.2f}x ({1 / pairs.high:.2f} - {1 / pairs.low:.2f}) {wording[1]}"


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
