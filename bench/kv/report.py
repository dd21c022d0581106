"""Figures from samples, and tables of them for people and for documents."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.facts import Facts
from bench.kv.measure import Case, Limits, Results
from bench.output_file import write_file
from bench.plots.style import as_png
from bench.plots.transfer import Handoffs, draw
from bench.report.document import aligned
from bench.stats import NOISY_SPREAD, PairedRatio, median, paired_ratio, percentile, spread


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
    """Figures of a case that has samples."""
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


_Columns = dict[str, Callable[[Case, Figures], str]]
_WAY: _Columns = {"transport": lambda case, _: case.transport, "checksum": lambda case, _: case.checksum}
_NOTE: _Columns = {"note": lambda _, found: f"noisy ({found.memcpy_spread:.0%})" if found.is_noisy else ""}
_CASE_COLUMNS: _Columns = {
    **_WAY,
    "blocks": lambda case, _: str(case.num_blocks),
    "GB/s": lambda _, found: f"{found.gb_per_s:.2f}",
    "p50 ms": lambda _, found: f"{found.p50_us / 1e3:.2f}",
    "p99 ms": lambda _, found: f"{found.p99_us / 1e3:.2f}",
    "let go ms": lambda _, found: f"{found.let_go_p50_us / 1e3:.2f}",
    "memcpy GB/s": lambda _, found: f"{found.memcpy_gb_per_s:.2f}",
    "kv_bw_ratio": lambda _, found: f"{found.kv_bw_ratio.of_medians:.2f}",
    "range": lambda _, found: _range(found.kv_bw_ratio),
    "kv_overhead_us": lambda _, found: f"{found.kv_overhead_us:.0f}",
    **_NOTE,
}
_SMALL_COLUMNS: _Columns = {
    **_WAY,
    "p50 us": lambda _, found: f"{found.p50_us:.0f}",
    "p99 us": lambda _, found: f"{found.p99_us:.0f}",
    "let go us": lambda _, found: f"{found.let_go_p50_us:.0f}",
    "memcpy us": lambda case, _: f"{median(case.memcpy_s) * 1e6:.0f}",
    **_NOTE,
}
_BARE_COLUMNS: _Columns = {
    "checksum": _WAY["checksum"],
    "block": lambda case, _: _size(case.block_bytes),
    "blocks": _CASE_COLUMNS["blocks"],
    "GB/s": _CASE_COLUMNS["GB/s"],
    "bare GB/s": lambda _, found: f"{found.bare_nixl_gb_per_s:.2f}",
    "ratio to bare": lambda _, found: f"{found.bare_nixl_ratio.of_medians:.2f}" if found.bare_nixl_ratio else "",
    "range": lambda _, found: _range(found.bare_nixl_ratio) if found.bare_nixl_ratio else "",
    **_NOTE,
}
_LIMIT_NAMES = {
    "copy (np.copyto)": "copy_s",
    "copy while the other core hashes": "copy_beside_hashing_s",
    "hash (xxh3)": "hash_s",
    "copy and hash, MiB by MiB": "copy_and_hash_s",
    "send to the other core (TCP, plain sockets)": "tcp_s",
}
GLOSSARY = (
    "Wall time: from the moment a prompt is computed until the decode node has delivered it; let go: until the prefill "
    "node's blocks are free again.",
    "kv_bw_ratio: payload rate over that of one np.copyto of as many bytes, measured in turns: ratio of medians, range "
    "of the pairs. kv_overhead_us: wall time less that copy.",
    f"noisy: the copies themselves spread by more than {NOISY_SPREAD:.0%} (10th to 90th percentile over the median), "
    "because something else used the machine. No conclusions from such a line.",
)


def report(facts: Facts, results: Results, missing: dict[str, str], *, as_markdown: bool) -> str:
    """Everything that a run has to say. Tables are Markdown in any case; `as_markdown` makes their titles so, too."""
    sections = ["\n".join(facts.describe())]
    for title, heads, rows in tables(results):
        sections.append(f"**{title}**\n\n{aligned(heads, rows)}" if as_markdown else f"{title}\n{aligned(heads, rows)}")
    sections += [hop_in_words(results.limits), "\n".join(GLOSSARY)]
    not_measured = [f"{name} was not measured: {reason}" for name, reason in missing.items()]
    not_measured += [f"{name} failed: {reason}" for name, reason in results.failures.items()]
    return "\n\n".join([*sections, *(["\n".join(not_measured)] if not_measured else [])])


def tables(results: Results) -> list[tuple[str, Sequence[str], list[list[str]]]]:
    """Title, heads and rows of each table that the results have something for."""
    bare = [case for case in (*results.small_cases, *results.cases) if case.bare_nixl_s]
    found: list[tuple[str, Sequence[str], list[list[str]]]] = []
    for title, columns, cases in (
        ("Handoffs of blocks of {}", _CASE_COLUMNS, results.cases),
        ("Fixed cost: one block of {}", _SMALL_COLUMNS, results.small_cases),
        ("nixl against bare NIXL writes", _BARE_COLUMNS, bare),
    ):
        if cases:
            sizes = " and ".join(map(_size, sorted({case.block_bytes for case in cases})))
            measured = [(case, figures(case)) for case in cases]
            rows = [[cell(*each) for cell in columns.values()] for each in measured]
            found.append((title.format(sizes), list(columns), rows))
    num_bytes, rows = results.limits.num_bytes, []
    for name, samples in _LIMIT_NAMES.items():
        times_s = getattr(results.limits, samples)
        rows.append([name, f"{num_bytes / median(times_s) / 1e9:.2f}", f"{spread(times_s):.0%}"])
    return [*found, ("Limits of this machine", ("one core can", "GB/s", "spread"), rows)]


def hop_in_words(limits: Limits) -> str:
    """What the one message of a handoff takes."""
    hop_us = median(limits.zmq_hop_s) * 1e6
    return f"A ZMQ message takes {hop_us:.0f} us to the other core after a pause; a handoff needs one."


def as_json(facts: Facts, results: Results, missing: dict[str, str]) -> dict[str, Any]:
    """Everything that was measured, samples included, with the figures made of them."""
    found = dataclasses.asdict(results)
    for name, cases in (("cases", results.cases), ("small_cases", results.small_cases)):
        for case, fields in zip(cases, found[name], strict=True):
            fields["figures"] = dataclasses.asdict(figures(case))
    return {"facts": dataclasses.asdict(facts), **found, "missing": missing}


def handoffs_of(case: Case) -> Handoffs:
    """What a picture shows of a case."""
    found, is_checked = figures(case), case.checksum != "none"
    rates = (found.gb_per_s, found.memcpy_gb_per_s, found.bare_nixl_gb_per_s)
    return Handoffs(case.transport, is_checked, case.num_bytes, *rates)


def save_plot(cases: Sequence[Case], path: str, caption: str) -> None:
    """Write a PNG. Raises `InvalidSetting` when that cannot be."""
    write_file(Path(path), as_png(draw([handoffs_of(case) for case in cases], caption)), "--plot ")


def _range(ratio: PairedRatio) -> str:
    return f"{ratio.low:.2f} - {ratio.high:.2f}"


def _size(num_bytes: int) -> str:
    if num_bytes % 2**20 == 0:
        return f"{num_bytes // 2**20} MiB"
    return f"{num_bytes // 2**10} KiB" if num_bytes % 2**10 == 0 else f"{num_bytes} bytes"
