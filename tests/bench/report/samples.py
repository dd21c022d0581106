"""Result files as the benchmarks write them, made from a small queueing model instead of a server."""

from __future__ import annotations

import math
import random
from dataclasses import asdict, dataclass
from typing import Any

from bench.facts import Facts
from bench.stats import median, percentile

FACTS = asdict(
    Facts(
        "2026-01-02 03:04 UTC",
        "baton bench compare --target 'Baton P/D=baton serve llama-32m' --target 'Baton colocated=baton serve "
        "llama-32m --prefill 0' --target 'vLLM P/D=http://127.0.0.1:8200' --rates 1,2,4,6 --rounds 3 "
        "--random-input-len 512 --goodput ttft:500 itl:60",
        "0123456789ab",
        "A processor, 16 lanes",
        2,
        (0, 1),
        24 * 2**30,
        "Linux 6.1",
        0.31,
        {"python": "3.11.7", "baton-serve": "0.1.0", "torch": "2.13.0", "numpy": "2.4.6", "aiohttp": "3.14.0"},
    )
)
SLO = {"ttft": 500.0, "itl": 60.0}
DATASET = {"name": "random", "input_len": 512, "output_len": 64, "length_divisor": 1, "time_scale": 1.0}


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
    random_ = random.Random(seed)
    start, free, starts, ttfts, itls = 100.0, 0.0, [], [], []
    for _ in range(num):
        start += random_.expovariate(rate) if math.isfinite(rate) else 0.0
        begin = max(start, free)
        free = begin + model.prefill_ms * random_.uniform(0.9, 1.15) / 1e3
        starts.append(start)
        ttfts.append(free - start + random_.uniform(0.004, 0.009))
        load = min(0.9, (rate if math.isfinite(rate) else 8) * model.prefill_ms / 1e3 / 2)
        gaps = [
            (model.gap_ms * random_.uniform(0.9, 1.2) + model.disturbance_ms * (random_.random() < load / 4)) / 1e3
            for _ in range(63)
        ]
        itls.append([ttfts[-1] * 0 + gaps[0] + 0.008, *gaps[1:]])
    e2els = [ttft + sum(gaps) for ttft, gaps in zip(ttfts, itls, strict=True)]
    duration = max(start + e2el for start, e2el in zip(starts, e2els, strict=True)) - starts[0]
    pooled = [gap for gaps in itls for gap in gaps]
    met = [
        ttft * 1e3 <= SLO["ttft"] and percentile(gaps, 99) * 1e3 <= SLO["itl"]
        for ttft, gaps in zip(ttfts, itls, strict=True)
    ]
    families = {
        "ttft": ttfts,
        "tpot": [sum(gaps) / len(gaps) for gaps in itls],
        "itl": pooled,
        "e2el": e2els,
        "max_itl": [max(gaps) for gaps in itls],
        "ttst": [ttft + gaps[0] for ttft, gaps in zip(ttfts, itls, strict=True)],
    }
    result: dict[str, Any] = {
        "date": "20260102-030405",
        "endpoint_type": "openai",
        "backend": "openai",
        "label": "openai",
        "model_id": "llama-32m",
        "tokenizer_id": "llama-32m",
        "num_prompts": num,
        "request_rate": rate if math.isfinite(rate) else "inf",
        "burstiness": 1.0,
        "max_concurrency": None,
        "duration": duration,
        "completed": num,
        "failed": 0,
        "total_input_tokens": 512 * num,
        "total_output_tokens": 64 * num,
        "request_throughput": num / duration,
        "request_goodput": sum(met) / duration,
        "output_throughput": 64 * num / duration,
        "total_token_throughput": 576 * num / duration,
        "max_output_tokens_per_s": 80 * num / duration,
        "max_concurrent_requests": 12,
        "slo": SLO,
        "slo_attainment": sum(met) / num,
        "schedule_delay": {"mean_ms": 0.21, "p99_ms": 1.4, "max_ms": 2.2},
        "failures": {},
        "failure_messages": [],
        "chunks_per_token": 1.0,
        "cached_tokens": 0,
        "client": {
            "cpu_s": 1.31,
            "wall_s": duration,
            "cpu_share": 1.31 / duration,
            "loop_lag_p50_ms": 0.07,
            "loop_lag_p99_ms": 2.3,
            "loop_lag_max_ms": 6.1,
            "num_late": 0,
            "max_in_flight": 12,
        },
        "breakdown": _breakdown(model, families, seed) if model.is_baton else None,
        "kv_transfer": None,
        "dataset": DATASET,
        "arrival": {"process": "poisson", "rate": rate if math.isfinite(rate) else "inf"},
        "seed": seed,
        "facts": FACTS,
        "notes": [],
    }
    for name, values in families.items():
        result |= _family(name, [value * 1e3 for value in values])
    if detailed:
        result |= {
            "input_lens": [512] * num,
            "output_lens": [64] * num,
            "ttfts": ttfts,
            "itls": itls,
            "start_times": starts,
            "generated_texts": [""] * num,
            "errors": [""] * num,
        }
    return result


