"""Pictures that are lines in panels: what stands in each panel is data, and one function draws them all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.plots.style import HEIGHT, REFERENCE, SOFT, Look, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FEW_DECADES = 200
"""Up to this ratio of the ends of a logarithmic axis there is room for labels at 2 and 5."""


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
