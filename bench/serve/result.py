"""The result of a run: its figures, its requests, and both as the JSON object that goes into a file.

Owns the names of per-request lists and of files, and the line format, as `vllm bench serve` has them; and what several
runs become.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.client.outcome import Outcome
from bench.serve.metrics import arrivals_s, num_output_tokens, num_prompt_tokens
from bench.serve.settings import ServeBenchSettings
from wire.errors import InvalidSetting

_ORDERED_BY = "mean_e2el_ms"
_NESTED_OF_REPEAT = ("facts", "dataset", "breakdown", "client")


@dataclass(frozen=True, slots=True)
class RunResult:
    """`summary` is what the file says without details."""

    summary: dict[str, Any]
    outcomes: list[Outcome]


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
    repeats = [
        {name: value for name, value in result.summary.items() if name not in _NESTED_OF_REPEAT} for result in results
    ]
    summary = {
        **middle.summary,
        "repeats": repeats,
        "range": _range([result.summary for result in results if result.summary["completed"]]),
        "notes": [note, *dict.fromkeys(note for result in results for note in result.summary["notes"])],
    }
    return dataclasses.replace(middle, summary=summary)


def prepare_folder(settings: ServeBenchSettings) -> None:
    """Make the folder of the result, so that a run does not end without a place for it. Raises `InvalidSetting`."""
    if settings.result_dir and (settings.save_result or settings.append_result):
        try:
            Path(settings.result_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidSetting(f"--result-dir {settings.result_dir}: {error.strerror}") from None


def result_path(settings: ServeBenchSettings, result: Mapping[str, Any]) -> Path | None:
    """The file of `result`; None when none is to be written."""
    if not (settings.save_result or settings.append_result):
        return None
    concurrency = "" if settings.max_concurrency is None else f"-concurrency{settings.max_concurrency}"
    rate = f"{settings.request_rate}qps"
    if settings.ramp_up_strategy is not None:
        rate = f"ramp-up-{settings.ramp_up_strategy}-{settings.ramp_up_start_rps}qps-{settings.ramp_up_end_rps}qps"
    model = str(result["model_id"]).rstrip("/").rsplit("/", 1)[-1]
    name = f"{result['label']}-{rate}{concurrency}-{model}-{result['date']}.json".replace("/", "_")
    return Path(settings.result_dir) / (settings.result_filename or name)


def write_result(path: Path, result: Mapping[str, Any], *, is_appended: bool) -> None:
    """Write `result` to `path`, or append it as one more line. Raises `InvalidSetting`."""
    line = json.dumps(result)
    try:
        with path.open("a" if is_appended else "w") as file:
            # a file that vllm has begun ends without a line break
            file.write("\n" * (file.tell() > 0) + line + "\n" * (not is_appended))
    except OSError as error:
        raise InvalidSetting(f"--result-filename {path}: {error.strerror}") from None


def _since_sent(outcome: Outcome, chunk: int) -> float:
    came_s = arrivals_s(outcome)
    return round(came_s[chunk] - outcome.sent_s, 6) if came_s else 0.0


def _range(summaries: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """{figure: {"low", "high"}} of those that are numbers in every run."""
    columns = {name: [summary[name] for summary in summaries] for name in (summaries[0] if summaries else ())}
    numbers = {name: values for name, values in columns.items() if all(type(value) in (int, float) for value in values)}
    return {name: {"low": min(values), "high": max(values)} for name, values in numbers.items()}
