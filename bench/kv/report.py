"""Figures from samples of handoffs; tables and a picture of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.bench.kv.measure import Case
from baton.bench.numbers import NOISY_SPREAD, PairedRatio, median, paired_ratio, percentile, size, spread
from baton.bench.plots.lines import Line, Panel, Plot
from baton.bench.plots.style import PALETTE, SOFT, Look
from baton.bench.report.document import Table, table_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLORS = {"shm": PALETTE[0], "zmq": PALETTE[4], "nixl": PALETTE[2], "nccl": PALETTE[3]}


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one case. Rates count the payload once.

    `kv_bw_ratio`: rate of the handoffs over that of the copies, pair by pair. `kv_overhead_us`: what a handoff takes
    beyond a copy, by medians. `is_noisy`: the copies themselves were not steady, so the figures say little.
    """

    gb_per_s: float
    memcpy_gb_per_s: float
    p50_us: float
    p99_us: float
    let_go_p50_us: float
    kv_bw_ratio: PairedRatio
    kv_overhead_us: float
    memcpy_spread: float
    is_noisy: bool


def figures(case: Case) -> Figures:
    wall_s, memcpy_s, spread_of_copies = median(case.wall_s), median(case.memcpy_s), spread(case.memcpy_s)
    return Figures(
        gb_per_s=case.num_bytes / wall_s / 1e9,
        memcpy_gb_per_s=case.num_bytes / memcpy_s / 1e9,
        p50_us=wall_s * 1e6,
        p99_us=percentile(case.wall_s, 99) * 1e6,
        let_go_p50_us=median(case.let_go_s) * 1e6,
        kv_bw_ratio=paired_ratio(case.memcpy_s, case.wall_s),
        kv_overhead_us=(wall_s - memcpy_s) * 1e6,
        memcpy_spread=spread_of_copies,
        is_noisy=spread_of_copies > NOISY_SPREAD,
    )


_COLUMNS: dict[str, Callable[[Figures], str]] = {
    "GB/s": lambda found: f"{found.gb_per_s:.2f}",
    "p50 ms": lambda found: f"{found.p50_us / 1e3:.2f}",
    "p99 ms": lambda found: f"{found.p99_us / 1e3:.2f}",
    "let go ms": lambda found: f"{found.let_go_p50_us / 1e3:.2f}",
    "memcpy GB/s": lambda found: f"{found.memcpy_gb_per_s:.2f}",
    "kv_bw_ratio": lambda found: f"{found.kv_bw_ratio.of_medians:.2f}",
    "range": lambda found: f"{found.kv_bw_ratio.low:.2f} - {found.kv_bw_ratio.high:.2f}",
    "kv_overhead_us": lambda found: f"{found.kv_overhead_us:.0f}",
}
_GLOSSARY = (
    "Wall time: from the moment a prompt is computed until the decode node has delivered it; let go: until the prefill "
    "node's blocks are free again. "
    "kv_bw_ratio: payload rate over that of one np.copyto of as many bytes, measured in turns: ratio of medians, range "
    "of the pairs. kv_overhead_us: wall time less that copy. "
    f"noisy: the copies themselves spread by more than {NOISY_SPREAD:.0%} (10th to 90th percentile over the median), "
    "because something else used the machine. No conclusions from such a line."
)


def table(cases: Sequence[Case]) -> Table:
    """A row for each case."""
    sizes = " and ".join(map(size, sorted({case.block_bytes for case in cases})))
    heads = ["transport", "checksum", "blocks", *_COLUMNS, "note"]
    return table_of("kv", f"Handoffs of blocks of {sizes}", heads, map(_row, cases), _GLOSSARY)


def _row(case: Case) -> list[str]:
    found = figures(case)
    note = f"noisy ({found.memcpy_spread:.0%})" if found.is_noisy else ""
    return [case.transport, case.checksum, str(case.num_blocks), *(form(found) for form in _COLUMNS.values()), note]


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
        lines.append(Line(label, look, [case.num_bytes for case in own], [figures(case).gb_per_s for case in own]))
    copies = [[figures(case).memcpy_gb_per_s for case in ordered if case.num_bytes == each] for each in sizes]
    means, ends = [sum(found) / len(found) for found in copies], [(min(found), max(found)) for found in copies]
    lines.append(Line("copy (memcpy)", Look(SOFT, "", "-"), list(sizes), means, ends))
    panel = Panel(lines, "KV of one handoff", "GB/s, until the decode node has it", x_ticks=sizes, x_log=2)
    return Plot("Rate of KV handoffs between two processes", [panel]).draw()
