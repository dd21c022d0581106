"""The result of a run: its figures, its requests, both as the JSON object that goes into a file, and the printed block.

Owns the names of per-request lists and of files, and the line format, as `vllm bench serve` has them. The block is that
which `vllm bench serve` prints, line by line: the lines keep names, order and width, since people's scripts search for
them. What it lacks is in the tables of every report.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from baton.bench.client.outcome import Outcome
from baton.bench.serve.metrics import arrivals_s
from baton.bench.serve.settings import ServeBenchSettings
from baton.wire.errors import InvalidSetting

WIDTH = 50
_TOTALS = (
    ("Successful requests:", "completed", "d"),
    ("Failed requests:", "failed", "d"),
    ("Maximum request concurrency:", "max_concurrency", "d"),
    ("Request rate configured (RPS):", "request_rate", ".2f"),
    ("Benchmark duration (s):", "duration", ".2f"),
    ("Total input tokens:", "total_input_tokens", "d"),
    ("Total generated tokens:", "total_output_tokens", "d"),
    ("Request throughput (req/s):", "request_throughput", ".2f"),
    ("Request goodput (req/s):", "request_goodput", ".2f"),
    ("Output token throughput (tok/s):", "output_throughput", ".2f"),
    ("Peak output token throughput (tok/s):", "max_output_tokens_per_s", ".2f"),
    ("Peak concurrent requests:", "max_concurrent_requests", ".2f"),
    ("Total token throughput (tok/s):", "total_token_throughput", ".2f"),
)
"""What is None (or an infinite rate) has no line."""
_DRAFTS = (
    ("Acceptance rate (%):", "spec_decode_acceptance_rate", ".2f"),
    ("Acceptance length:", "spec_decode_acceptance_length", ".2f"),
    ("Drafts:", "spec_decode_num_drafts", "d"),
    ("Draft tokens:", "spec_decode_draft_tokens", "d"),
    ("Accepted tokens:", "spec_decode_accepted_tokens", "d"),
)
_FAMILIES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}


@dataclass(frozen=True, slots=True)
class RunResult:
    """`summary` is what the file says without details."""

    summary: dict[str, Any]
    outcomes: list[Outcome]


def as_json(result: RunResult, detailed: bool) -> dict[str, Any]:
    """The JSON object of `result`; `detailed` adds one entry per request to lists, in the order of sending."""
    return result.summary | details(result.outcomes) if detailed else dict(result.summary)


def details(outcomes: Sequence[Outcome]) -> dict[str, list[Any]]:
    """Lists with one entry per request; times in seconds, `start_times` by this host's monotonic clock."""
    return {
        "input_lens": [outcome.num_prompt_tokens for outcome in outcomes],
        "output_lens": [0 if outcome.failure else outcome.num_output_tokens for outcome in outcomes],
        "ttfts": [_since_sent(outcome, 0) for outcome in outcomes],
        "itls": [[round(after - before, 6) for before, after in pairwise(arrivals_s(outcome))] for outcome in outcomes],
        "latencies": [_since_sent(outcome, -1) for outcome in outcomes],
        "start_times": [round(outcome.sent_s, 6) for outcome in outcomes],
        "queue_times": [round(outcome.sent_s - outcome.scheduled_s, 6) for outcome in outcomes],
        "generated_texts": [outcome.text for outcome in outcomes],
        "errors": [f"{outcome.failure}: {outcome.message}" if outcome.failure else "" for outcome in outcomes],
    }


def prepare_folder(settings: ServeBenchSettings) -> None:
    """Make the folder of the result, so that a run does not end without a place for it. Raises `InvalidSetting`."""
    if settings.save_result:
        try:
            Path(settings.result_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidSetting(f"--result-dir {settings.result_dir}: {error.strerror}") from None


def result_path(settings: ServeBenchSettings, result: Mapping[str, Any]) -> Path | None:
    """The file of `result`; None when none is to be written."""
    if not settings.save_result:
        return None
    concurrency = "" if settings.max_concurrency is None else f"-concurrency{settings.max_concurrency}"
    rate = f"{settings.request_rate}qps"
    if settings.ramp_up_strategy is not None:
        rate = f"ramp-up-{settings.ramp_up_strategy}-{settings.ramp_up_start_rps}qps-{settings.ramp_up_end_rps}qps"
    model = str(result["model_id"]).rstrip("/").rsplit("/", 1)[-1]
    name = f"{result['label']}-{rate}{concurrency}-{model}-{result['date']}.json".replace("/", "_")
    return Path(settings.result_dir) / (settings.result_filename or name)


def _since_sent(outcome: Outcome, chunk: int) -> float:
    came_s = arrivals_s(outcome)
    return round(came_s[chunk] - outcome.sent_s, 6) if came_s else 0.0


def report(result: Mapping[str, Any]) -> str:
    """The whole block."""
    lines = [
        " Serving Benchmark Result ".center(WIDTH, "="),
        *_lines(result, _TOTALS),
        *(line for name in _FAMILIES for line in _family(result, name)),
        *_section("Speculative Decoding", [*_lines(result, _DRAFTS)]),
        "=" * WIDTH,
        'genai-perf and aiperf call what is TPOT here "ITL"; ITL here is every gap, pooled.',
    ]
    return "\n".join(lines)


def _lines(result: Mapping[str, Any], rows: Sequence[tuple[str, str, str]]) -> Iterator[str]:
    for label, name, form in rows:
        if result[name] not in (None, "inf"):
            yield _line(label, result[name], form)


def _family(result: Mapping[str, Any], name: str) -> Iterator[str]:
    short, long = _FAMILIES[name]
    yield _title(long)
    yield _line(f"Mean {short} (ms):", result[f"mean_{name}_ms"])
    yield _line(f"Median {short} (ms):", result[f"median_{name}_ms"])
    yield _line(f"P99 {short} (ms):", result[f"p99_{name}_ms"])


def _section(title: str, lines: Sequence[str]) -> Sequence[str]:
    return [_title(title), *lines] if lines else ()


def _title(text: str) -> str:
    return text.center(WIDTH, "-")


def _line(label: str, value: float, form: str = ".2f") -> str:
    return f"{label:<40} {value:<10{form}}"
