"""Helpers: results of runs as a file holds them."""

from __future__ import annotations

from typing import Any

from baton.bench.runs import Run

LATENCIES = ("ttft", "tpot", "itl", "max_itl", "e2el")


def result(
    milliseconds: float, *, failed: int = 0, completed: int = 20, attainment: float | None = 1.0
) -> dict[str, Any]:
    """A run whose every latency is `milliseconds`."""
    families = {f"{kind}_{name}_ms": milliseconds for name in LATENCIES for kind in ("median", "mean", "p90", "p99")}
    return {
        "completed": completed,
        "failed": failed,
        "duration": 10.0,
        "output_throughput": 1000 / milliseconds,
        "request_goodput": attainment,
        "slo_attainment": attainment,
        "dataset": {"name": "random"},
        "notes": [],
        **families,
    }


def run(target: str, number: int, milliseconds: float, rate: float = 1.0, **given: Any) -> Run:
    return Run(target, number, rate, result(milliseconds, **given))
