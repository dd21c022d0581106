"""Tables of `baton bench sweep`: goodput of each configuration, and every rate that was tried."""

from __future__ import annotations

from collections.abc import Sequence

from bench.report.document import Cell, Table, words
from bench.report.numbers import NONE, number, percent, span, whole
from bench.report.results import Configuration, Point

_COLUMNS = {
    "TTFT p50 (ms)": "p50_ttft_ms",
    "TTFT p99 (ms)": "p99_ttft_ms",
    "TPOT p50 (ms)": "p50_tpot_ms",
    "TPOT p99 (ms)": "p99_tpot_ms",
    "ITL p99 (ms)": "p99_itl_ms",
    "E2E p99 (ms)": "p99_e2el_ms",
    "output tokens/s": "output_throughput",
}


def goodput_table(configurations: Sequence[Configuration], points: Sequence[Point]) -> Table:
    """The best configuration first."""
    ranked = sorted(configurations, key=lambda each: -(each.goodput_rate or 0.0))
    rows = []
    for each in ranked:
        tried = [point for point in points if point.target == each.target.name]
        best = next((point for point in tried if point.rate == each.goodput_rate), None)
        cells = _figures(best) if best else [Cell(NONE)] * (1 + len(_COLUMNS))
        lowest = min((point.rate for point in tried), default=0.0)
        found = f"{each.goodput_rate:g}" if each.goodput_rate else f"below {lowest:g}"
        rows.append((words(each.target.name), Cell(found, tone="plain"), *cells))
    heads = ("configuration", "goodput (requests/s)", "attainment there", *_COLUMNS)
    return Table("goodput", "Goodput by configuration", heads, tuple(rows), words=frozenset({"configuration"}))


def points_table(points: Sequence[Point]) -> Table:
    """Every rate of every configuration."""
    rows = tuple(
        (
            words(point.target),
            Cell(f"{point.rate:g}"),
            *_figures(point),
            Cell(whole(point.middle("failed"))),
            Cell(number(point.middle("schedule_delay.p99_ms"))),
        )
        for point in points
    )
    heads = ("configuration", "requests/s", "attainment", *_COLUMNS, "failures", "schedule delay p99 (ms)")
    return Table("points", "Every rate that was tried", heads, rows, words=frozenset({"configuration"}))


def _figures(point: Point) -> list[Cell]:
    return [
        Cell(percent(point.middle("slo_attainment")), span(_ends(point), percent)),
        *(Cell(number(point.middle(name))) for name in _COLUMNS.values()),
    ]


def _ends(point: Point) -> tuple[float, float] | None:
    """Of the attainments of a rate that was measured several times."""
    found = [share for run in point.runs for share in run.row("attainments") if isinstance(share, int | float)]
    return (min(found), max(found)) if len(found) > 1 else None
