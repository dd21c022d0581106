"""How fast KV moves: GB/s against the size of a handoff, a line for each transport, beside plain copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.plots.style import INK, PALETTE, SOFT, legend_outside, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = {"shm": PALETTE[0], "zmq": PALETTE[4], "nixl": PALETTE[2], "nccl": PALETTE[3]}


@dataclass(frozen=True, slots=True)
class Handoffs:
    """Handoffs of one size over one transport, in GB/s: themselves, copies in turns with them, and bare NIXL writes."""

    transport: str
    is_checked: bool
    num_bytes: int
    gb_per_s: float
    memcpy_gb_per_s: float
    bare_gb_per_s: float | None


def draw(handoffs: Sequence[Handoffs], caption: str = "") -> Figure:
    """Every line has copies of its own: the band is between the slowest and the fastest of them."""
    sizes = sorted({each.num_bytes for each in handoffs})
    with styled():
        figure = new_figure("Rate of KV handoffs between two processes")
        axes = figure.subplots()
        for transport, is_checked in dict.fromkeys((each.transport, each.is_checked) for each in handoffs):
            own = _own(handoffs, transport, is_checked)
            axes.plot(
                [each.num_bytes for each in own],
                [each.gb_per_s for each in own],
                "-" if is_checked else "--",
                marker="o" if is_checked else "s",
                color=_COLORS.get(transport, PALETTE[1]),
                label=f"{transport}, {'checksums' if is_checked else 'no checksums'}",
            )
        _copies(axes, handoffs, sizes)
        bare = [each for each in _own(handoffs, "nixl", handoffs[0].is_checked) if each.bare_gb_per_s is not None]
        if bare:
            rates = [each.bare_gb_per_s or 0.0 for each in bare]
            axes.plot([each.num_bytes for each in bare], rates, ":", marker="x", color=INK, label="bare NIXL write")
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [size_in_words(size) for size in sizes])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_xlabel("KV of one handoff")
        axes.set_ylabel("GB/s, until the decode node has it")
        if caption:
            axes.set_xlabel(f"KV of one handoff\n{caption}")
        legend_outside(figure, [axes])
    return figure


def _own(handoffs: Sequence[Handoffs], transport: str, is_checked: bool) -> list[Handoffs]:
    found = [each for each in handoffs if (each.transport, each.is_checked) == (transport, is_checked)]
    return sorted(found, key=lambda each: each.num_bytes)


def _copies(axes: Axes, handoffs: Sequence[Handoffs], sizes: Sequence[int]) -> None:
    copies = [[each.memcpy_gb_per_s for each in handoffs if each.num_bytes == size] for size in sizes]
    axes.fill_between(sizes, [min(rates) for rates in copies], [max(rates) for rates in copies], color=SOFT, alpha=0.2)
    axes.plot(sizes, [sum(rates) / len(rates) for rates in copies], color=SOFT, label="copy (memcpy)")


def size_in_words(num_bytes: int) -> str:
    """`64 MiB`."""
    return f"{num_bytes / 2**20:g} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:g} KiB"
