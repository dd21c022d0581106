"""Figures from samples, and tables of them for people and for documents."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.bench.arguments import write_file
from baton.bench.facts import Facts
from baton.bench.kv.measure import Case, Results
from baton.bench.numbers import NOISY_SPREAD, PairedRatio, median, paired_ratio, percentile, size, spread
from baton.bench.plots.lines import Handoffs, draw_transfer
from baton.bench.plots.style import as_png
from baton.bench.report.document import Table, table_of


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one case. Rates count the payload once.

    `kv_bw_ratio`: rate of the handoffs over that of the copies, pair by pair. `kv_overhead_us`: what a handoff takes
    beyond a copy, by medians. `bare_nixl_ratio`: the same ratio to bare NIXL writes. `is_noisy`: the copies themselves
    were not steady, so the figures say little.
    """

    gb_per_s: float
    memcpy_gb_per_s: float
    p50_us: float
    p99_us: float
    let_go_p50_us: float
    kv_bw_ratio: PairedRatio
    kv_overhead_us: float
    bare_nixl_gb_per_s: float | None
    bare_nixl_ratio: PairedRatio | None
    memcpy_spread: float
    is_noisy: bool


def figures(case: Case) -> Figures:
    wall_s, memcpy_s, bare_s = median(case.wall_s), median(case.memcpy_s), case.bare_nixl_s
    return Figures(
        gb_per_s=case.num_bytes / wall_s / 1e9,
        memcpy_gb_per_s=case.num_bytes / memcpy_s / 1e9,
        p50_us=wall_s * 1e6,
        p99_us=percentile(case.wall_s, 99) * 1e6,
        let_go_p50_us=median(case.let_go_s) * 1e6,
        kv_bw_ratio=paired_ratio(case.memcpy_s, case.wall_s),
        kv_overhead_us=(wall_s - memcpy_s) * 1e6,
        bare_nixl_gb_per_s=case.num_bytes / median(bare_s) / 1e9 if bare_s else None,
        bare_nixl_ratio=paired_ratio(bare_s, case.wall_s) if bare_s else None,
        memcpy_spread=spread(case.memcpy_s),
        is_noisy=spread(case.memcpy_s) > NOISY_SPREAD,
    )


_Columns = dict[str, Callable[[Case], str]]
_WAY: _Columns = {"transport": lambda case: case.transport, "checksum": lambda case: case.checksum}
_SIZE: _Columns = {"blocks": lambda case: str(case.num_blocks), "GB/s": lambda case: f"{figures(case).gb_per_s:.2f}"}
_NOTE: _Columns = {"note": lambda case: f"noisy ({figures(case).memcpy_spread:.0%})" if figures(case).is_noisy else ""}
_CASE_COLUMNS: _Columns = {
    **_WAY,
    **_SIZE,
    "p50 ms": lambda case: f"{figures(case).p50_us / 1e3:.2f}",
    "p99 ms": lambda case: f"{figures(case).p99_us / 1e3:.2f}",
    "let go ms": lambda case: f"{figures(case).let_go_p50_us / 1e3:.2f}",
    "memcpy GB/s": lambda case: f"{figures(case).memcpy_gb_per_s:.2f}",
    "kv_bw_ratio": lambda case: f"{figures(case).kv_bw_ratio.of_medians:.2f}",
    "range": lambda case: _range(figures(case).kv_bw_ratio),
    "kv_overhead_us": lambda case: f"{figures(case).kv_overhead_us:.0f}",
    **_NOTE,
}
_SMALL_COLUMNS: _Columns = {
    **_WAY,
    "p50 us": lambda case: f"{figures(case).p50_us:.0f}",
    "p99 us": lambda case: f"{figures(case).p99_us:.0f}",
    "let go us": lambda case: f"{figures(case).let_go_p50_us:.0f}",
    "memcpy us": lambda case: f"{median(case.memcpy_s) * 1e6:.0f}",
    **_NOTE,
}
_BARE_COLUMNS: _Columns = {
    "checksum": _WAY["checksum"],
    "block": lambda case: size(case.block_bytes),
    **_SIZE,
    "bare GB/s": lambda case: f"{case.num_bytes / median(case.bare_nixl_s) / 1e9:.2f}",
    "ratio to bare": lambda case: f"{paired_ratio(case.bare_nixl_s, case.wall_s).of_medians:.2f}",
    "range": lambda case: _range(paired_ratio(case.bare_nixl_s, case.wall_s)),
    **_NOTE,
}
_LIMIT_NAMES = {
    "copy (np.copyto)": "copy_s",
    "copy while the other core hashes": "copy_beside_hashing_s",
    "hash (xxh3)": "hash_s",
    "copy and hash, MiB by MiB": "copy_and_hash_s",
    "send to the other core (TCP, plain sockets)": "tcp_s",
}
_WORDS = ("transport", "checksum", "block", "range", "note", "one core can")
_GLOSSARY = (
    "Wall time: from the moment a prompt is computed until the decode node has delivered it; let go: until the prefill "
    "node's blocks are free again. "
    "kv_bw_ratio: payload rate over that of one np.copyto of as many bytes, measured in turns: ratio of medians, range "
    "of the pairs. kv_overhead_us: wall time less that copy. "
    f"noisy: the copies themselves spread by more than {NOISY_SPREAD:.0%} (10th to 90th percentile over the median), "
    "because something else used the machine. No conclusions from such a line."
)


