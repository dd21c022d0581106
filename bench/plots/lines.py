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

from bench.plots.style import HEIGHT, REFERENCE, SOFT, Look, looks_of, new_figure, styled
from bench.runs import Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

_FEW_DECADES = 200
"""Up to this ratio of the ends of a logarithmic axis there is room for labels at 2 and 5."""
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
_MAX_PANELS = 4
_NUM_STEPS = 400
_LEAST_MS = 0.05
_MAX_NINES = 4
_NINES = {0: "0", 0.30103: "50 %", 1: "90 %", 2: "99 %", 3: "99.9 %", 4: "99.99 %"}


@dataclass(frozen=True, slots=True)
class Line:
    """One line. `ends` are the lowest and highest value at each x: a band, or bars with `has_bars`."""

    label: str
    look: Look
    x: Sequence[float]
    y: Sequence[float]
    ends: Sequence[tuple[float, float]] = ()
    has_bars: bool = False


@dataclass(frozen=True, slots=True)
class Reference:
    """A value that is not measured but wanted; `upright` for one of x."""

    value: float
    label: str
    upright: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes. `x_ticks` and `y_ticks` are labels by value; `x_log` is the base of a logarithmic x, else 0."""

    lines: Sequence[Line]
    x_label: str
    y_label: str
    title: str = ""
    references: Sequence[Reference] = ()
    x_ticks: Mapping[float, str] | None = None
    y_ticks: Mapping[float, str] | None = None
    y_top: float | None = None
    x_log: int = 0


def rate_ticks(rates: Iterable[float]) -> dict[float, str]:
    """The requests/s that were measured."""
    return {rate: f"{rate:g}" for rate in sorted(set(rates))}


def draw_lines(
    title: str, panels: Sequence[Panel], num_columns: int = 1, height: float = HEIGHT, **grid: Any
) -> Figure:
    """The panels row by row, with one legend for all. `grid` is for `Figure.subplots`."""
    num_rows = -(-len(panels) // num_columns)
    with styled():
        figure = new_figure(title, height)
        grid_axes = figure.subplots(num_rows, num_columns, squeeze=False, **grid)
        for number, (axes, panel) in enumerate(zip(grid_axes.flat, panels, strict=False)):
            for line in panel.lines:
                _draw_line(axes, line)
            is_lowest = number + num_columns >= len(panels)
            _finish(axes, panel, is_leftmost=number % num_columns == 0, is_lowest=is_lowest or "sharex" not in grid)
        for axes in grid_axes.flat[len(panels) :]:
            axes.set_visible(False)
        _legend(figure, grid_axes.flat)
    return figure


def _draw_line(axes: Axes, line: Line) -> None:
    look = line.look
    style: dict[str, Any] = {"color": look.color, "marker": look.marker, "linestyle": look.dashes, "label": line.label}
    lows, highs = [low for low, _ in line.ends], [high for _, high in line.ends]
    if line.ends and line.has_bars:
        below = [middle - low for middle, low in zip(line.y, lows, strict=True)]
        above = [high - middle for middle, high in zip(line.y, highs, strict=True)]
        axes.errorbar(line.x, line.y, yerr=(below, above), elinewidth=1.2, capsize=3, **style)
        return
    if line.ends:
        axes.fill_between(line.x, lows, highs, color=look.color, alpha=0.2 if look.color == SOFT else 0.15)
    axes.plot(line.x, line.y, **style)


def _finish(axes: Axes, panel: Panel, *, is_leftmost: bool, is_lowest: bool) -> None:
    for reference in panel.references:
        draw = axes.axvline if reference.upright else axes.axhline
        draw(reference.value, color=REFERENCE, linewidth=1.2, linestyle=(0, (4, 3)), label=reference.label)
    axes.set_title(panel.title)
    axes.set_ylim(0, panel.y_top)
    if is_leftmost:
        axes.set_ylabel(panel.y_label)
    if is_lowest:
        axes.set_xlabel(panel.x_label)
        axes.tick_params(labelbottom=True)
    if panel.x_log:
        axes.set_xscale("log", base=panel.x_log)
    elif panel.x_ticks:
        axes.set_xlim(0, max(panel.x_ticks) * 1.05)
    if panel.x_ticks:
        axes.set_xticks(list(panel.x_ticks), list(panel.x_ticks.values()))
        axes.minorticks_off()
    elif panel.x_log:
        _log_ticks(axes)
    if panel.y_ticks:
        axes.set_yticks(list(panel.y_ticks), list(panel.y_ticks.values()))
    else:
        axes.yaxis.set_major_formatter("{x:,.0f}")


def _log_ticks(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    left, right = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5) if right < _FEW_DECADES * left else (1,)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


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