def _family(name: str, values_ms: list[float]) -> dict[str, float]:
    mean = sum(values_ms) / len(values_ms)
    found = {
        f"mean_{name}_ms": mean,
        f"median_{name}_ms": median(values_ms),
        f"std_{name}_ms": math.sqrt(sum((value - mean) ** 2 for value in values_ms) / len(values_ms)),
        f"max_{name}_ms": max(values_ms),
    }
    return found | {f"p{percent}_{name}_ms": percentile(values_ms, percent) for percent in (50, 90, 95, 99)}


def _breakdown(model: Model, families: dict[str, list[float]], seed: int) -> dict[str, Any]:
    ttft_ms = sum(families["ttft"]) / len(families["ttft"]) * 1e3
    ttst_ms = sum(families["ttst"]) / len(families["ttst"]) * 1e3
    router, back = 1.6, 2.1
    begun = {"client": 1.2, "router": router}
    begun["queue_prefill"] = max(0.0, ttft_ms - model.prefill_ms - sum(begun.values()) - back)
    begun["prefill"] = ttft_ms - sum(begun.values()) - back
    ttft = {**begun, "return": back}
    rest_ms = ttst_ms - sum(begun.values())
    ttst = {
        **begun,
        "exposed_transfer": 2.9,
        "queue_decode": 1.1,
        "first_decode_step": rest_ms - 5.8,
        "return_second": 1.8,
    }

    def whole(parts: dict[str, float], mean_ms: float) -> dict[str, Any]:
        shown = {name: {"mean_ms": ms, "median_ms": ms, "p99_ms": 2 * ms} for name, ms in parts.items()}
        return {"parts": shown, "measured_mean_ms": mean_ms, "sum_mean_ms": mean_ms, "largest_error": 0.004}

    return {
        "num_requests": 40,
        "num_left_out": 0,
        "ttft": whole(ttft, ttft_ms),
        "ttst": whole(ttst, ttst_ms),
        "requests": [],
    }


_METRICS = ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_itl_ms", "median_e2el_ms", "output_throughput")


def compare_result(
    rates: tuple[float, ...] = (1, 2, 4, 6), rounds: int = 3, *, num: int = 40, detailed: bool = True
) -> dict[str, Any]:
    """One result of `baton bench compare`."""
    runs = [
        {
            "target": name,
            "round": number,
            "rate": rate,
            "cpu_s": 12.3,
            "others_cpu_s": 0.01,
            "result": run_result(model, rate, 7 * number, num=num, detailed=detailed),
        }
        for number in range(rounds)
        for rate in rates
        for name, model in MODELS.items()
    ]
    return {
        "kind": "compare",
        "facts": FACTS,
        "workload": DATASET,
        "targets": [
            {"name": "Baton P/D", "command": "baton serve llama-32m", "pinning": ["prefill: 0", "decode: 1"]},
            {"name": "Baton colocated", "command": "baton serve llama-32m --prefill 0", "pinning": ["engine: 0, 1"]},
            {"name": "vLLM P/D", "url": "http://127.0.0.1:8200", "pinning": []},
        ],
        "rounds": rounds,
        "runs": runs,
        "ratios": [
            ratio
            for rate in rates
            for target in ("Baton colocated", "vLLM P/D")
            for metric in _METRICS
            if (ratio := _ratio(runs, rate, target, "Baton P/D", metric))
        ],
    }


