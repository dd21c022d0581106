"""Pictures that are lines in panels: what stands in each panel is data, and one function draws them all.

Against the rate of requests there are SLO attainment and percentiles of latency, a line for each target; of the gaps
between tokens a CDF, a panel for each rate, whose share axis counts nines (0, 90 %, 99 %, 99.9 %), because a tail is
what a CDF of gaps is read for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from baton.bench.plots.style import HEIGHT, REFERENCE, SOFT, Look, looks_of, new_figure, styled
from baton.bench.runs import Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

GOAL = 0.9
"""The share of requests that goodput is defined by."""
_RATE = "offered load (requests/s)"
_LATENCIES = (
    ("median_ttft_ms", "ttft", "TTFT, median"),
    ("p90_ttft_ms", "ttft", "TTFT, 90th percentile"),
    ("p99_ttft_ms", "ttft", "TTFT, 99th percentile"),
    ("p99_itl_ms", "itl", "ITL, 99th percentile of all gaps"),
)
_SLO_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E"}
_MAX_PANELS = 4
_NUM_STEPS = 400
_LEAST_MS = 0.05
_MAX_NINES = 4
_NINES = {0: "0", 0.30103: "50 %", 1: "90 %", 2: "99 %", 3: "99.9 %", 4: "99.99 %"}


@dataclass(frozen=True, slots=True)
class Line:
    """One line. `ends` are the lowest and highest value at each x, a band."""

    label: str
    look: Look
    x: Sequence[float]
    y: Sequence[float]
    ends: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes. `x_ticks` and `y_ticks` are labels by value; `x_log` is the base of a logarithmic x, else 0.

    `x_wanted` and `y_wanted` are a value that is not measured but wanted, and its label.
    """

    lines: Sequence[Line]
    x_label: str
    y_label: str
    title: str = ""
    x_wanted: tuple[float, str] | None = None
    y_wanted: tuple[float, str] | None = None
    x_ticks: Mapping[float, str] | None = None
    y_ticks: Mapping[float, str] | None = None
    y_top: float | None = None
    x_log: int = 0


def rate_ticks(rates: Iterable[float]) -> dict[float, str]:
    """The requests/s that were measured."""
    return {rate: f"{rate:g}" for rate in sorted(set(rates))}


