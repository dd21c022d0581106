"""One run's result as text: the block that `vllm bench serve` prints, line by line, and what Baton adds to it.

Reads the result as it is in the file and nothing else. The lines keep names, order and width, because people's scripts
search for them; lines of our own come after the family or the block they belong to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.serve.metrics import percentile_name

WIDTH = 50
_FAMILIES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "max_itl": ("Max ITL", "Largest Inter-token Latency per Request"),
    "ttst": ("TTST", "Time to Second Token"),
}
_RANGES = {
    "median_ttft_ms": "Range of median TTFT (ms)",
    "p99_ttft_ms": "Range of P99 TTFT (ms)",
    "median_tpot_ms": "Range of median TPOT (ms)",
    "p99_itl_ms": "Range of P99 ITL (ms)",
    "output_throughput": "Range of output throughput (tok/s)",
    "slo_attainment": "Range of SLO attainment (0 to 1)",
}


def report(result: Mapping[str, Any], families: Sequence[str], percentiles: Sequence[float]) -> str:
    """The whole block. `families` and `percentiles` are those to print."""
    lines = [
        _title("Serving Benchmark Result", "="),
        *_totals(result),
        *(line for name in _FAMILIES if name in families for line in _family(result, name, percentiles)),
        *_schedule(result),
        *_failures(result),
        *_handoffs(result),
        *_breakdown(result),
        *_repeats(result),
        "=" * WIDTH,
        'genai-perf and aiperf call what is TPOT here "ITL"; ITL here is every gap, pooled.',
        *(f"note: {note}" for note in result["notes"]),
    ]
    return "\n".join(lines)


def _totals(result: Mapping[str, Any]) -> Iterator[str]:
    yield _whole("Successful requests:", result["completed"])
    yield _whole("Failed requests:", result["failed"])
    if result["max_concurrency"] is not None:
        yield _whole("Maximum request concurrency:", result["max_concurrency"])
    if result["request_rate"] != "inf":
        yield _decimal("Request rate configured (RPS):", result["request_rate"])
    yield _decimal("Benchmark duration (s):", result["duration"])
    yield _whole("Total input tokens:", result["total_input_tokens"])
    yield _whole("Total generated tokens:", result["total_output_tokens"])
    yield _decimal("Request throughput (req/s):", result["request_throughput"])
    if result["request_goodput"] is not None:
        yield _decimal("Request goodput (req/s):", result["request_goodput"])
    yield _decimal("Output token throughput (tok/s):", result["output_throughput"])
    yield _decimal("Peak output token throughput (tok/s):", result["max_output_tokens_per_s"])
    yield _decimal("Peak concurrent requests:", result["max_concurrent_requests"])
    yield _decimal("Total token throughput (tok/s):", result["total_token_throughput"])
    if result["slo_attainment"] is not None:
        goals = ", ".join(f"{name} {limit:g} ms" for name, limit in result["slo"].items())
        yield _decimal("SLO attainment (% of all requests):", 100 * result["slo_attainment"]) + f"({goals})"


def _family(result: Mapping[str, Any], name: str, percentiles: Sequence[float]) -> Iterator[str]:
    short, long = _FAMILIES[name]
    yield _title(long, "-")
    yield _decimal(f"Mean {short} (ms):", result[f"mean_{name}_ms"])
    yield _decimal(f"Median {short} (ms):", result[f"median_{name}_ms"])
    for percent in map(percentile_name, percentiles):
        yield _decimal(f"P{percent} {short} (ms):", result[f"p{percent}_{name}_ms"])
    if name == "max_itl":
        yield _decimal("Largest gap of all (ms):", result["max_max_itl_ms"])


def _schedule(result: Mapping[str, Any]) -> Iterator[str]:
    """What the load and the client were like: how far the figures above can be trusted."""
    delay, client = result["schedule_delay"], result["client"]
    yield _title("Load and Client", "-")
    yield _decimal("Mean schedule delay (ms):", delay["mean_ms"])
    yield _decimal("P99 schedule delay (ms):", delay["p99_ms"])
    if result["chunks_per_token"] is not None:
        yield _decimal("Chunks per token:", result["chunks_per_token"])
    if result["cached_tokens"] is not None:
        yield _whole("Cached input tokens:", result["cached_tokens"])
    yield _decimal("Client P99 event loop lag (ms):", client["loop_lag_p99_ms"])
    yield _decimal("Client CPU (% of one core):", 100 * client["cpu_share"])


def _failures(result: Mapping[str, Any]) -> Iterator[str]:
    if result["failures"]:
        yield _title("Failures", "-")
        for reason, num in result["failures"].items():
            yield _whole(f"{reason}:", num)
        for message in result["failure_messages"]:
            yield f"  e.g. {message:.200}"


def _handoffs(result: Mapping[str, Any]) -> Iterator[str]:
    handoffs = result["kv_transfer"]
    if handoffs:
        yield _title("KV Handoffs", "-")
        yield _whole("Handoffs:", handoffs["num_handoffs"])
        yield _decimal("Transferred (MiB):", handoffs["num_bytes"] / 2**20)
        for name, label in (("transfer_ms", "transfer"), ("exposed_ms", "exposed transfer")):
            yield _decimal(f"Median {label} (ms):", handoffs[name]["median"])
            yield _decimal(f"P99 {label} (ms):", handoffs[name]["p99"])


def _breakdown(result: Mapping[str, Any]) -> Iterator[str]:
    breakdown = result["breakdown"]
    if not breakdown:
        return
    for name in ("ttft", "ttst"):
        if not (stack := breakdown.get(name)):
            continue
        yield _title(f"Where {name.upper()} Goes (mean, median, P99 ms)", "-")
        for part, values in stack["parts"].items():
            label = part.replace("_", " ") + ":"
            yield f"{label:<24} {values['mean_ms']:>9.2f} {values['median_ms']:>9.2f} {values['p99_ms']:>9.2f}"
        yield f"{'sum, measured:':<24} {stack['sum_mean_ms']:>9.2f} {stack['measured_mean_ms']:>9.2f}"
    if breakdown["num_left_out"]:
        yield _whole("Requests left out:", breakdown["num_left_out"])


def _repeats(result: Mapping[str, Any]) -> Iterator[str]:
    if "repeats" in result:
        yield _title(f"{len(result['repeats'])} Repeats", "-")
        for name, label in _RANGES.items():
            if (found := result["range"].get(name)) is not None:
                yield f"{label + ':':<40} {found['low']:.2f} to {found['high']:.2f}"


def _title(text: str, fill: str) -> str:
    return f" {text} ".center(WIDTH, fill) if fill == "=" else text.center(WIDTH, fill)


def _whole(label: str, value: int) -> str:
    return f"{label:<40} {value:<10}"


def _decimal(label: str, value: float) -> str:
    return f"{label:<40} {value:<10.2f}"
