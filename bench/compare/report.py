"""A comparison as tables for a terminal: the medians of every target, and what may be concluded."""

from __future__ import annotations

from collections import Counter

from bench.compare.verdict import RULE
from bench.documents import CompareDocument
from bench.runs import COMPARED, METRIC_OF
from bench.text_tables import aligned, figure

_MAX_NOTES = 12


def report(document: CompareDocument) -> str:
    """Everything that a comparison has to say, in markdown."""
    rates = dict.fromkeys(float(entry["rate"]) for entry in document.medians)
    notes = _notes(document)
    return "\n\n".join([*(_at_rate(document, rate) for rate in rates), RULE, *(["\n".join(notes)] if notes else [])])


def _at_rate(document: CompareDocument, rate: float) -> str:
    medians = [entry for entry in document.medians if float(entry["rate"]) == rate]
    shown = [metric for metric in COMPARED if any(entry[metric.name] is not None for entry in medians)]
    rows = []
    for entry in medians:
        failed = f"{entry['failed']}/{entry['num_requests']}"
        rows.append([entry["target"], *(figure(entry[metric.name]) for metric in shown), failed])
    num_rounds = min(entry["rounds"] for entry in medians)
    title = "as the trace says, or all at once" if rate == float("inf") else f"{rate:g} requests/s"
    parts = [
        f"**{title}: medians over {num_rounds} round{'s' * (num_rounds != 1)}**",
        aligned(["target", *(metric.short for metric in shown), "failed"], rows),
    ]
    verdicts = [
        [
            f"{ratio.target} / {ratio.against}",
            METRIC_OF[ratio.metric].short,
            f"{ratio.ratio:.2f}",
            f"{ratio.low:.2f} - {ratio.high:.2f}",
            f"{ratio.noise:.0%}",
            ratio.verdict,
        ]
        for ratio in document.ratios
        if ratio.rate == rate
    ]
    if verdicts:
        parts.append(aligned(["ratio of", "metric", "ratio", "range", "noise", "verdict"], verdicts))
    return "\n\n".join(parts)


def _notes(document: CompareDocument) -> list[str]:
    """What single runs have to say about how far they can be trusted."""
    found: Counter[str] = Counter()
    for run in document.runs:
        found.update(f"{run.target}: {note}" for note in run.row("notes"))
        if run.is_disturbed:
            found[f"while {run.target} was measured, other targets used more than 5 % of a core"] += 1
    lines = [f"note: {note}" + (f" ({num} runs)" if num > 1 else "") for note, num in found.items()]
    return lines[:_MAX_NOTES] + ([f"note: and {len(lines) - _MAX_NOTES} more"] if len(lines) > _MAX_NOTES else [])
