"""How long the gaps between tokens are: a CDF of all gaps of a target, a panel for each rate.

The share axis counts nines (0, 90 %, 99 %, 99.9 %), because a tail is what a CDF of gaps is read for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from bench.plots.lines import Line, Panel, Reference, draw_lines
from bench.plots.style import HEIGHT, Look, looks_of
from bench.runs import Point

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

_MAX_PANELS = 4
_NUM_STEPS = 400
_LEAST_MS = 0.05
_MAX_NINES = 4
_NINES = {0: "0", 0.30103: "50 %", 1: "90 %", 2: "99 %", 3: "99.9 %", 4: "99.99 %"}


def has_gaps(points: Sequence[Point]) -> bool:
    """Whether some run has its gaps saved (`--save-detailed`)."""
    return any(len(_gaps_ms(point)) for point in points)


def draw_gaps(points: Sequence[Point], limit_ms: float | None) -> Figure:
    """`limit_ms` is the SLO of a gap. Of more than four rates the highest four are shown."""
    looks = looks_of([point.target for point in points])
    shown = {(point.target, point.rate): gaps for point in points if len(gaps := _gaps_ms(point))}
    rates = sorted({rate for _, rate in shown})[-_MAX_PANELS:]
    deepest = math.ceil(math.log10(max(map(len, shown.values()))))
    top = min(_MAX_NINES, max(2, deepest))
    panels = [
        Panel(
            [_line(target, looks[target], gaps) for (target, at), gaps in shown.items() if at == rate],
            "gap (ms, log scale)",
            "share of gaps",
            next(point.pace for point in points if point.rate == rate),
            [] if limit_ms is None else [Reference(limit_ms, f"SLO: {limit_ms:g} ms", upright=True)],
            y_ticks={place: label for place, label in _NINES.items() if place <= top},
            y_top=top,
            x_log=10,
        )
        for rate in rates
    ]
    title = "Gaps between tokens: share of all gaps that are not longer"
    num_columns = min(2, len(rates))
    height = HEIGHT if len(rates) <= num_columns else 7.4
    return draw_lines(title, panels, num_columns, height, sharex=True, sharey=True)


def _gaps_ms(point: Point) -> NDArray[np.float64]:
    every = [np.asarray(gaps, dtype=np.float64) * 1e3 for run in point.runs for gaps in run.row("itls")]
    return np.sort(np.concatenate(every)) if every else np.zeros(0)


def _line(target: str, look: Look, gaps_ms: NDArray[np.float64]) -> Line:
    """For each gap how many nines of all gaps are not longer; thinned where the line is straight."""
    nines = np.linspace(0.0, math.log10(len(gaps_ms) + 1), _NUM_STEPS)
    places = np.minimum((len(gaps_ms) * (1 - 10.0**-nines)).astype(np.int64), len(gaps_ms) - 1)
    plain = Look(look.color, "", look.dashes)
    return Line(target, plain, np.maximum(gaps_ms[places], _LEAST_MS).tolist(), nines.tolist())
