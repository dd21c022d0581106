"""Figures from samples of handoffs; tables and a picture of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from baton.bench.kv.measure import Case
from baton.bench.numbers import NOISY_SPREAD, median, paired_ratio, percentile, size, spread
from baton.bench.plots.lines import Line, Panel, Plot
from baton.bench.plots.style import PALETTE, SOFT, Look
from baton.bench.report.document import Table, table_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLORS = {"shm": PALETTE[0], "zmq": PALETTE[4], "nixl": PALETTE[2], "nccl": PALETTE[3]}


_GLOSSARY = (
    "Wall time: from the moment a prompt is computed until the decode node has delivered it; let go: until the prefill "
    "node's blocks are free again. "
    "kv_bw_ratio: payload rate over that of one np.copyto of as many bytes, measured in turns: ratio of medians, range "
    "of the pairs. kv_overhead_us: wall time less that copy. "
    f"noisy: the copies themselves spread by more than {NOISY_SPREAD:.0%} (10th to 90th percentile over the median), "
    "because something else used the machine. No conclusions from such a line."
)


def table(cases: Sequence[Case]) -> Table:
    """A row for each case, at least one."""
    sizes = " and ".join(map(size, sorted({case.block_bytes for case in cases})))
    heads, rows = list(_row(cases[0])), [list(_row(case).values()) for case in cases]
    return table_of("kv", f"Handoffs of blocks of {sizes}", heads, rows, _GLOSSARY)


def _row(case: Case) -> dict[str, str]:
    """Cells by the heads of their columns."""
    ratio, unsteady = paired_ratio(case.memcpy_s, case.wall_s), spread(case.memcpy_s)
    return {
        "transport": case.transport,
        "checksum": case.checksum,
        "blocks": str(case.num_blocks),
        "GB/s": f"{gb_per_s(case, case.wall_s):.2f}",
        "p50 ms": f"{median(case.wall_s) * 1e3:.2f}",
        "p99 ms": f"{percentile(case.wall_s, 99) * 1e3:.2f}",
        "let go ms": f"{median(case.let_go_s) * 1e3:.2f}",
        "memcpy GB/s": f"{gb_per_s(case, case.memcpy_s):.2f}",
        "kv_bw_ratio": f"{ratio.of_medians:.2f}",
        "range": f"{ratio.low:.2f} - {ratio.high:.2f}",
        "kv_overhead_us": f"{(median(case.wall_s) - median(case.memcpy_s)) * 1e6:.0f}",
        "note": f"noisy ({unsteady:.0%})" if unsteady > NOISY_SPREAD else "",
    }


def gb_per_s(case: Case, taken_s: Sequence[float]) -> float:
    """The payload counts once."""
    return case.num_bytes / median(taken_s) / 1e9


def draw_transfer(cases: Sequence[Case]) -> Figure:
    """A line for each way. Each has copies of its own: the band is between the slowest and the fastest of them."""
    ordered = sorted(cases, key=lambda case: case.num_bytes)
    sizes: dict[float, str] = {case.num_bytes: size(case.num_bytes) for case in ordered}
    lines = []
    for transport, checksum in dict.fromkeys((case.transport, case.checksum) for case in cases):
        own = [case for case in ordered if (case.transport, case.checksum) == (transport, checksum)]
        is_checked = checksum != "none"
        look = Look(_COLORS.get(transport, PALETTE[1]), "o" if is_checked else "s", "-" if is_checked else "--")
        label = f"{transport}, {'checksums' if is_checked else 'no checksums'}"
        lines.append(Line(label, look, [case.num_bytes for case in own], [gb_per_s(case, case.wall_s) for case in own]))
    copies = [[gb_per_s(case, case.memcpy_s) for case in ordered if case.num_bytes == each] for each in sizes]
    means, ends = [sum(found) / len(found) for found in copies], [(min(found), max(found)) for found in copies]
    lines.append(Line("copy (memcpy)", Look(SOFT, "", "-"), list(sizes), means, ends))
    panel = Panel(lines, "KV of one handoff", "GB/s, until the decode node has it", x_ticks=sizes, x_log=2)
    return Plot("Rate of KV handoffs between two processes", [panel]).draw()