def tables(results: Results) -> list[Table]:
    """Those that the results have something for, in their order: "kv-0" and so on; the first one's note explains."""
    bare = [case for case in (*results.small_cases, *results.cases) if case.bare_nixl_s]
    found: list[Table] = []
    for title, columns, cases in (
        ("Handoffs of blocks of {}", _CASE_COLUMNS, results.cases),
        ("Fixed cost: one block of {}", _SMALL_COLUMNS, results.small_cases),
        ("nixl against bare NIXL writes", _BARE_COLUMNS, bare),
    ):
        if cases:
            title = title.format(" and ".join(map(size, sorted({case.block_bytes for case in cases}))))
            note = "" if found else _GLOSSARY
            rows = [[column(case) for column in columns.values()] for case in cases]
            found.append(table_of(f"kv-{len(found)}", title, list(columns), rows, _WORDS, note))
    limits = results.limits
    times_s: dict[str, list[float]] = {name: getattr(limits, samples) for name, samples in _LIMIT_NAMES.items()}
    rows = [
        [name, f"{limits.num_bytes / median(each) / 1e9:.2f}", f"{spread(each):.0%}"] for name, each in times_s.items()
    ]
    hop_us = median(limits.zmq_hop_s) * 1e6
    note = f"A ZMQ message takes {hop_us:.0f} us to the other core after a pause; a handoff needs one."
    return [
        *found,
        table_of(f"kv-{len(found)}", "Limits of this machine", ("one core can", "GB/s", "spread"), rows, _WORDS, note),
    ]


def as_json(facts: Facts, results: Results, missing: dict[str, str]) -> dict[str, Any]:
    """Everything that was measured, samples included, with the figures made of them."""
    found = dataclasses.asdict(results)
    for name, cases in (("cases", results.cases), ("small_cases", results.small_cases)):
        for case, fields in zip(cases, found[name], strict=True):
            fields["figures"] = dataclasses.asdict(figures(case))
    return {"facts": dataclasses.asdict(facts), **found, "missing": missing}


def handoffs_of(case: Case) -> Handoffs:
    found, is_checked = figures(case), case.checksum != "none"
    rates = (found.gb_per_s, found.memcpy_gb_per_s, found.bare_nixl_gb_per_s)
    return Handoffs(case.transport, is_checked, case.num_bytes, *rates)


def save_plot(cases: Sequence[Case], path: str, caption: str) -> None:
    """Write a PNG. Raises `InvalidSetting` when that cannot be."""
    write_file(Path(path), as_png(draw_transfer([handoffs_of(case) for case in cases], caption)), "--plot ")


def _range(ratio: PairedRatio) -> str:
    return f"{ratio.low:.2f} - {ratio.high:.2f}"
