"""How long the gaps between tokens are: a CDF of all gaps of a target, a panel for each rate.

The share axis counts nines (0, 90 %, 99 %, 99.9 %), because a tail is what a CDF of gaps is read for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bench.plots.style import HEIGHT, legend_outside, looks_of, new_figure, reference_line, styled
from bench.report.results import Point

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

_MAX_PANELS = 4
_NUM_STEPS = 400
_LEAST_MS = 0.05
_MAX_NINES = 4
_FEW_DECADES = 200
"""Up to this ratio of the ends there is room for labels at 2 and 5."""


def drawable(points: Sequence[Point]) -> bool:
    """Whether some run has its gaps saved (`--save-detailed`)."""
    return any(_has_gaps(point) for point in points)


def draw(points: Sequence[Point], targets: Sequence[str], limit_ms: float | None) -> Figure:
    """`limit_ms` is the SLO of a gap. Of more than four rates the highest four are shown."""
    looks = looks_of(targets)
    shown = [point for point in points if _has_gaps(point)]
    rates = sorted({point.rate for point in shown})[-_MAX_PANELS:]
    num_columns = min(2, len(rates))
    num_rows = -(-len(rates) // num_columns)
    with styled():
        figure = new_figure(
            "Gaps between tokens: share of all gaps that are not longer", HEIGHT if num_rows == 1 else 7.4
        )
        panels = figure.subplots(num_rows, num_columns, squeeze=False, sharex=True, sharey=True)
        for axes, rate in zip(panels.flat, rates, strict=False):
            for point in (point for point in shown if point.rate == rate):
                look = looks[point.target]
                gaps_ms, nines = _cdf(point)
                axes.plot(gaps_ms, nines, color=look.color, linestyle=look.dashes, label=point.target)
            _finish(axes, next(point.pace for point in shown if point.rate == rate), limit_ms)
        deepest = math.ceil(math.log10(max(_num_gaps(point) for point in shown)))
        for axes in panels[:, 0]:
            axes.set_ylabel("share of gaps")
            axes.set_ylim(0, min(_MAX_NINES, max(2, deepest)))
        for axes in panels.flat[len(rates) :]:
            axes.set_visible(False)
        for axes in panels.flat[max(0, len(rates) - num_columns) : len(rates)]:
            axes.set_xlabel("gap (ms, log scale)")
            axes.tick_params(labelbottom=True)
        legend_outside(figure, panels.flat)
    return figure


def _has_gaps(point: Point) -> bool:
    return any(gaps for run in point.runs for gaps in run.row("itls"))


def _num_gaps(point: Point) -> int:
    return sum(len(gaps) for run in point.runs for gaps in run.row("itls"))


def _cdf(point: Point) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Gaps in ms and, for each, how many nines of all gaps are not longer; thinned where the line is straight."""
    import numpy as np

    every = [np.asarray(gaps, dtype=np.float64) for run in point.runs for gaps in run.row("itls")]
    pooled = np.sort(np.concatenate(every))
    finest = math.log10(len(pooled) + 1)
    nines = np.linspace(0.0, finest, _NUM_STEPS)
    places = np.minimum((len(pooled) * (1 - 10.0**-nines)).astype(np.int64), len(pooled) - 1)
    return np.maximum(pooled[places] * 1e3, _LEAST_MS), nines


def _finish(axes: Axes, title: str, limit_ms: float | None) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_title(title)
    axes.set_xscale("log")
    left, right = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5) if right < _FEW_DECADES * left else (1,)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks([0, 0.30103, 1, 2, 3, 4], ["0", "50 %", "90 %", "99 %", "99.9 %", "99.99 %"])
    if limit_ms is not None:
        reference_line(axes, limit_ms, f"SLO: {limit_ms:g} ms", upright=True)
