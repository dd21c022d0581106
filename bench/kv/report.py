"""Figures from samples, and tables of them for people and for documents."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.facts import Facts
from bench.kv.measure import Case, Limits, Results
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


_CASE_HEADS = (
    "transport",
    "checksum",
    "blocks",
    "GB/s",
    "p50 ms",
    "p99 ms",
    "let go ms",
    "memcpy GB/s",
    "kv_bw_ratio",
    "range",
    "kv_overhead_us",
    "note",
)
_SMALL_HEADS = ("transport", "checksum", "p50 us", "p99 us", "let go us", "memcpy us", "note")
_BARE_HEADS = ("checksum", "block", "blocks", "GB/s", "bare GB/s", "ratio to bare", "range", "note")
_LIMIT_HEADS = ("one core can", "GB/s", "spread")
GLOSSARY = (
    "Wall time: from the moment a prompt is computed until the decode node has delivered it; let go: until the prefill "
    "node's blocks are free again.",
    "kv_bw_ratio: payload rate over that of one np.copyto of as many bytes, measured in turns: ratio of medians, range "
    "of the pairs. kv_overhead_us: wall time less that copy.",
    f"noisy: the copies themselves spread by more than {NOISY_SPREAD:.0%} (10th to 90th percentile over the median), "
    "because something else used the machine. No conclusions from such a line.",
)


def report(facts: Facts, results: Results, missing: dict[str, str], *, as_markdown: bool) -> str:
    """Everything that a run has to say."""
    sections = ["\n".join(facts.describe())]
    sections += [_section(title, heads, rows, as_markdown) for title, heads, rows in tables(results)]
    sections.append(hop_in_words(results.limits))
    sections.append("\n".join(GLOSSARY))
    not_measured = [f"{name} was not measured: {reason}" for name, reason in missing.items()]
    not_measured += [f"{name} failed: {reason}" for name, reason in results.failures.items()]
    if not_measured:
        sections.append("\n".join(not_measured))
    return "\n\n".join(sections)


def tables(results: Results) -> list[tuple[str, Sequence[str], list[list[str]]]]:
    """Title, heads and rows of each table that the results have something for."""
    every = [*results.small_cases, *results.cases]
    found: list[tuple[str, Sequence[str], list[list[str]]]] = []
    if results.cases:
        sizes = {case.block_bytes for case in results.cases}
        title = f"Handoffs of blocks of {' and '.join(map(_size, sorted(sizes)))}"
        found.append((title, _CASE_HEADS, [_case_row(case) for case in results.cases]))
    if results.small_cases:
        title = f"Fixed cost: one block of {_size(results.small_cases[0].block_bytes)}"
        found.append((title, _SMALL_HEADS, [_small_row(case) for case in results.small_cases]))
    bare = [case for case in every if case.bare_nixl_s]
    if bare:
        found.append(("nixl against bare NIXL writes", _BARE_HEADS, [_bare_row(case) for case in bare]))
    found.append(("Limits of this machine", _LIMIT_HEADS, _limit_rows(results.limits)))
    return found


def hop_in_words(limits: Limits) -> str:
    """What the one message of a handoff takes."""
    hop_us = median(limits.zmq_hop_s) * 1e6
    return f"A ZMQ message takes {hop_us:.0f} us to the other core after a pause; a handoff needs one."


def as_json(facts: Facts, results: Results, missing: dict[str, str]) -> dict[str, Any]:
    """Everything that was measured, samples included, with the figures made of them."""

    def with_figures(case: Case) -> dict[str, Any]:
        return {**dataclasses.asdict(case), "figures": dataclasses.asdict(figures(case))}

    return {
        "facts": dataclasses.asdict(facts),
        "limits": dataclasses.asdict(results.limits),
        "cases": [with_figures(case) for case in results.cases],
        "small_cases": [with_figures(case) for case in results.small_cases],
        "failures": results.failures,
        "missing": missing,
    }


def _case_row(case: Case) -> list[str]:
    found = figures(case)
    return [
        case.transport,
        case.checksum,
        str(case.num_blocks),
        f"{found.gb_per_s:.2f}",
        f"{found.p50_us / 1e3:.2f}",
        f"{found.p99_us / 1e3:.2f}",
        f"{found.let_go_p50_us / 1e3:.2f}",
        f"{found.memcpy_gb_per_s:.2f}",
        f"{found.kv_bw_ratio.of_medians:.2f}",
        _range(found.kv_bw_ratio),
        f"{found.kv_overhead_us:.0f}",
        _note(found),
    ]


def _small_row(case: Case) -> list[str]:
    found = figures(case)
    times_us = (found.p50_us, found.p99_us, found.let_go_p50_us, median(case.memcpy_s) * 1e6)
    return [case.transport, case.checksum, *(f"{time_us:.0f}" for time_us in times_us), _note(found)]


def _bare_row(case: Case) -> list[str]:
    found = figures(case)
    if found.bare_nixl_ratio is None or found.bare_nixl_gb_per_s is None:
        raise ValueError("this case has no bare writes")
    return [
        case.checksum,
        _size(case.block_bytes),
        str(case.num_blocks),
        f"{found.gb_per_s:.2f}",
        f"{found.bare_nixl_gb_per_s:.2f}",
        f"{found.bare_nixl_ratio.of_medians:.2f}",
        _range(found.bare_nixl_ratio),
        _note(found),
    ]


def _limit_rows(limits: Limits) -> list[list[str]]:
    samples = {
        "copy (np.copyto)": limits.copy_s,
        "copy while the other core hashes": limits.copy_beside_hashing_s,
        "hash (xxh3)": limits.hash_s,
        "copy and hash, MiB by MiB": limits.copy_and_hash_s,
        "send to the other core (TCP, plain sockets)": limits.tcp_s,
    }
    return [
        [name, f"{limits.num_bytes / median(times_s) / 1e9:.2f}", f"{spread(times_s):.0%}"]
        for name, times_s in samples.items()
    ]


def _note(found: Figures) -> str:
    return f"noisy ({found.memcpy_spread:.0%})" if found.is_noisy else ""


def _range(ratio: PairedRatio) -> str:
    return f"{ratio.low:.2f} - {ratio.high:.2f}"


def _size(num_bytes: int) -> str:
    if num_bytes % 2**20 == 0:
        return f"{num_bytes // 2**20} MiB"
    return f"{num_bytes // 2**10} KiB" if num_bytes % 2**10 == 0 else f"{num_bytes} bytes"


def _section(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], as_markdown: bool) -> str:
    if as_markdown:
        lines = [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)]
        return "\n".join([f"**{title}**\n", *lines])
    return "\n".join([title, plain_table(heads, rows)])


def plain_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of fixed width: what is a number in the first row is set to the right."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    is_number = [
        bool(rows) and bool(rows[0][column]) and not rows[0][column].strip("0123456789.-% ")
        for column in range(len(heads))
    ]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, is_number, strict=True)
        ).rstrip()
        for cells in (heads, *rows)
    )