def _ratio(runs: list[dict[str, Any]], rate: float, target: str, against: str, metric: str) -> dict[str, Any]:
    own, other = (
        [run["result"][metric] for run in runs if (run["target"], run["rate"]) == (name, rate)]
        for name in (target, against)
    )
    pairs = [one / two for one, two in zip(own, other, strict=True)]
    ratio, noise = median(own) / median(other), max(own) / min(own) - 1
    is_clear = abs(ratio - 1) > noise and (min(pairs) > 1 or max(pairs) < 1)
    words = ("more" if ratio > 1 else "less") if metric == "output_throughput" else "slower" if ratio > 1 else "faster"
    verdict = f"{max(ratio, 1 / ratio):.2f}x {words}" if is_clear else "no verdict: the rounds disagree (0.91 - 1.13)"
    return {
        "rate": rate,
        "target": target,
        "against": against,
        "metric": metric,
        "ratio": ratio,
        "low": min(pairs),
        "high": max(pairs),
        "noise": noise,
        "is_clear": is_clear,
        "verdict": verdict,
    }


def sweep_result() -> dict[str, Any]:
    """One result of `baton bench sweep`."""
    configurations = []
    for name, model in (("1P1D", PD), ("chunks of 128", COLOCATED)):
        results = [(rate, run_result(model, rate, 3)) for rate in (0.5, 1.0, 2.0, 3.0, 4.0)]
        good = [rate for rate, result in results if result["slo_attainment"] >= 0.9]
        configurations.append(
            {
                "name": name,
                "command": "baton serve llama-32m",
                "pinning": ["prefill: 0", "decode: 1"],
                "points": [
                    {
                        "rate": rate,
                        "attainment": result["slo_attainment"],
                        "attainments": [result["slo_attainment"], 0.5],
                        "result": result,
                    }
                    for rate, result in results
                ],
                "goodput_rate": max(good) if good else None,
            }
        )
    return {"kind": "sweep", "facts": FACTS, "slo": SLO, "attainment": 0.9, "configurations": configurations}


def limits_result() -> dict[str, Any]:
    """One result of `baton bench limits`."""
    return {
        "kind": "limits",
        "facts": FACTS,
        "setup": {"model": "llama-32m", "cores": [0, 1], "rounds": 9},
        "failures": ["system limits: it broke"],
        "ceilings": [
            {"name": "memcpy", "value": 12.4, "unit": "GB/s", "spread": 0.06, "note": "128 MiB, one thread"},
            {"name": "read stream", "value": 24.1, "unit": "GB/s", "spread": 0.09, "note": ""},
            {"name": "bf16 GEMM", "value": 208.0, "unit": "GFLOP/s", "spread": 0.21, "note": "shapes of llama-32m"},
        ],
        "ratios": [
            {
                "name": "kv_bw_ratio",
                "case": "64 blocks",
                "value": 0.66,
                "low": 0.6,
                "high": 0.81,
                "unit": "",
                "goal": 1,
                "noisy": False,
                "note": "",
            },
            {
                "name": "router_us_per_token",
                "case": "concurrency 16",
                "value": 41.0,
                "low": 38.0,
                "high": 52.0,
                "unit": "us",
                "goal": 0,
                "noisy": False,
                "note": "",
            },
            {
                "name": "prefill_flop_ratio",
                "case": "512 tokens",
                "value": None,
                "low": None,
                "high": None,
                "unit": "",
                "goal": 1,
                "noisy": True,
                "note": "the ceiling spread by 21 %",
            },
        ],
    }
