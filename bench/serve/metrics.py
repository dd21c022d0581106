"""The times of each answered request and the figures of one run, as pure functions of what became of its requests.

Owns the names and formulas that `vllm bench serve` gives a run, and those it lacks: largest gap per request, time to
second token, attainment, schedule delay, failures by reason. Averages hold complete requests only; attainment counts
every request that was sent. Without any value a statistic is 0, as there. Percentiles interpolate linearly.

TTFT is from sending to the first chunk that carries a token, whatever its text; E2E to the last one. A chunk of several
tokens is one arrival: its gap counts once. Events that carry none (a chat's role) are no arrivals, where vllm takes the
first of them for token 1.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.bench.client.outcome import Outcome, count_of
from baton.bench.runs import FAMILIES

PERCENTILES = (50, 90, 95, 99)
_MAX_FAILURE_MESSAGES = 3
_OF_DRAFTS = ("steps", "tokens", "accepted")


@dataclass(frozen=True, slots=True)
class Timing:
    """`tpot_s` is (E2E - TTFT) / (tokens - 1), `ttst_s` from sending to the chunk with token 2; None for one token."""

    ttft_s: float
    e2el_s: float
    tpot_s: float | None
    ttst_s: float | None
    gaps_s: tuple[float, ...]

    @property
    def max_gap_s(self) -> float | None:
        """The longest silence after token 1; None when everything came at once."""
        return max(self.gaps_s, default=None)


def timing_of(outcome: Outcome) -> Timing:
    came_s = arrivals_s(outcome)
    ttft_s, e2el_s = came_s[0] - outcome.sent_s, came_s[-1] - outcome.sent_s
    num_tokens = outcome.num_output_tokens
    return Timing(
        ttft_s=ttft_s,
        e2el_s=e2el_s,
        tpot_s=(e2el_s - ttft_s) / (num_tokens - 1) if num_tokens > 1 else None,
        ttst_s=_ttst_s(outcome) if num_tokens > 1 else None,
        gaps_s=tuple(later - earlier for earlier, later in pairwise(came_s)),
    )


def arrivals_s(outcome: Outcome) -> list[float]:
    """When chunks with tokens came, by the monotonic clock."""
    return [came_s for came_s, num in zip(outcome.chunk_s, outcome.chunk_tokens, strict=True) if num]


def _ttst_s(outcome: Outcome) -> float | None:
    """By the second chunk where the chunks do not say how many tokens they carry."""
    so_far = accumulate(outcome.chunk_tokens)
    came_s = next((came_s for came_s, num in zip(outcome.chunk_s, so_far, strict=False) if num >= 2), None)
    return None if came_s is None else came_s - outcome.sent_s


def summarise(outcomes: Sequence[Outcome], duration_s: float, slo: Mapping[str, float]) -> dict[str, Any]:
    """The figures of a run that took `duration_s`. `slo` is {metric: ms}, empty for none."""
    completed = [outcome for outcome in outcomes if outcome.failure is None]
    timings = [timing_of(outcome) for outcome in completed]
    gaps_s = [gap_s for timing in timings for gap_s in timing.gaps_s]
    num_input = sum(outcome.num_prompt_tokens for outcome in completed)
    num_output = sum(outcome.num_output_tokens for outcome in completed)
    num_good = sum(meets(timing, slo) for timing in timings)
    cached = [num for outcome in completed if (num := outcome.num_cached_tokens) is not None]
    return {
        "duration": round(duration_s, 6),
        "completed": len(completed),
        "failed": len(outcomes) - len(completed),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(completed) / duration_s,
        "request_goodput": num_good / duration_s if slo else None,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
        **_peaks(completed),
        **_families(timings),
        "slo": dict(slo),
        "slo_attainment": num_good / len(outcomes) if slo and outcomes else None,
        "schedule_delay": _schedule_delay(outcomes),
        **_failures(outcomes),
        "chunks_per_token": sum(len(arrivals_s(outcome)) for outcome in completed) / num_output if num_output else None,
        # of all gaps, those between chunks that the client read in one piece
        "zero_gap_share": round(gaps_s.count(0) / len(gaps_s), 6) if gaps_s else None,
        "cached_tokens": sum(cached) if cached else None,
        **_drafts(completed, num_output),
    }


def meets(timing: Timing, slo: Mapping[str, float]) -> bool:
    """Whether a complete request keeps every limit of `slo` (ms). Limits are inclusive, as in `vllm bench serve`.

    An answer of one token has no TPOT and no gap, which counts as 0: it can only miss TTFT and E2E.
    """
    values_s = {"ttft": timing.ttft_s, "tpot": timing.tpot_s, "itl": timing.max_gap_s, "e2el": timing.e2el_s}
    return all((values_s[name] or 0.0) <= limit_ms / 1000 for name, limit_ms in slo.items())


def _families(timings: Sequence[Timing]) -> dict[str, float]:
    rows = [(timing.ttft_s, timing.tpot_s, None, timing.e2el_s, timing.max_gap_s, timing.ttst_s) for timing in timings]
    columns = {name: [row[place] for row in rows] for place, name in enumerate(FAMILIES)}
    columns["itl"] = [gap_s for timing in timings for gap_s in timing.gaps_s]
    found: dict[str, float] = {}
    for name, column in columns.items():
        values_ms = _milliseconds([value for value in column if value is not None])
        found |= {f"mean_{name}_ms": values_ms.mean(), f"median_{name}_ms": np.median(values_ms).item()}
        found[f"std_{name}_ms"] = values_ms.std()
        found |= {f"p{at}_{name}_ms": np.percentile(values_ms, at).item() for at in PERCENTILES}
    found["max_max_itl_ms"] = _milliseconds([gap_s for timing in timings for gap_s in timing.gaps_s]).max()
    return _rounded(found)


def _peaks(completed: Sequence[Outcome]) -> dict[str, float | int]:
    """The fullest second, counted from the first sending: tokens that came in it, requests open in any part of it."""
    if not completed:
        return {"max_output_tokens_per_s": 0.0, "max_concurrent_requests": 0}
    begin_s = min(outcome.sent_s for outcome in completed)
    num_seconds = math.ceil(max(arrivals_s(outcome)[-1] for outcome in completed) - begin_s) + 1
    tokens = np.zeros(num_seconds)
    num_open = np.zeros(num_seconds, dtype=np.int64)
    for outcome in completed:
        seconds = (np.array(arrivals_s(outcome)) - begin_s).astype(np.int64)
        np.add.at(tokens, seconds, [num for num in outcome.chunk_tokens if num])
        num_open[int(outcome.sent_s - begin_s) : seconds[-1] + 1] += 1
    return {"max_output_tokens_per_s": float(tokens.max()), "max_concurrent_requests": int(num_open.max())}


def _drafts(completed: Sequence[Outcome], num_output: int) -> dict[str, float | None]:
    """What drafts did, as far as servers tell it with their answers; None where they tell of none."""
    told = [method for outcome in completed for method in outcome.drafts.values() if isinstance(method, dict)]
    steps, tokens, accepted = (sum(count_of(each.get(name)) or 0 for each in told) for name in _OF_DRAFTS)
    is_told = 0 < steps <= tokens and accepted < num_output
    return {
        "spec_decode_num_drafts": steps if is_told else None,
        "spec_decode_draft_tokens": tokens if is_told else None,
        "spec_decode_accepted_tokens": accepted if is_told else None,
        "spec_decode_acceptance_rate": 100 * accepted / tokens if is_told else None,
        "spec_decode_acceptance_length": 1 + accepted / steps if is_told else None,
        "tokens_per_step": num_output / (num_output - accepted) if is_told else None,
    }


def _schedule_delay(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """How much later than planned requests were sent, over all that were sent."""
    values_ms = _milliseconds([outcome.sent_s - outcome.scheduled_s for outcome in outcomes if outcome.sent_s])
    return _rounded({"mean_ms": values_ms.mean(), "p99_ms": np.percentile(values_ms, 99), "max_ms": values_ms.max()})


def _failures(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    failed = [(outcome.failure, outcome.message) for outcome in outcomes if outcome.failure is not None]
    messages = dict.fromkeys(f"{failure}: {message}" if message else str(failure) for failure, message in failed)
    return {
        "failures": {str(failure): num for failure, num in Counter(failure for failure, _ in failed).most_common()},
        "failure_messages": list(messages)[:_MAX_FAILURE_MESSAGES],
    }


def _milliseconds(values_s: Sequence[float]) -> npt.NDArray[np.float64]:
    """One 0 for no values."""
    return np.array(values_s or [0.0], dtype=np.float64) * 1000


def _rounded(milliseconds: Mapping[str, float | np.floating[Any]]) -> dict[str, float]:
    return {name: round(float(value), 3) for name, value in milliseconds.items()}
