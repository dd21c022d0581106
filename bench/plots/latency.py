"""TTFT and ITL percentiles against rate, the targets beside each other, from zero."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from bench.plots.style import legend_outside, looks_of, new_figure, rate_axis, reference_line, styled
from bench.report.results import Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from bench.plots.style import Look

PANELS = (
    ("p50_ttft_ms", "ttft", "TTFT, median"),
    ("p90_ttft_ms", "ttft", "TTFT, 90th percentile"),
    ("p99_ttft_ms", "ttft", "TTFT, 99th percentile"),
    ("p99_itl_ms", "itl", "ITL, 99th percentile of all gaps"),
)


def drawable(points: Sequence[Point]) -> bool:
    """Whether there are two rates or more."""
    return len({point.rate for point in points if math.isfinite(point.rate)}) > 1


def draw(points: Sequence[Point], targets: Sequence[str], slo_ms: Mapping[str, float]) -> Figure:
    """Medians of the rounds, with bars from the lowest to the highest round."""
    looks = looks_of(targets)
    shown = [point for point in points if math.isfinite(point.rate)]
    with styled():
        figure = new_figure("Latency against load", height=6.6)
        panels = figure.subplots(2, 2)
        for axes, (name, limited, title) in zip(panels.flat, PANELS, strict=True):
            for target in dict.fromkeys(point.target for point in shown):
                _line(axes, [point for point in shown if point.target == target], name, looks[target])
            _finish(axes, title, slo_ms.get(limited))
            rate_axis(axes, [point.rate for point in shown])
        legend_outside(figure, panels.flat)
    return figure


def _line(axes: Axes, points: Sequence[Point], name: str, look: Look) -> None:
    found = [(point, middle) for point in points if (middle := point.middle(name)) is not None]
    if not found:
        return
    middles = [middle for _, middle in found]
    ends = [point.ends(name) or (middle, middle) for point, middle in found]
    axes.errorbar(
        [point.rate for point, _ in found],
        middles,
        yerr=(
            [middle - low for middle, (low, _) in zip(middles, ends, strict=True)],
            [high - middle for middle, (_, high) in zip(middles, ends, strict=True)],
        ),
        color=look.color,
        marker=look.marker,
        linestyle=look.dashes,
        elinewidth=1.2,
        capsize=3,
        label=points[0].target,
    )


def _finish(axes: Axes, title: str, limit_ms: float | None) -> None:
    if limit_ms is not None:
        reference_line(axes, limit_ms, "SLO")
    axes.set_title(title)
    axes.set_ylabel("ms")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,.0f}")
