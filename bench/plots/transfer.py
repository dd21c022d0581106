"""How fast KV moves: GB/s against the size of a handoff, a line for each transport, beside plain copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.plots.lines import Line, Panel, Plot
from bench.plots.style import INK, PALETTE, SOFT, Look

if TYPE_CHECKING:
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
    ordered = sorted(handoffs, key=lambda each: each.num_bytes)
    sizes: dict[float, str] = {each.num_bytes: size_in_words(each.num_bytes) for each in ordered}
    lines = []
    for transport, is_checked in dict.fromkeys((each.transport, each.is_checked) for each in handoffs):
        own = [each for each in ordered if (each.transport, each.is_checked) == (transport, is_checked)]
        look = Look(_COLORS.get(transport, PALETTE[1]), "o" if is_checked else "s", "-" if is_checked else "--")
        label = f"{transport}, {'checksums' if is_checked else 'no checksums'}"
        lines.append(Line(label, look, [each.num_bytes for each in own], [each.gb_per_s for each in own]))
    copies = [[each.memcpy_gb_per_s for each in ordered if each.num_bytes == num_bytes] for num_bytes in sizes]
    means, ends = [sum(found) / len(found) for found in copies], [(min(found), max(found)) for found in copies]
    lines.append(Line("copy (memcpy)", Look(SOFT, "", "-"), list(sizes), means, ends))
    bare = {
        each.num_bytes: each.bare_gb_per_s
        for each in ordered
        if each.bare_gb_per_s is not None and each.is_checked == handoffs[0].is_checked
    }
    if bare:
        lines.append(Line("bare NIXL write", Look(INK, "x", ":"), list(bare), list(bare.values())))
    panel = Panel(
        lines,
        "\n".join(filter(None, ("KV of one handoff", caption))),
        "GB/s, until the decode node has it",
        x_ticks=sizes,
        x_log=2,
    )
    return Plot("Rate of KV handoffs between two processes", [panel]).draw()


def size_in_words(num_bytes: int) -> str:
    """`64 MiB`."""
    return f"{num_bytes / 2**20:g} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:g} KiB"
