"""Searches all configurations, a point of each in turn, and keeps the result in its file after each point.

Owns the document of the result. Does not know how targets are started or how a load is made: both are given.
Invariant: what is measured next follows from the document alone, so an interrupted sweep loses one point at most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.stats import median
from bench.sweep.search import Point, Search, goodput_rate, next_rate
from bench.targets.line_up import LineUp
from bench.targets.load import Load, Measure, rate_as_json

_SESSION_STEP = 1_000_000
_POINT_STEP = 1000
_WARMUP_STEP = 500_000


@dataclass(frozen=True, slots=True)
class Plan:
    """How points are measured. `num_prompts` of a load by its rate; `session` counts interruptions."""

    search: Search
    repeat: int
    warmup_runs: int
    num_prompts: Callable[[float], int]
    seed: int
    session: int
    is_one_at_a_time: bool


def carry_out(
    document: dict[str, Any],
    plan: Plan,
    line_up: LineUp,
    measure: Measure,
    save: Callable[[Mapping[str, Any]], None],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Search to the end; the document with every point. Raises `BatonError`."""
    warm: set[str] = set()
    while waiting := open_searches(document, plan):
        for name, rate in waiting:
            if name not in warm:
                warm.add(name)
                _warm_up(name, rate, plan, line_up, measure, say)
            points = _points(document, name)
            say(f"{name}: point {len(points) + 1}, {rate:g} requests/s")
            point = _measure_point(name, rate, len(points), plan, line_up, measure)
            say(f"{name}: {point['attainment']:.1%} met the goals at {rate:g} requests/s")
            document = concluded(_with_point(document, name, point), plan.search, line_up.describe())
            save(document)
    return document


def open_searches(document: Mapping[str, Any], plan: Plan) -> list[tuple[str, float]]:
    """Configurations with the rate that each wants next; who begins changes from point to point.

    One at a time it is the first of them alone.
    """
    found: list[tuple[str, float]] = []
    for configuration in document["configurations"]:
        rate = next_rate(plan.search, _measured(configuration))
        if rate is not None:
            found.append((configuration["name"], rate))
    if plan.is_one_at_a_time or not found:
        return found[:1]
    first = len(_points(document, found[0][0])) % len(found)
    return found[first:] + found[:first]


def concluded(document: Mapping[str, Any], search: Search, described: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The document with what its points say, and how its targets were `described` last."""
    known = {target["name"]: target for target in described}
    configurations = [
        {
            **known.get(configuration["name"], {}),
            **{name: value for name, value in configuration.items() if name not in ("pinning", "goodput_rate")},
            "pinning": known.get(configuration["name"], {}).get("pinning") or configuration.get("pinning", []),
            "goodput_rate": goodput_rate(search, _measured(configuration)),
        }
        for configuration in document["configurations"]
    ]
    return {**document, "configurations": configurations}


def _warm_up(name: str, rate: float, plan: Plan, line_up: LineUp, measure: Measure, say: Callable[[str], None]) -> None:
    for number in range(plan.warmup_runs):
        say(f"{name}: warm-up")
        running = line_up.take_turn(name)
        measure(Load(running.url, rate, plan.num_prompts(rate), _seeds(plan, 0)[0] + _WARMUP_STEP + number))


def _measure_point(
    name: str, rate: float, number: int, plan: Plan, line_up: LineUp, measure: Measure
) -> dict[str, Any]:
    """The runs of one point: the middle one by attainment stands for it."""
    results = []
    for seed in _seeds(plan, number):
        running = line_up.take_turn(name)
        results.append(measure(Load(running.url, rate, plan.num_prompts(rate), seed)))
    attainments = [result["slo_attainment"] or 0.0 for result in results]
    middle = sorted(range(len(results)), key=lambda index: attainments[index])[(len(results) - 1) // 2]
    return {
        "rate": rate_as_json(rate),
        "attainment": median(attainments),
        "attainments": attainments,
        "result": results[middle],
    }


def _seeds(plan: Plan, number: int) -> list[int]:
    """Of the runs of point `number`: the same for every configuration, and no other point's or session's."""
    first = plan.seed + _SESSION_STEP * plan.session + _POINT_STEP * number
    return list(range(first, first + plan.repeat))


def _with_point(document: Mapping[str, Any], name: str, point: dict[str, Any]) -> dict[str, Any]:
    configurations = [
        {**configuration, "points": [*configuration["points"], point]}
        if configuration["name"] == name
        else configuration
        for configuration in document["configurations"]
    ]
    return {**document, "configurations": configurations}


def _points(document: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    return next(found["points"] for found in document["configurations"] if found["name"] == name)


def _measured(configuration: Mapping[str, Any]) -> list[Point]:
    return [Point(float(point["rate"]), point["attainment"]) for point in configuration["points"]]
