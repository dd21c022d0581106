"""The result of a run: its figures, its requests, and both as the JSON object that goes into a file.

Owns the names of per-request lists, as `vllm bench serve --save-detailed` has them, and what several runs become.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bench.client.outcome import Outcome
from bench.serve.timing import arrivals_s, num_output_tokens, num_prompt_tokens

_ORDERED_BY = "mean_e2el_ms"
_NESTED_OF_REPEAT = ("facts", "dataset", "breakdown", "client")


@dataclass(frozen=True, slots=True)
class RunResult:
    """`summary` is what the file says without details; `workload` are the facts of the dataset."""

    summary: dict[str, Any]
    outcomes: list[Outcome]
    workload: dict[str, Any]


def as_json(result: RunResult, detailed: bool) -> dict[str, Any]:
    """The JSON object of `result`; `detailed` adds one entry per request to lists, in the order of sending."""
    found = dict(result.summary)
    if found["breakdown"] and not detailed:
        found["breakdown"] = {name: value for name, value in found["breakdown"].items() if name != "requests"}
    return found | details(result.outcomes) if detailed else found


def details(outcomes: Sequence[Outcome]) -> dict[str, list[Any]]:
    """Lists with one entry per request; times in seconds, `start_times` by this host's monotonic clock."""
    return {
        "input_lens": [num_prompt_tokens(outcome) for outcome in outcomes],
        "output_lens": [0 if outcome.failure else num_output_tokens(outcome) for outcome in outcomes],
        "ttfts": [_since_sent(outcome, 0) for outcome in outcomes],
        "itls": [[round(after - before, 6) for before, after in pairwise(arrivals_s(outcome))] for outcome in outcomes],
        "latencies": [_since_sent(outcome, -1) for outcome in outcomes],
        "start_times": [round(outcome.sent_s, 6) for outcome in outcomes],
        "queue_times": [round(outcome.sent_s - outcome.scheduled_s, 6) for outcome in outcomes],
        "generated_texts": [outcome.text for outcome in outcomes],
        "errors": [f"{outcome.failure}: {outcome.message}" if outcome.failure else "" for outcome in outcomes],
    }


def middle_of(results: Sequence[RunResult]) -> RunResult:
    """Of several runs the middle one by mean E2E, with all of them in `repeats` and the `range` of each figure.

    Runs in which every request failed come last. A single run is returned as it is.
    """
    if len(results) == 1:
        return results[0]
    ordered = sorted(results, key=lambda result: (not result.summary["completed"], result.summary[_ORDERED_BY]))
    middle = ordered[(len(ordered) - 1) // 2]
    place = results.index(middle) + 1
    note = f"these are the figures of repeat {place} of {len(results)}, the middle one by mean E2E"
    summary = {
        **middle.summary,
        "repeats": [_without_nested(result.summary) for result in results],
        "range": _range([result.summary for result in results if result.summary["completed"]]),
        "notes": [note, *dict.fromkeys(note for result in results for note in result.summary["notes"])],
    }
    return dataclasses.replace(middle, summary=summary)


def _since_sent(outcome: Outcome, chunk: int) -> float:
    came_s = arrivals_s(outcome)
    return round(came_s[chunk] - outcome.sent_s, 6) if came_s else 0.0


def _without_nested(summary: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in summary.items() if name not in _NESTED_OF_REPEAT}


def _range(summaries: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """{figure: {"low", "high"}} of those that are numbers in every run."""
    names = [name for name in summaries[0] if all(_is_number(each[name]) for each in summaries)] if summaries else []
    return {name: {"low": min(s[name] for s in summaries), "high": max(s[name] for s in summaries)} for name in names}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
