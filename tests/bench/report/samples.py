"""Result files as the benchmarks write them, made from a small queueing model instead of a server."""

from __future__ import annotations

import math
import random
from dataclasses import asdict, dataclass
from typing import Any

from baton.bench.breakdown import TTFT_PARTS, TTST_PARTS
from baton.bench.client.outcome import Outcome
from baton.bench.compare.command import conclude
from baton.bench.documents import CompareDocument, Configuration, MeasuredTarget, SweepDocument, SweepPoint
from baton.bench.facts import Facts
from baton.bench.limits.result import Ceiling, Ratio
from baton.bench.runs import Run, as_json, rate_as_json
from baton.bench.serve.metrics import summarise
from baton.bench.serve.result import details

FACTS = Facts(
    "2026-01-02 03:04 UTC",
    "baton bench compare --target 'Baton P/D=baton serve llama-32m' --target 'vLLM P/D=http://127.0.0.1:8200'",
    "0123456789ab",
    "A processor, 16 lanes",
    2,
    (0, 1),
    24 * 2**30,
    "Linux 6.1",
    0.31,
    {"python": "3.11.7", "torch": "2.13.0"},
)
SLO = {"ttft": 500.0, "itl": 60.0}


@dataclass(frozen=True, slots=True)
class Model:
    """A server: time to prefill, gap of an idle server, and what a prefill elsewhere adds to a gap."""

    prefill_ms: float
    gap_ms: float
    disturbance_ms: float
    is_baton: bool = True


PD = Model(200, 11, 6)
COLOCATED = Model(120, 9, 110)
PEER = Model(450, 30, 25, is_baton=False)
MODELS = {"Baton P/D": PD, "Baton colocated": COLOCATED, "vLLM P/D": PEER}


def run_result(model: Model, rate: float, seed: int, *, num: int = 40, detailed: bool = True) -> dict[str, Any]:
    """One result of `baton bench serve --save-result --save-detailed`."""
    chance = random.Random(seed)
    start_s, free_s, outcomes = 100.0, 0.0, []
    for index in range(num):
        start_s += chance.expovariate(rate) if math.isfinite(rate) else 0.0
        free_s = max(start_s, free_s) + model.prefill_ms * chance.uniform(0.9, 1.15) / 1e3
        came_s = [free_s + 0.005]
        for _ in range(63):
            disturbed_ms = model.disturbance_ms * (chance.random() < 0.1)
            came_s.append(came_s[-1] + (model.gap_ms * chance.uniform(0.9, 1.2) + disturbed_ms) / 1e3)
        outcomes.append(Outcome(index, start_s, start_s, came_s, [1] * 64, 512, 64))
    result = summarise(outcomes, came_s[-1] - 100.0, SLO)
    return {
        "label": "openai",
        "backend": "openai",
        "model_id": "llama-32m",
        "num_prompts": num,
        "request_rate": rate_as_json(rate),
        "max_concurrency": None,
        **result,
        "schedule_delay": {"mean_ms": 0.21, "p99_ms": 1.4, "max_ms": 2.2},
        "client": {"cpu_share": 0.1, "num_late": 0},
        "breakdown": _breakdown(result) if model.is_baton else None,
        "dataset": {"name": "random", "input_len": 512, "length_divisor": 1},
        "arrival": {"process": "poisson"},
        "seed": seed,
        "facts": asdict(FACTS),
        "notes": [],
        **(details(outcomes) if detailed else {}),
    }


def _breakdown(result: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for token, names in (("ttft", TTFT_PARTS), ("ttst", TTST_PARTS)):
        mean_ms = result[f"mean_{token}_ms"]
        parts = {name: {"mean_ms": mean_ms / len(names)} for name in names}
        found[token] = {"parts": parts, "measured_mean_ms": mean_ms, "sum_mean_ms": mean_ms, "largest_error": 0.004}
    return found


def compare_result(
    rates: tuple[float, ...] = (1, 4), rounds: int = 3, *, num: int = 5, detailed: bool = False
) -> dict[str, Any]:
    """One result of `baton bench compare`."""
    runs = [
        Run(name, number, rate, run_result(model, rate, 7 * number, num=num, detailed=detailed))
        for number in range(1, rounds + 1)
        for rate in rates
        for name, model in MODELS.items()
    ]
    targets = [MeasuredTarget(name, f"run {name}", pinning=["prefill: 0", "decode: 1"]) for name in MODELS]
    document = CompareDocument(facts=FACTS, targets=targets, rounds=rounds, runs=runs, ratios=[])
    conclude(document)
    return as_json(document)


def sweep_result() -> dict[str, Any]:
    """One result of `baton bench sweep`: the first meets its goals at 1 and 2 requests/s, the second never."""
    configurations = []
    for name, model, shares in (("1P1D", PD, (1.0, 0.95)), ("chunks of 128", COLOCATED, (0.8, 0.5))):
        points = [
            SweepPoint(rate, share, run_result(model, rate, 3, num=5, detailed=False))
            for rate, share in zip((1.0, 2.0), shares, strict=True)
        ]
        goodput_rate = 2.0 if shares[0] == 1.0 else None
        configurations.append(Configuration(name, "baton serve", points=points, goodput_rate=goodput_rate))
    return as_json(SweepDocument(facts=FACTS, slo=SLO, attainment=0.9, configurations=configurations))


def limits_result() -> dict[str, Any]:
    """One result of `baton bench limits`."""
    ceilings = [
        Ceiling("memcpy", 12.4, "GB/s", 0.06, "1 thread, nothing beside"),
        Ceiling("bf16 GEMM", 208.0, "GFLOP/s", 0.21),
    ]
    ratios = [
        Ratio("kv_bw_ratio", "64 blocks", 0.66, 0.6, 0.81, goal="1"),
        Ratio("prefill_flop_ratio", "512 tokens", 0.77, 0.7, 0.8, noisy=True, note="the ceiling spread by 21 %"),
    ]
    return {
        "kind": "limits",
        "facts": asdict(FACTS),
        "setup": {"model": "llama-32m", "cores": [0, 1]},
        "failures": ["it broke"],
        "ceilings": [asdict(each) for each in ceilings],
        "ratios": [asdict(each) for each in ratios],
    }
