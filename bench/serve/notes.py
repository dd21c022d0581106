"""What a reader has to know before believing a result: one sentence for each doubt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bench.client.driver import LoadRun
from bench.workload.dataset_settings import RANDOM, DatasetSettings

MIN_CHUNKS_PER_TOKEN = 0.95
MAX_ZERO_GAP_SHARE = 0.05
MAX_CPU_SHARE = 0.9
MAX_LATE_SHARE = 0.01
MAX_CACHED_SHARE = 0.05


def notes_of(summary: dict[str, Any], load: LoadRun, dataset: DatasetSettings) -> Iterator[str]:
    """The doubts about one run. `summary` is what `bench.serve.metrics.summarise` made of its outcomes."""
    outcomes, client = load.outcomes, load.client
    chunks_per_token = summary["chunks_per_token"]
    if chunks_per_token is not None and chunks_per_token < MIN_CHUNKS_PER_TOKEN:
        yield (
            f"the server sent {chunks_per_token:.2f} chunks per token: tokens came together, so ITL says less than TPOT"
        )
    zero_gap_share = summary["zero_gap_share"]
    if zero_gap_share is not None and zero_gap_share > MAX_ZERO_GAP_SHARE:
        yield f"{zero_gap_share:.0%} of the chunks came in one piece with the one before: ITL says less than TPOT"
    if client.cpu_share > MAX_CPU_SHARE:
        yield f"the client used {client.cpu_share:.0%} of a core: it may have been the bottleneck"
    if outcomes and client.num_late > MAX_LATE_SHARE * len(outcomes):
        yield f"{client.num_late} of {len(outcomes)} requests were sent over 10 ms late: the load was not as planned"
    if _num_cached_unexpectedly(summary, dataset) > MAX_CACHED_SHARE * summary["total_input_tokens"]:
        yield "the server had prompts in its cache that should be new: measure with another --seed"
    num_without_usage = sum(
        outcome.failure is None and "completion_tokens" not in outcome.usage for outcome in outcomes
    )
    if num_without_usage:
        yield f"{num_without_usage} answers came without usage: their tokens were counted as chunks"
    if summary["failed"]:
        yield f"{summary['failed']} of {len(outcomes)} requests failed and are in no average"
    if load.num_unsent:
        yield f"{load.num_unsent} requests were never sent, because the turn before them failed"


def _num_cached_unexpectedly(summary: dict[str, Any], dataset: DatasetSettings) -> int:
    """Cached tokens beyond the common prefix, of the one dataset whose prompts have nothing else in common."""
    if dataset.dataset_name != RANDOM:
        return 0
    num_cached: int = summary["cached_tokens"] or 0
    return num_cached - dataset.random_prefix_len * int(summary["completed"])
