"""Where the time to the first and to the second token went: stacked parts of each request, by one clock.

Owns the parts and the decision whether a request can be taken apart. Pure: it reads what the client noted and what a
Baton router, asked with `"return_timings": true`, said in `usage.timings`.

    client             sent until the router's handler runs, and written by the router until read: HTTP and the network
    router             until the legs go out: body, template, tokens, choice of nodes
    queue_prefill      until the step with the first chunk of the prompt begins
    prefill            until token 1 is drawn
    return             until the router writes token 1

To the second token it goes on after `prefill`:

    exposed_transfer   until the KV is on the decode node and verified; 0 where one node does both
    queue_decode       until the step that draws token 2 begins
    first_decode_step  until token 2 is drawn
    return_second      until the router writes token 2

Stations follow each other, so a part below zero means that stamps do not belong together; one of less than
`TOLERANCE_MS` counts as zero, and how far the sum then is from the measured time is the error. A client on another host
has another clock: its part is then what is left of the measured time.

A request is left out, and counted, when it has no whole set of stamps, when it took more than one attempt, or when its
first two tokens did not come as one event each.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bench.client.outcome import Outcome
from bench.stats import median, percentile
from program.clock import host_clock

TOLERANCE_MS = 0.2
TTFT_PARTS = ("client", "router", "queue_prefill", "prefill", "return")
TTST_PARTS = (
    "client",
    "router",
    "queue_prefill",
    "prefill",
    "exposed_transfer",
    "queue_decode",
    "first_decode_step",
    "return_second",
)
_TO_FIRST_DRAWN = ("received_us", "sent_us", "prefill_begun_us", "first_sampled_us")
_AFTER_READY = ("decode_begun_us", "second_sampled_us", "second_written_us")


class LeftOut(enum.StrEnum):
    """Why a completed request is not taken apart."""

    NO_TIMINGS = "no timings"
    TRIED_AGAIN = "more than one attempt"
    MISSING_STAMP = "a stamp is missing"
    SHARED_EVENT = "the first tokens did not come one by one"
    INCONSISTENT = "stamps in the wrong order"


class _Unusable(Exception):
    def __init__(self, reason: LeftOut) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Stack:
    """One measured time and its parts, in order of their names."""

    measured_ms: float
    parts_ms: tuple[float, ...]

    @property
    def sum_ms(self) -> float:
        """All parts together."""
        return sum(self.parts_ms)

    @property
    def error(self) -> float:
        """How far the sum is from the measured time, as a share of it."""
        return abs(self.sum_ms - self.measured_ms) / self.measured_ms


@dataclass(frozen=True, slots=True)
class Breakdown:
    """One request. `ttst` is None for an answer of a single token."""

    index: int
    ttft: Stack
    ttst: Stack | None


def breakdown_of(outcome: Outcome) -> Breakdown | None:
    """The parts of one completed request; None when it is left out."""
    found = _examine(outcome, host_clock())
    return found if isinstance(found, Breakdown) else None


def summarise_breakdowns(outcomes: Sequence[Outcome]) -> dict[str, Any] | None:
    """Parts over all completed requests (milliseconds); None when the target gave no stamps at all.

    "ttft" and "ttst" are None when no request has them; "left_out" counts by reason.
    """
    clock = host_clock()
    examined = [_examine(outcome, clock) for outcome in outcomes if outcome.failure is None]
    found = [item for item in examined if isinstance(item, Breakdown)]
    left_out = Counter(item for item in examined if isinstance(item, LeftOut))
    if left_out[LeftOut.NO_TIMINGS] == len(examined):
        return None
    return {
        "num_requests": len(found),
        "num_left_out": left_out.total(),
        "left_out": {str(reason): count for reason, count in left_out.items()},
        "ttft": _summarise(TTFT_PARTS, [item.ttft for item in found]),
        "ttst": _summarise(TTST_PARTS, [item.ttst for item in found if item.ttst is not None]),
        "requests": [_request(item) for item in found],
    }


def _summarise(names: Sequence[str], stacks: Sequence[Stack]) -> dict[str, Any] | None:
    if not stacks:
        return None
    columns = zip(names, zip(*(stack.parts_ms for stack in stacks), strict=True), strict=True)
    return {
        "parts": {
            name: {"mean_ms": _mean(values), "median_ms": _ms(median(values)), "p99_ms": _ms(percentile(values, 99))}
            for name, values in columns
        },
        "measured_mean_ms": _mean([stack.measured_ms for stack in stacks]),
        "sum_mean_ms": _mean([stack.sum_ms for stack in stacks]),
        "largest_error": round(max(stack.error for stack in stacks), 6),
    }


def _request(item: Breakdown) -> dict[str, Any]:
    return {
        "index": item.index,
        "ttft_ms": _ms(item.ttft.measured_ms),
        "ttst_ms": None if item.ttst is None else _ms(item.ttst.measured_ms),
        "parts_ttft": [_ms(part) for part in item.ttft.parts_ms],
        "parts_ttst": None if item.ttst is None else [_ms(part) for part in item.ttst.parts_ms],
    }


def _examine(outcome: Outcome, clock: str) -> Breakdown | LeftOut:
    try:
        return _take_apart(outcome, clock)
    except _Unusable as error:
        return error.reason


def _take_apart(outcome: Outcome, clock: str) -> Breakdown:
    """Raises `_Unusable`."""
    timings = outcome.timings
    if outcome.failure is not None or not timings:
        raise _Unusable(LeftOut.NO_TIMINGS)
    if timings.get("attempts") != 1:
        raise _Unusable(LeftOut.TRIED_AGAIN)
    num_tokens = min(2, outcome.num_output_tokens)
    arrivals_us = _arrivals_us(outcome, num_tokens)
    client = _ClientEnds(outcome.sent_s * 1e6, bool(clock) and timings.get("clock") == clock)
    to_first = _stations(timings, _TO_FIRST_DRAWN)
    # measured as everywhere: an event that only opens the answer counts, though its token may be in the next
    ttft_us = outcome.chunk_s[0] * 1e6 - client.sent_us
    ttft = _stack(ttft_us, client.spans_us(arrivals_us[0], [*to_first, *_stations(timings, ("first_written_us",))]))
    if num_tokens < 2:
        return Breakdown(outcome.index, ttft, None)
    ready_us = to_first[-1] if timings.get("kv_ready_us") is None else _stations(timings, ("kv_ready_us",))[0]
    stations = [*to_first, ready_us, *_stations(timings, _AFTER_READY)]
    ttst_us = arrivals_us[1] - client.sent_us
    return Breakdown(outcome.index, ttft, _stack(ttst_us, client.spans_us(arrivals_us[1], stations)))


@dataclass(frozen=True, slots=True)
class _ClientEnds:
    """Joins the client's own stamps to the router's."""

    sent_us: float
    is_our_clock: bool

    def spans_us(self, arrival_us: float, stations: Sequence[float]) -> list[float]:
        """Time before and after the router, then between `stations`: the router's receiving to its writing."""
        between_us = [later - earlier for earlier, later in pairwise(stations)]
        if self.is_our_clock:
            return [stations[0] - self.sent_us, arrival_us - stations[-1], *between_us]
        return [0.0, arrival_us - self.sent_us - sum(between_us), *between_us]


