"""A comparison as tables for people and for documents: the medians of every target, and what may be concluded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.compare.figures import METRICS
from bench.compare.verdict import RULE

_MAX_NOTES = 12


def report(document: Mapping[str, Any]) -> str:
    """Everything that a comparison has to say, in markdown."""
    rates = list(dict.fromkeys(entry["rate"] for entry in document["medians"]))
    sections = [_rate_section(document, rate) for rate in rates]
    notes = _notes(document)
    return "\n\n".join([*sections, RULE, *(["\n".join(notes)] if notes else [])])


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown whose columns are aligned in plain text too: the first to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]
    is_number = [bool(rows) and all(_is_number(row[column]) for row in rows) for column in range(len(heads))]
    lines = []
    for cells in (heads, *rows):
        placed = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, is_number, strict=True)
        ]
        lines.append(f"| {' | '.join(placed)} |")
    rule = [("-" * (width - 1) + ":") if right else "-" * width for width, right in zip(widths, is_number, strict=True)]
    return "\n".join([lines[0], f"| {' | '.join(rule)} |", *lines[1:]])


def figure(value: float | None) -> str:
    """Three significant digits at least, "-" for nothing."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _rate_section(document: Mapping[str, Any], rate: float | str) -> str:
    medians = [entry for entry in document["medians"] if entry["rate"] == rate]
    ratios = [entry for entry in document["ratios"] if entry["rate"] == rate]
    shown = [metric for metric in METRICS if any(entry[metric.name] is not None for entry in medians)]
    heads = ["target", *(metric.label for metric in shown), "failed"]
    rows = [
        [
            entry["target"],
            *(figure(entry[metric.name]) for metric in shown),
            f"{entry['failed']}/{entry['num_requests']}",
        ]
        for entry in medians
    ]
    num_rounds = min(entry["rounds"] for entry in medians)
    title = "as the trace says, or all at once" if rate == "inf" else f"{rate:g} requests/s"
    parts = [f"**{title}: medians over {num_rounds} round{'s' * (num_rounds != 1)}**", table(heads, rows)]
    if ratios:
        labels = {metric.name: metric.label for metric in METRICS}
        verdicts = [
            [
                f"{entry['target']} / {entry['against']}",
                labels[entry["metric"]],
                f"{entry['ratio']:.2f}",
                f"{entry['low']:.2f} - {entry['high']:.2f}",
                f"{entry['noise']:.0%}",
                entry["verdict"],
            ]
            for entry in ratios
        ]
        parts.append(table(["ratio of", "metric", "ratio", "range", "noise", "verdict"], verdicts))
    return "\n\n".join(parts)


def _notes(document: Mapping[str, Any]) -> list[str]:
    """What single runs have to say about how far they can be trusted."""
    found: dict[str, int] = {}
    for run in document["runs"]:
        duration_s = run["result"].get("duration") or 0.0
        notes = [f"{run['target']}: {note}" for note in run["result"].get("notes", [])]
        if run.get("others_cpu_s", 0.0) > 0.05 * duration_s:
            notes.append(f"while {run['target']} was measured, other targets used more than 5 % of a core")
        for note in notes:
            found[note] = found.get(note, 0) + 1
    lines = [f"note: {note}" + (f" ({num} runs)" if num > 1 else "") for note, num in found.items()]
    return lines[:_MAX_NOTES] + ([f"note: and {len(lines) - _MAX_NOTES} more"] if len(lines) > _MAX_NOTES else [])


def _is_number(cell: str) -> bool:
    return cell[:1].isdigit() or cell in ("-", "none")
