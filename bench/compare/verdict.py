"""Whether a difference may be called one: the rule, the words for it, and what is reported of a comparison.

Two targets are measured in turns, a pair in each round, and `RULE` says when there is a verdict. What is left of a
target that drops requests looks fast, so there is none for one that failed more than one in a hundred.

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

from baton.bench.numbers import paired_ratio
from baton.bench.runs import COMPARED, Comparison, Metric, Point, Ratio, Run

MIN_ROUNDS = 3
MAX_FAILED_SHARE = 0.01
RULE = (
    "A verdict needs 3 rounds, at most 1 % failed requests, pairs that all agree in direction, and a ratio further from"
    " 1 than the noise: the spread over the rounds (highest over lowest) of both targets, added as errors are, or what"
    " the first target differs from itself in the control, whichever is larger."
)


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
    obstacles = {
        obstacle: obstacle != "",
        f"{len(subject)} rounds are not enough, {MIN_ROUNDS} are needed": len(subject) < MIN_ROUNDS,
        "equal": pairs.of_medians == 1,
        "rounds disagree": pairs.low <= 1 <= pairs.high,
        f"within noise of {noise:.0%}": distance(pairs.of_medians) <= noise,
    }
    reason = next((reason for reason, is_there in obstacles.items() if is_there), "")
    verdict = reason or wording[pairs.of_medians < 1]
    return Comparison(pairs.of_medians, pairs.low, pairs.high, noise, not reason, verdict)


def noise_of(subject: Sequence[float], reference: Sequence[float], control: Sequence[float]) -> float:
    """As the module says; 0.1 is 10 %."""
    spread = math.hypot(max(subject) / min(subject) - 1, max(reference) / min(reference) - 1)
    again = [distance(second / first) for second, first in zip(control, reference, strict=True)] if control else []
    return max(spread, *again) if again else spread


def distance(ratio: float) -> float:
    """How far from 1, the same for a ratio and its inverse."""
    return max(ratio, 1 / ratio) - 1


def ratios_of(targets: Sequence[str], runs: Sequence[Run], control_runs: Sequence[Run]) -> list[Ratio]:
    """Per rate, target and metric against the first target, over the rounds that both were measured in."""
    measured = {(run.target, run.rate, run.round): run for run in runs}
    controls = {(run.rate, run.round): run for run in control_runs}
    found = []
    for rate in sorted({run.rate for run in runs}):
        for target in targets[1:]:
            rounds = [number for name, at, number in measured if (name, at) == (target, rate)]
            rounds = sorted(number for number in rounds if (targets[0], rate, number) in measured)
            subject, reference = ([measured[name, rate, number] for number in rounds] for name in (target, targets[0]))
            control = [run for number in rounds if (run := controls.get((rate, number)))]
            control = control if len(control) == len(rounds) else []
            ratios = (_compared(metric, subject, reference, control) for metric in COMPARED if rounds)
            found += [ratio for ratio in ratios if ratio is not None]
    return found


def _compared(metric: Metric, subject: list[Run], reference: list[Run], control: list[Run]) -> Ratio | None:
    values, others, again = ([run.number(metric.name) or 0.0 for run in runs] for runs in (subject, reference, control))
    if not all((*values, *others)):
        return None
    wording = ("more", "less") if metric.is_better_high else ("slower", "faster")
    obstacle = "" if metric.counts_failures else _failing(subject, reference)
    compared = compare(values, others, again if all(again) else [], wording, obstacle)
    first, against = subject[0], reference[0]
    found = dataclasses.asdict(compared)
    return Ratio(rate=first.rate, target=first.target, against=against.target, metric=metric.name, **found)


def _failing(*targets: list[Run]) -> str:
    """Which targets dropped so many requests that the others say little; "" for none."""
    points = [Point(runs[0].target, runs[0].rate, tuple(runs)) for runs in targets]
    return ", ".join(
        f"{point.num_failed} of {point.num_requests} requests to {point.target} failed"
        for point in points
        if point.num_failed > MAX_FAILED_SHARE * point.num_requests
    )
