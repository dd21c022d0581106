"""The table for people and the document for files. Owns both formats; knows no device."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from bench.facts import Facts
from bench.gpu_check.rows import Row, Verdict
from bench.gpu_check.run import CORRECTNESS, GroupResult

_HEADINGS = ("check", "case", "value", "limit", "share", "target", "verdict", "")
_MOST_NOTE = 110


def render(results: Sequence[GroupResult]) -> str:
    """One table for all groups, a line of time for each, the counts, and whether correctness was checked at all."""
    lines = [_cells(row) for result in results for row in result.rows]
    widths = [max(len(line[column]) for line in [_HEADINGS, *lines]) for column in range(len(_HEADINGS) - 1)]
    text = [_line(_HEADINGS, widths), "  ".join("-" * width for width in widths)]
    for result in results:
        text.append(f"{result.group.name}: {result.group.doc} ({result.taken_s:.0f} s of {result.limit_s:g} s)")
        text += [_line(_cells(row), widths) for row in result.rows]
    rows = [row for result in results for row in result.rows]
    text += ["", counts(rows)]
    unchecked = {row.case: row.note for row in rows if row.name == CORRECTNESS}
    if unchecked:
        text.append(f"Correctness was NOT checked ({', '.join(unchecked)}): {'; '.join(set(unchecked.values()))}")
    return "\n".join(text)


def counts(rows: Sequence[Row]) -> str:
    """How many rows there are of each verdict, the worst first."""
    found = Counter(row.verdict for row in rows)
    return ", ".join(f"{found[verdict]} {verdict}" for verdict in Verdict if found[verdict]) or "no rows"


def document(
    facts: Facts, device: dict[str, Any], clocks: dict[str, Any], results: Sequence[GroupResult], status: int
) -> dict[str, Any]:
    """Everything, for a file."""
    return {
        "facts": dataclasses.asdict(facts),
        "device": device,
        "clocks": clocks,
        "status": status,
        "groups": [
            {
                "name": result.group.name,
                "doc": result.group.doc,
                "taken_s": round(result.taken_s, 3),
                "limit_s": result.limit_s,
                "rows": [row.as_json() for row in result.rows],
            }
            for result in results
        ],
    }


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    # the value is a number: it ends where its column does
    padded = [
        cell.rjust(width) if column in (2, 3, 4, 5) else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(cells[:-1], widths, strict=True))
    ]
    return "  ".join([*padded, cells[-1]]).rstrip()


def _cells(row: Row) -> tuple[str, ...]:
    value = "" if row.value is None else f"{_number(row.value)} {row.unit}".strip()
    note = row.note if len(row.note) <= _MOST_NOTE else row.note[: _MOST_NOTE - 3] + "..."
    share = "" if row.share is None else f"{row.share:.0%}"
    return (row.name, row.case, value, _number(row.bound), share, _number(row.target), str(row.verdict), note)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value == int(value) and abs(value) < 1e6 else f"{value:.4g}"
