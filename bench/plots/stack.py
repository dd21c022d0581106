"""Where the time to the first and to the second token goes: stacked bars of the parts, for each rate and target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bench.plots.style import ON_COLOR, PALETTE, new_figure, styled
from bench.runs import Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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


def has_breakdown(points: Sequence[Point]) -> bool:
    """Whether some run has a breakdown."""
    return any(parts_of(point, "ttft") for point in points)


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
    longest = max((sum(bar.values()) for bar in bars), default=0.0) or 1.0
    digits = 0 if longest >= 50 else 1
    lefts = [0.0] * len(bars)
    for name, (_, color) in PARTS.items():
        if not any(name in bar for bar in bars):
            continue
        widths = [bar.get(name, 0.0) for bar in bars]
        axes.barh(range(len(bars)), widths, left=lefts, height=0.68, color=color)
        ink = "#000000" if color in _DARK_TEXT_ON else ON_COLOR
        for row, (left, width) in enumerate(zip(lefts, widths, strict=True)):
            if width > _WIDE_ENOUGH * longest:
                middle = left + width / 2
                axes.text(middle, row, f"{width:.{digits}f}", ha="center", va="center", color=ink, fontsize=8)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    for row, total in enumerate(lefts):
        axes.text(total + longest * 0.02, row, f"{total:,.{digits}f}", va="center", fontsize=8.5)
    axes.set_xlim(0, longest * 1.2)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
