"""A sweep as tables for a terminal: the goodput of every configuration, and all points that it follows from."""

from __future__ import annotations

from bench.documents import SweepDocument
from bench.text_tables import aligned, figure

_HEADS = ("configuration", "requests/s", "attainment", "TTFT p99 ms", "TPOT p99 ms", "ITL p99 ms", "tok/s", "failed")
_NAMES = ("p99_ttft_ms", "p99_tpot_ms", "p99_itl_ms", "output_throughput")


def report(document: SweepDocument) -> str:
    """Everything that a sweep has to say, in markdown."""
    goals = ", ".join(f"{name} {limit:g} ms" for name, limit in document.slo.items())
    found, rows = [], []
    for each in document.configurations:
        failed = [point.rate for point in each.points if point.attainment < document.attainment]
        lowest = min(failed, default=None)
        found.append([each.name, _rate(each.goodput_rate), _rate(lowest), str(len(each.points))])
        for point in sorted(each.points, key=lambda point: point.rate):
            result, num_failed = point.result, point.result["failed"]
            shown = [figure(result[name] if result["completed"] else None) for name in _NAMES]
            counts = f"{num_failed}/{num_failed + result['completed']}"
            rows.append([each.name, _rate(point.rate), f"{point.attainment:.1%}", *shown, counts])
    title = f"**Highest rate at which {document.attainment:.0%} of the requests meet {goals}**"
    goodput = aligned(("configuration", "goodput requests/s", "failed at", "points"), found)
    return "\n\n".join([title, goodput, "**All points**", aligned(_HEADS, rows)])


def _rate(rate: float | None) -> str:
    return "none" if rate is None else f"{rate:g}"
