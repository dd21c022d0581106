"""Pictures of where requests spend their time.

Stacked bars of the parts of the time to the first and to the second token, for each rate and target; and every request
of a run as a row from its start to its end: waiting for token 1, then coloured by the gaps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from baton.bench.numbers import percentile
from baton.bench.plots.style import HEIGHT, ON_COLOR, PALETTE, REFERENCE, SOFT, new_figure, styled
from baton.bench.runs import Point, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import LineCollection
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

PARTS = {
    "client": ("client and network", PALETTE[8]),
    "router": ("router", PALETTE[7]),
    "queue_prefill": ("waiting for prefill", PALETTE[5]),
    "prefill": ("prefill", PALETTE[0]),
    "return": ("return of token 1", PALETTE[6]),
    "exposed_transfer": ("exposed KV transfer", PALETTE[1]),
    "queue_decode": ("waiting for decode", PALETTE[4]),
    "first_decode_step": ("first decode step", PALETTE[2]),
    "return_second": ("return of token 2", PALETTE[3]),
}
"""Parts in the order of time: what they are called, and their colour."""

AFTER_FIRST = ("exposed_transfer", "queue_decode", "first_decode_step", "return_second")
"""What comes after token 1 is sampled: the handoff, as the second token sees it."""

_WIDE_ENOUGH = 0.13
_DARK_TEXT_ON = (PALETTE[3], PALETTE[4], PALETTE[5], PALETTE[8])
_MAX_ROWS = 300
_CALM, _LATE = ("#b9d7ea", "#4f9ccb", "#155f96"), ("#f0a500", "#cf4a0a", "#7a0b2e")


def parts_of(point: Point, token: str) -> dict[str, float]:
    """Mean ms of each part over the runs; `token` is "ttft" or "ttst". {} without a breakdown."""
    found = {name: point.values(f"breakdown.{token}.parts.{name}.mean_ms") for name in PARTS}
    return {name: sum(values) / len(values) for name, values in found.items() if values}


def draw_stack(points: Sequence[Point]) -> Figure:
    """A bar for each rate and target that has a breakdown, lowest rate on top; parts in ms where there is room.

    The part of the second token's time that comes after token 1 is sampled has a panel and a scale of its own.
    """
    from matplotlib.patches import Patch

    shown = sorted((point for point in points if parts_of(point, "ttft")), key=lambda point: point.rate)
    firsts, seconds = ([parts_of(point, token) for point in shown] for token in ("ttft", "ttst"))
    rests = [{name: bar[name] for name in AFTER_FIRST if name in bar} for bar in seconds]
    panels_of = {"to token 1": firsts, "to token 2": seconds, "to token 2, after token 1 was sampled": rests}
    with styled():
        figure = new_figure("Where the time goes: means over all requests", height=2.3 + 0.4 * len(shown))
        panels = figure.subplots(1, 3, sharey=True)
        for axes, (title, bars) in zip(panels, panels_of.items(), strict=True):
            _bars(axes, bars)
            axes.set_title(title, fontsize=10)
            axes.set_xlabel("ms")
        panels[0].set_yticks(range(len(shown)), [point.label for point in shown])
        panels[0].invert_yaxis()
        parts = [PARTS[name] for name in PARTS if any(name in bar for bar in (*firsts, *seconds))]
        handles = [Patch(color=color, label=label) for label, color in parts]
        figure.legend(handles=handles, loc="outside lower center", ncols=5)
    return figure


def _bars(axes: Axes, bars: Sequence[dict[str, float]]) -> None:
    totals = [sum(bar.values()) for bar in bars]
    longest = max(totals, default=0.0) or 1.0
    digits = 0 if longest >= 50 else 1
    lefts, rows = [0.0] * len(bars), range(len(bars))
    for name, (_, color) in PARTS.items():
        widths = [bar.get(name, 0.0) for bar in bars]
        if any(name in bar for bar in bars):
            drawn = axes.barh(rows, widths, left=lefts, height=0.68, color=color)
            shown = [f"{width:.{digits}f}" if width > _WIDE_ENOUGH * longest else "" for width in widths]
            ink = "#000000" if color in _DARK_TEXT_ON else ON_COLOR
            axes.bar_label(drawn, shown, label_type="center", color=ink, fontsize=8)
            lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    for row, total in enumerate(totals):
        axes.text(total + longest * 0.02, row, f"{total:,.{digits}f}", va="center", fontsize=8.5)
    axes.set_xlim(0, longest * 1.2)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)


def has_times(run: Run) -> bool:
    """Whether it has the times of each request (`--save-detailed`)."""
    return bool(_rows(run))


def draw_timeline(runs: Sequence[Run], limit_ms: float | None) -> Figure:
    """A panel for each run, all with one time axis and one scale of colours: blue within the SLO of a gap, else warm.

    Without an SLO (`limit_ms` None) the middle of the scale takes its place. The first 300 requests are shown.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import MaxNLocator

    shown = [(run, rows) for run in runs if (rows := _rows(run))]
    low, high = _scale([gap * 1e3 for _, rows in shown for _, _, gaps in rows for gap in gaps], limit_ms)
    end_s = max(start + ttft + sum(gaps) for _, rows in shown for start, ttft, gaps in rows)
    with styled():
        colors, norm = _colors(low, high, limit_ms), LogNorm(low, high, clip=True)
        title = f"Requests over time, coloured by the gaps between tokens: {shown[0][0].pace}"
        figure = new_figure(title, height=HEIGHT + 0.4)
        panels = figure.subplots(1, len(shown), squeeze=False, sharex=True, sharey=True)[0]
        for axes, (run, rows) in zip(panels, shown, strict=True):
            axes.add_collection(_lines(rows, colors, norm))
            axes.set_title(run.target)
            axes.set_xlabel("time (s)")
        panels[0].set_xlim(0, end_s * 1.02)
        panels[0].set_ylim(max(len(rows) for _, rows in shown) + 1, 0)
        panels[0].set_ylabel("request, in the order sent")
        panels[0].yaxis.set_major_locator(MaxNLocator(integer=True, prune="upper"))
        bar = figure.colorbar(ScalarMappable(norm, colors), ax=list(panels), aspect=30, pad=0.015, extend="both")
        nice = [step * 10.0**power for power in range(-1, 6) for step in (1, 2, 5)]
        ticks = [value for value in nice if low * 1.02 <= value <= high / 1.02]
        bar.set_ticks(ticks, labels=[f"{value:g}" for value in ticks])
        bar.minorticks_off()
        bar.outline.set_visible(False)
        bar.set_label(f"gap (ms){'; red line: SLO' if limit_ms is not None else ''}; grey: waiting for token 1")
        if limit_ms is not None:
            bar.ax.axhline(limit_ms, color=REFERENCE, linewidth=2.5)
    return figure