def _stack(measured_us: float, spans_us: Sequence[float]) -> Stack:
    """Raises `_Unusable` for a span that cannot be."""
    if measured_us <= 0 or min(spans_us) < -TOLERANCE_MS * 1e3:
        raise _Unusable(LeftOut.INCONSISTENT)
    before_ms, after_ms, *between_ms = (max(0.0, span_us) / 1e3 for span_us in spans_us)
    return Stack(measured_us / 1e3, (before_ms + after_ms, *between_ms))


def _arrivals_us(outcome: Outcome, num_tokens: int) -> list[float]:
    """When the first tokens came. Events that bring no token, such as a chat's role, are passed over."""
    events = [(at_s, count) for at_s, count in zip(outcome.chunk_s, outcome.chunk_tokens, strict=True) if count > 0]
    firsts = events[:num_tokens]
    if not firsts or len(firsts) < num_tokens or any(count != 1 for _, count in firsts):
        raise _Unusable(LeftOut.SHARED_EVENT)
    return [at_s * 1e6 for at_s, _ in firsts]


def _stations(timings: dict[str, Any], names: Sequence[str]) -> list[float]:
    found = [timings.get(name) for name in names]
    if not all(isinstance(stamp, int) for stamp in found):
        raise _Unusable(LeftOut.MISSING_STAMP)
    return [float(stamp) for stamp in found if isinstance(stamp, int)]


def _mean(values: Sequence[float]) -> float:
    return _ms(sum(values) / len(values))


def _ms(value: float) -> float:
    return round(value, 3)
