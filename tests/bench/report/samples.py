"""Results that were published, as samples of what the benchmarks write."""

from __future__ import annotations

import json
from typing import Any

from baton.bench.documents import load_result
from baton.bench.facts import ROOT

RESULTS = ROOT / "bench" / "results"
COMPARISON, OF_A_TRACE, SWEEP = "llama-32m-512-64", "llama-32m-mooncake-3x", "llama-32m-chunk"
LIMITS, HANDOFFS = "limits-llama-32m", "kv-2core"
FACTS = load_result(RESULTS / f"{LIMITS}.json").document.facts


def published(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return document


def run_result() -> dict[str, Any]:
    """One result of `baton bench serve --save-result --save-detailed`."""
    found: dict[str, Any] = next(run["result"] for run in published(COMPARISON)["runs"] if "itls" in run["result"])
    return found