@dataclass(frozen=True, slots=True)
class Plot:
    """Panels row by row with one legend for all. With `is_shared` they have the same axes."""

    title: str
    panels: Sequence[Panel]
    num_columns: int = 1
    height: float = HEIGHT
    is_shared: bool = False

    def draw(self) -> Figure:
        """Imports matplotlib."""
        num, columns = len(self.panels), self.num_columns
        with styled():
            figure = new_figure(self.title, self.height)
            shared = self.is_shared
            grid = figure.subplots(-(-num // columns), columns, squeeze=False, sharex=shared, sharey=shared)
            for place, (axes, panel) in enumerate(zip(grid.flat, self.panels, strict=False)):
                for line in panel.lines:
                    _draw_line(axes, line)
                _finish(axes, panel)
                axes.set_ylabel("" if place % columns else panel.y_label)
                if place + columns >= num or not shared:
                    axes.set_xlabel(panel.x_label)
                    axes.tick_params(labelbottom=True)
            for axes in grid.flat[num:]:
                axes.set_visible(False)
            _legend(figure, grid.flat)
        return figure


def _draw_line(axes: Axes, line: Line) -> None:
    look = line.look
    style: dict[str, Any] = {"color": look.color, "marker": look.marker, "linestyle": look.dashes, "label": line.label}
    if line.ends:
        axes.fill_between(line.x, *np.transpose(line.ends), color=look.color, alpha=0.2 if look.color == SOFT else 0.15)
    axes.plot(line.x, line.y, **style)


def _finish(axes: Axes, panel: Panel) -> None:
    for wanted, draw in ((panel.x_wanted, axes.axvline), (panel.y_wanted, axes.axhline)):
        if wanted:
            draw(wanted[0], color=REFERENCE, linewidth=1.2, linestyle=(0, (4, 3)), label=wanted[1])
    axes.set_title(panel.title)
    axes.set_ylim(0, panel.y_top)
    if panel.x_log:
        axes.set_xscale("log", base=panel.x_log)
    elif panel.x_ticks:
        axes.set_xlim(0, max(panel.x_ticks) * 1.05)
    if panel.x_ticks:
        axes.set_xticks(list(panel.x_ticks), list(panel.x_ticks.values()))
        axes.minorticks_off()
    elif panel.x_log:
        axes.xaxis.set_major_formatter("{x:g}")
    if panel.y_ticks:
        axes.set_yticks(list(panel.y_ticks), list(panel.y_ticks.values()))
    else:
        axes.yaxis.set_major_formatter("{x:,.0f}")


def _legend(figure: Figure, axes: Iterable[Axes]) -> None:
    """Right of all axes, each label once in the order drawn, lines of reference last."""
    found: dict[str, Any] = {}
    for each in axes:
        for handle, label in zip(*each.get_legend_handles_labels(), strict=True):
            found.setdefault(str(label), handle)
    labels = sorted(found, key=lambda label: getattr(found[label], "get_color", str)() == REFERENCE)
    if labels:
        figure.legend([found[label] for label in labels], labels, loc="outside right upper", alignment="left")


def slo_in_words(slo_ms: Mapping[str, float]) -> str:
    """`TTFT ≤ 500 ms, ITL ≤ 60 ms`."""
    goals = (f"{_SLO_NAMES.get(name, name)} ≤ {limit:g} ms" for name, limit in slo_ms.items())
    return ", ".join(goals) or "none given"


def attainment(points: Sequence[Point], slo_ms: Mapping[str, float], goal: float = GOAL) -> Plot | None:
    """Medians of the rounds, with a band from the lowest to the highest, and the goal; None without two rates."""
    lines = _lines(points, "slo_attainment")
    if not any(len(line.x) > 1 for line in lines):
        return None
    panel = Panel(
        lines,
        _RATE,
        "share of all requests sent",
        y_wanted=(goal, f"{100 * goal:g} %: goodput"),
        x_ticks=rate_ticks(rate for line in lines for rate in line.x),
        y_ticks={tick: f"{tick:g}" for tick in sorted({0, 0.25, 0.5, 0.75, goal, 1})},
        y_top=1.02,
    )
    return Plot(f"Requests that met the SLO ({slo_in_words(slo_ms)})", [panel])


def latency(points: Sequence[Point], slo_ms: Mapping[str, float]) -> Plot | None:
    """Medians of the rounds, from zero, with a band from the lowest to the highest; None without two rates."""
    ticks = rate_ticks(point.rate for point in points if math.isfinite(point.rate))
    panels = [
        Panel(
            _lines(points, name),
            _RATE,
            "ms",
            title,
            y_wanted=(slo_ms[limited], "SLO") if limited in slo_ms else None,
            x_ticks=ticks,
        )
        for name, limited, title in _LATENCIES
    ]
    return Plot("Latency against load", panels, num_columns=2, height=6.6) if len(ticks) > 1 else None


def _lines(points: Sequence[Point], name: str) -> list[Line]:
    found = []
    for target, look in looks_of([point.target for point in points]).items():
        own = [point for point in points if point.target == target and math.isfinite(point.rate)]
        middles = [(point, middle) for point in own if (middle := point.middle(name)) is not None]
        if middles:
            ends = [point.ends(name) or (middle, middle) for point, middle in middles]
            rates, values = [point.rate for point, _ in middles], [middle for _, middle in middles]
            found.append(Line(target, look, rates, values, ends))
    return found


def gaps(points: Sequence[Point], limit_ms: float | None) -> Plot | None:
    """`limit_ms` is the SLO of a gap. Of more than four rates the highest four are shown.

    None when no run has its gaps saved (`--save-detailed`).
    """
    looks = looks_of([point.target for point in points])
    shown = {(point.target, point.rate): found for point in points if len(found := _gaps_ms(point))}
    if not shown:
        return None
    rates = sorted({rate for _, rate in shown})[-_MAX_PANELS:]
    top = min(_MAX_NINES, max(2, math.ceil(math.log10(max(map(len, shown.values()))))))
    panels = [
        Panel(
            [_line(target, looks[target], gaps_ms) for (target, at), gaps_ms in shown.items() if at == rate],
            "gap (ms, log scale)",
            "share of gaps",
            next(point.pace for point in points if point.rate == rate),
            x_wanted=None if limit_ms is None else (limit_ms, f"SLO: {limit_ms:g} ms"),
            y_ticks={place: label for place, label in _NINES.items() if place <= top},
            y_top=top,
            x_log=10,
        )
        for rate in rates
    ]
    title = "Gaps between tokens: share of all gaps that are not longer"
    return Plot(title, panels, min(2, len(rates)), HEIGHT if len(rates) <= 2 else 7.4, is_shared=True)


def _gaps_ms(point: Point) -> NDArray[np.float64]:
    every = [np.asarray(gaps_s, dtype=np.float64) * 1e3 for run in point.runs for gaps_s in run.row("itls")]
    return np.sort(np.concatenate(every)) if every else np.zeros(0)


def _line(target: str, look: Look, gaps_ms: NDArray[np.float64]) -> Line:
    """For each gap how many nines of all gaps are not longer; thinned where the line is straight."""
    nines = np.linspace(0.0, math.log10(len(gaps_ms) + 1), _NUM_STEPS)
    places = np.minimum((len(gaps_ms) * (1 - 10.0**-nines)).astype(np.int64), len(gaps_ms) - 1)
    plain = Look(look.color, "", look.dashes)
    return Line(target, plain, np.maximum(gaps_ms[places], _LEAST_MS).tolist(), nines.tolist())
