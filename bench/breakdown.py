"""Where the time to the first and to the second token went: stacked parts of each request, by one clock.

Owns the parts and the decision whether a request can be taken apart. Pure: it reads what the client noted and what a
Baton router, asked with `"return_timings": true`, said in `usage.timings`.

    client             sent until the router's handler runs, and written by the router until read: HTTP and the network
    router             until the legs go out: body, template, tokens, choice of nodes
    queue_prefill      until the step with the first chunk of the prompt begins
    prefill            until token 1 is sampled
    return             until the router writes token 1

To the second token it goes on after `prefill`:

    exposed_transfer   until the KV is on the decode node and verified; 0 where one node does both
    queue_decode       until the step that samples token 2 begins
    first_decode_step  until token 2 is sampled
    return_second      until the router writes token 2

Stations follow each other, so a part below zero means that stamps do not belong together; one of less than
`TOLERANCE_MS` counts as zero, and how far the sum then is from the measured time is the error. A client on another host
has another clock: its part is then what is left of the measured time.

A request is left out, and counted, when it has no whole set of stamps, when it took more than one attempt, or when its
first two tokens did not come as one event each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from baton.bench.client.outcome import Outcome
from baton.bench.numbers import median, percentile
from baton.runtime.clock import host_clock

TOLERANCE_MS = 0.2
_TO_FIRST_SAMPLED = ("client", "router", "queue_prefill", "prefill")
TTFT_PARTS = (*_TO_FIRST_SAMPLED, "return")
TTST_PARTS = (*_TO_FIRST_SAMPLED, "exposed_transfer", "queue_decode", "first_decode_step", "return_second")
_FIRST_STAMPS = ("received_us", "sent_us", "prefill_begun_us", "first_sampled_us")
_SECOND_STAMPS = ("kv_ready_us", "decode_begun_us", "second_sampled_us", "second_written_us")


@dataclass(frozen=True, slots=True)
class Stack:
    """One measured time and its parts, in order of their names."""

    measured_ms: float
    parts_ms: tuple[float, ...]

    @property
    def error(self) -> float:
        """How far the sum is from the measured time, as a share of it."""
        return abs(sum(self.parts_ms) - self.measured_ms) / self.measured_ms


@dataclass(frozen=True, slots=True)
class Breakdown:
    """One request. `ttst` is None for an answer of a single token."""

    ttft: Stack
    ttst: Stack | None


def breakdown_of(outcome: Outcome) -> Breakdown | None:
    """The parts of one completed request; None when it is left out."""
    timings = outcome.timings
    if outcome.failure is not None or timings.get("attempts") != 1:
        return None
    # events that bring no token, such as a chat's role, are passed over
    num_looked_at = max(1, min(2, outcome.num_output_tokens))
    came = [(at_s, num) for at_s, num in zip(outcome.chunk_s, outcome.chunk_tokens, strict=True) if num][:num_looked_at]
    if [num for _, num in came] != [1] * num_looked_at:
        return None
    firsts = [timings.get(name) for name in _FIRST_STAMPS]
    seconds = [timings.get(name) for name in _SECOND_STAMPS] if len(came) > 1 else []
    if seconds and seconds[0] is None:  # one node did both: nothing was transferred
        seconds[0] = firsts[-1]
    first_written = timings.get("first_written_us")
    if not all(isinstance(stamp, int) for stamp in (*firsts, first_written, *seconds)):
        return None
    # measured as everywhere: an event that only opens the answer counts, though its token may be in the next
    ttft = _stack(outcome, outcome.chunk_s[0], came[0][0], [*firsts, first_written])
    ttst = _stack(outcome, came[1][0], came[1][0], [*firsts, *seconds]) if seconds else None
    return None if ttft is None or (seconds and ttst is None) else Breakdown(ttft, ttst)


def summarise_breakdowns(outcomes: Sequence[Outcome]) -> dict[str, Any] | None:
    """Parts over all completed requests (milliseconds); None when the target gave no stamps at all.

    "ttft" and "ttst" are None when no request has them.
    """
    completed = [outcome for outcome in outcomes if outcome.failure is None]
    if not any(outcome.timings for outcome in completed):
        return None
    found = [parts for outcome in completed if (parts := breakdown_of(outcome)) is not None]
    return {
        "num_requests": len(found),
        "num_left_out": len(completed) - len(found),
        "ttft": _summarise(TTFT_PARTS, [parts.ttft for parts in found]),
        "ttst": _summarise(TTST_PARTS, [parts.ttst for parts in found if parts.ttst is not None]),
    }


def _summarise(names: Sequence[str], stacks: Sequence[Stack]) -> dict[str, Any] | None:
    if not stacks:
        return None
    parts = {}
    for name, values in zip(names, zip(*(stack.parts_ms for stack in stacks), strict=True), strict=True):
        figures = {"mean_ms": fmean(values), "median_ms": median(values), "p99_ms": percentile(values, 99)}
        parts[name] = {figure: _ms(value) for figure, value in figures.items()}
    return {
        "parts": parts,
        "measured_mean_ms": _ms(fmean(stack.measured_ms for stack in stacks)),
        "largest_error": round(max(stack.error for stack in stacks), 6),
    }


def _stack(outcome: Outcome, measured_s: float, came_s: float, stations_us: Sequence[Any]) -> Stack | None:
    """`stations_us`: the router's receiving to its writing. None for a span that cannot be."""
    sent_us, came_us, measured_us = outcome.sent_s * 1e6, came_s * 1e6, (measured_s - outcome.sent_s) * 1e6
    between_us = [later - earlier for earlier, later in pairwise(stations_us)]
    ends_us = [0.0, came_us - sent_us - sum(between_us)]
    clock = host_clock()
    if clock and outcome.timings.get("clock") == clock:
        ends_us = [stations_us[0] - sent_us, came_us - stations_us[-1]]
    if measured_us <= 0 or min(*ends_us, *between_us) < -TOLERANCE_MS * 1e3:
        return None
    before_ms, after_ms, *between_ms = (max(0.0, span_us) / 1e3 for span_us in (*ends_us, *between_us))
    return Stack(measured_us / 1e3, (before_ms + after_ms, *between_ms))


def _ms(value: float) -> float:
    return round(value, 3)
