"""Figures against the rate of requests, a line for each target: SLO attainment, and percentiles of latency."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from bench.plots.lines import Line, Panel, Reference, draw_lines, rate_ticks
from bench.plots.style import looks_of
from bench.runs import Point

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GOAL = 0.9
"""The share of requests that goodput is defined by."""
_ATTAINMENT, _RATE = "slo_attainment", "offered load (requests/s)"
_LATENCIES = (
    ("median_ttft_ms", "ttft", "TTFT, median"),
    ("p90_ttft_ms", "ttft", "TTFT, 90th percentile"),
    ("p99_ttft_ms", "ttft", "TTFT, 99th percentile"),
    ("p99_itl_ms", "itl", "ITL, 99th percentile of all gaps"),
)
_SLO_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E"}


def slo_in_words(slo_ms: Mapping[str, float]) -> str:
    """`TTFT ≤ 500 ms, ITL ≤ 60 ms`."""
    goals = (f"{_SLO_NAMES.get(name, name)} ≤ {limit:g} ms" for name, limit in slo_ms.items())
    return ", ".join(goals) or "none given"


def has_attainment(points: Sequence[Point]) -> bool:
    """Whether some target has an attainment at two rates or more."""
    shown = [point.target for point in points if _is_shown(point, _ATTAINMENT)]
    return any(shown.count(target) > 1 for target in shown)


def has_rates(points: Sequence[Point]) -> bool:
    """Whether there are two rates or more."""
    return len({point.rate for point in points if math.isfinite(point.rate)}) > 1


def draw_attainment(points: Sequence[Point], slo_ms: Mapping[str, float], goal: float = GOAL) -> Figure:
    """Medians of the rounds, with a band from the lowest to the highest, and the goal."""
    lines = _lines(points, _ATTAINMENT, has_bars=False)
    panel = Panel(
        lines,
        _RATE,
        "share of all requests sent",
        references=[Reference(goal, f"{100 * goal:g} %: goodput")],
        x_ticks=rate_ticks(rate for line in lines for rate in line.x),
        y_ticks={tick: f"{tick:g}" for tick in sorted({0, 0.25, 0.5, 0.75, goal, 1})},
        y_top=1.02,
    )
    return draw_lines(f"Requests that met the SLO ({slo_in_words(slo_ms)})", [panel])


def draw_latency(points: Sequence[Point], slo_ms: Mapping[str, float]) -> Figure:
    """Medians of the rounds, from zero, with bars from the lowest to the highest round."""
    ticks = rate_ticks(point.rate for point in points if math.isfinite(point.rate))
    panels = [
        Panel(
            _lines(points, name, has_bars=True),
            _RATE,
            "ms",
            title,
            [Reference(slo_ms[limited], "SLO")] if limited in slo_ms else [],
            x_ticks=ticks,
        )
        for name, limited, title in _LATENCIES
    ]
    return draw_lines("Latency against load", panels, num_columns=2, height=6.6)


def _lines(points: Sequence[Point], name: str, *, has_bars: bool) -> list[Line]:
    looks, found = looks_of([point.target for point in points]), []
    for target, look in looks.items():
        own = [point for point in points if point.target == target and _is_shown(point, name)]
        middles = [point.middle(name) or 0.0 for point in own]
        ends = [point.ends(name) or (middle, middle) for point, middle in zip(own, middles, strict=True)]
        if own:
            found.append(Line(target, look, [point.rate for point in own], middles, ends, has_bars))
    return found


def _is_shown(point: Point, name: str) -> bool:
    return math.isfinite(point.rate) and point.middle(name) is not None
