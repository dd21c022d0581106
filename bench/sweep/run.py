"""Searches all configurations, a point of each in turn, and keeps the result in its file after each point.

Owns the document of the result. Does not know how targets are started or how a load is made: both are given.
Invariant: what is measured next follows from the document alone, so an interrupted sweep loses one point at most.
"""

from __future__ import annotations

from typing import Any

from bench.documents import Configuration, SweepDocument, SweepPoint
from bench.stats import median
from bench.sweep.search import Point, goodput_rate, next_rate
from bench.sweep.settings import SweepSettings, search_of
from bench.targets.line_up import LineUp
from bench.targets.load import Load, Measure
from bench.targets.session import SESSION_STEP, Session

_POINT_STEP = 1000
_WARMUP_STEP = 500_000


def carry_out(document: SweepDocument, session: Session[SweepSettings], line_up: LineUp, measure: Measure) -> None:
    """Search to the end and put every point into `document`, which is saved after each. Raises `BatonError`."""
    settings, say = session.settings, session.say
    begin = session.dataset.seed + SESSION_STEP * (len(document.sessions) - 1)
    warm: set[str] = set()

    def load(name: str, rate: float, seed: int) -> dict[str, Any]:
        return measure(Load(line_up.take_turn(name).url, rate, settings.num_prompts_at(rate), seed))

    while waiting := open_searches(document, settings):
        for found, rate in waiting:
            name = found.name
            if name not in warm:
                warm.add(name)
                for number in range(settings.warmup_runs):
                    say(f"{name}: warm-up")
                    load(name, rate, begin + _WARMUP_STEP + number)
            place = len(found.points)
            say(f"{name}: point {place + 1}, {rate:g} requests/s")
            # the same seeds for every configuration, and no other point's or session's
            first = begin + _POINT_STEP * place
            point = _point(rate, [load(name, rate, first + number) for number in range(settings.repeat)])
            say(f"{name}: {point.attainment:.1%} met the goals at {rate:g} requests/s")
            found.points.append(point)
            for described in line_up.describe():
                if described.name == name:
                    found.pinning = described.pinning
            conclude(document, settings)
            session.save(document)


def open_searches(document: SweepDocument, settings: SweepSettings) -> list[tuple[Configuration, float]]:
    """Configurations with the rate that each wants next; who begins changes from point to point.

    One at a time it is the first of them alone.
    """
    search = search_of(settings)
    wanted = [(each, next_rate(search, _measured(each))) for each in document.configurations]
    found = [(each, rate) for each, rate in wanted if rate is not None]
    if settings.one_at_a_time or not found:
        return found[:1]
    first = len(found[0][0].points) % len(found)
    return found[first:] + found[:first]


def conclude(document: SweepDocument, settings: SweepSettings) -> None:
    """Say of each configuration what its points say."""
    for each in document.configurations:
        each.goodput_rate = goodput_rate(search_of(settings), _measured(each))


def _point(rate: float, results: list[dict[str, Any]]) -> SweepPoint:
    """The middle one by attainment stands for the point."""
    attainments = [result["slo_attainment"] or 0.0 for result in results]
    middle = sorted(range(len(results)), key=attainments.__getitem__)[(len(results) - 1) // 2]
    return SweepPoint(rate, median(attainments), attainments, results[middle])


def _measured(configuration: Configuration) -> list[Point]:
    return [Point(point.rate, point.attainment) for point in configuration.points]
