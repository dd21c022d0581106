"""SLO attainment against rate, a line for each target, with the line of 90 % that goodput is defined by."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from bench.plots.style import legend_outside, looks_of, new_figure, rate_axis, reference_line, styled
from bench.report.results import Point

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GOAL = 0.9


def drawable(points: Sequence[Point]) -> bool:
    """Whether some target has an attainment at two rates or more."""
    shown = [(point.target, point.rate) for point in _shown(points)]
    return any([target for target, _ in shown].count(name) > 1 for name, _ in shown)


def draw(points: Sequence[Point], targets: Sequence[str], slo_ms: Mapping[str, float], goal: float = GOAL) -> Figure:
    """Medians of the rounds, with a band from the lowest to the highest."""
    looks, shown = looks_of(targets), _shown(points)
    with styled():
        figure = new_figure(f"Requests that met the SLO ({slo_in_words(slo_ms)})")
        axes = figure.subplots()
        for target in dict.fromkeys(point.target for point in shown):
            own, look = [point for point in shown if point.target == target], looks[target]
            rates = [point.rate for point in own]
            middles = [point.middle("slo_attainment") or 0.0 for point in own]
            ends = [
                point.ends("slo_attainment") or (middle, middle) for point, middle in zip(own, middles, strict=True)
            ]
            axes.fill_between(rates, [low for low, _ in ends], [high for _, high in ends], color=look.color, alpha=0.15)
            axes.plot(rates, middles, color=look.color, marker=look.marker, linestyle=look.dashes, label=target)
        reference_line(axes, goal, f"{100 * goal:g} %: goodput")
        axes.set_ylim(0, 1.02)
        ticks = sorted({0, 0.25, 0.5, 0.75, goal, 1})
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_ylabel("share of all requests sent")
        rate_axis(axes, [point.rate for point in shown])
        legend_outside(figure, [axes])
    return figure


def slo_in_words(slo_ms: Mapping[str, float]) -> str:
    """`TTFT ≤ 500 ms, ITL ≤ 60 ms`."""
    names = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E"}
    return ", ".join(f"{names.get(name, name)} ≤ {limit:g} ms" for name, limit in slo_ms.items()) or "none given"


def _shown(points: Sequence[Point]) -> list[Point]:
    return [point for point in points if math.isfinite(point.rate) and point.middle("slo_attainment") is not None]
