"""A sweep as tables: the goodput of every configuration, and all points that it follows from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.compare.report import figure, table

_HEADS = ("configuration", "requests/s", "attainment", "TTFT p99 ms", "TPOT p99 ms", "ITL p99 ms", "tok/s", "failed")
_NAMES = ("p99_ttft_ms", "p99_tpot_ms", "p99_itl_ms", "output_throughput")


def report(document: Mapping[str, Any]) -> str:
    """Everything that a sweep has to say, in markdown."""
    goals = ", ".join(f"{name} {limit:g} ms" for name, limit in document["slo"].items())
    title = f"**Highest rate at which {document['attainment']:.0%} of the requests meet {goals}**"
    found = [
        [
            configuration["name"],
            _rate(configuration["goodput_rate"]),
            _rate(_lowest_failed(configuration, document["attainment"])),
            str(len(configuration["points"])),
        ]
        for configuration in document["configurations"]
    ]
    goodput = table(("configuration", "goodput requests/s", "failed at", "points"), found)
    return "\n\n".join([title, goodput, "**All points**", table(_HEADS, _point_rows(document))])


def _point_rows(document: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for configuration in document["configurations"]:
        for point in sorted(configuration["points"], key=lambda point: float(point["rate"])):
            result = point["result"]
            rows.append(
                [
                    configuration["name"],
                    _rate(point["rate"]),
                    f"{point['attainment']:.1%}",
                    *(figure(result[name] if result["completed"] else None) for name in _NAMES),
                    f"{result['failed']}/{result['failed'] + result['completed']}",
                ]
            )
    return rows


def _lowest_failed(configuration: Mapping[str, Any], attainment: float) -> float | None:
    return min((float(at["rate"]) for at in configuration["points"] if at["attainment"] < attainment), default=None)


def _rate(rate: float | str | None) -> str:
    return "none" if rate is None else f"{float(rate):g}"