def _colors(low: float, high: float, limit_ms: float | None) -> Colormap:
    """Blue from `low` to the SLO, warm from there to `high`, on a scale of logarithms."""
    from matplotlib.colors import LinearSegmentedColormap

    turn = math.log(limit_ms / low) / math.log(high / low) if limit_ms is not None else 0.5
    places = (0.0, turn / 2, turn, turn, (1 + turn) / 2, 1.0)
    return LinearSegmentedColormap.from_list("gaps", list(zip(places, (*_CALM, *_LATE), strict=True)), N=512)


def _rows(run: Run) -> list[tuple[float, float, list[float]]]:
    """Start (s since the run's first), TTFT and gaps of each request that has an answer, in the order sent."""
    starts, ttfts, itls = run.row("start_times"), run.row("ttfts"), run.row("itls")
    if not starts or not len(starts) == len(ttfts) == len(itls):
        return []
    rows = sorted(zip(starts, ttfts, itls, strict=True), key=lambda row: row[0])
    return [(start - rows[0][0], ttft, gaps) for start, ttft, gaps in rows if ttft > 0][:_MAX_ROWS]


def _scale(gaps_ms: list[float], limit_ms: float | None) -> tuple[float, float]:
    """Ends of the colour scale: the bulk of the gaps, and the SLO inside."""
    low, high = (percentile(gaps_ms, 5), percentile(gaps_ms, 99.8)) if gaps_ms else (1.0, 100.0)
    if limit_ms is not None:
        low, high = min(low, limit_ms / 2), max(high, limit_ms * 2)
    low = max(low, 0.1)
    return low, max(high, 2 * low)


def _lines(rows: Sequence[tuple[float, float, list[float]]], colors: Any, norm: Any) -> LineCollection:
    """All rows as one collection of pixels: thousands of gaps as vectors would make a page of megabytes."""
    import numpy as np
    from matplotlib.collections import LineCollection

    segments, shades, widths = [], [], []
    width = max(1.2, min(5.0, 190 / len(rows)))
    for place, (start, ttft, gaps) in enumerate(rows, start=1):
        edges = start + ttft + np.concatenate([[0.0], np.cumsum(gaps)])
        segments.append([(start, place), (start + ttft, place)])
        segments.extend([(one, place), (two, place)] for one, two in itertools.pairwise(edges))
        shades.append(SOFT + "66")
        shades.extend(colors(norm(np.asarray(gaps) * 1e3)) if len(gaps) else [])
        widths.extend([width * 0.4] + [width] * len(gaps))
    return LineCollection(
        segments, colors=shades, linewidths=widths, capstyle="butt", antialiaseds=False, rasterized=True
    )
