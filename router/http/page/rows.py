"""How one request looks on the page: on which leg it is, how long each took, and why it failed.

A row holds counts, times, names of nodes and codes. It holds no id that a client or a node chose for the request, no
key's name and no text, because everybody who may open the page sees the rows of all clients.
"""

from __future__ import annotations

from http import HTTPStatus
from itertools import pairwise
from typing import TypeAlias

from baton.router.requests.trace import CANCELLED, FINISHED, FlightTrace, RequestTrace

QUEUED, PREFILL, TRANSFER, DECODE = LEGS = ("queued", "prefill", "transfer", "decode")
Row: TypeAlias = dict[str, object]

_MAX_ATTEMPTS = 4
_REASONS = {
    "request_failed": "a node was lost, or reported an error",
    "transfer_failed": "the KV did not arrive whole",
    "overloaded": "there was no room: too many requests at once",
    "rate_limited": "the key has used up its limit",
    "no_node": "no node was there to take it",
    "deadline_exceeded": "it took longer than a request may",
    "context_length_exceeded": "prompt and answer are longer than the context",
    "invalid_value": "the request was not valid",
    "internal_error": "an internal error, see the router's log",
}


def request_row(trace: RequestTrace, now_us: int) -> Row:
    """One request, in flight or ended. `spans_s`: seconds on each of `LEGS` so far. `key` tells rows apart. TPOT is
    None before the second token."""
    flights = [flight.so_far() for flight in trace.flights]
    current = _current(trace)
    attempt = current.attempts[-1] if current is not None and current.attempts else None
    num_tokens = max((flight.num_output_tokens for flight in flights), default=0)
    until_us = now_us if trace.ended_us is None else trace.ended_us
    tpot_s = None
    if trace.first_token_us is not None and num_tokens > 1:
        tpot_s = _seconds(until_us - trace.first_token_us) / (num_tokens - 1)
    return {
        "key": trace.received_us,
        "leg": leg_of(trace),
        "end": trace.end,
        "status": trace.status,
        "is_refused": trace.is_refused,
        "api": trace.path.rstrip("/").rpartition("/v1/")[2],
        "model": trace.model,
        "num_choices": len(flights),
        "num_attempts": trace.num_attempts,
        "prefill_node": "" if attempt is None else attempt.prefill_node,
        "decode_node": "" if attempt is None else attempt.decode_node,
        "num_prompt_tokens": trace.num_prompt_tokens,
        "num_cached_tokens": max((flight.num_cached_tokens for flight in flights), default=0),
        "num_output_tokens": sum(flight.num_output_tokens for flight in flights),
        "ttft_s": trace.after_us(trace.first_token_us),
        "tpot_s": tpot_s,
        "spans_s": _spans_s(trace, current, until_us),
    }


def leg_of(trace: RequestTrace) -> str:
    """The leg that a request is on; one with several choices, of the first that has not ended. "" when it ended, and
    between two attempts `QUEUED`."""
    if trace.ended_us is not None:
        return ""
    flight = _current(trace)
    if flight is None or not flight.attempts or (flight.attempts[-1].end and not flight.end):
        return QUEUED
    num_tokens = flight.so_far().num_output_tokens
    if num_tokens > 1 or flight.end:
        return DECODE
    if not num_tokens:
        return PREFILL
    return TRANSFER if flight.attempts[-1].prefill_node else DECODE


def failure_row(trace: RequestTrace) -> Row:
    """A request that failed or needed another attempt."""
    attempts = [attempt for flight in trace.flights for attempt in flight.attempts if attempt.end != FINISHED]
    after_s = trace.after_us(trace.ended_us) or 0.0
    return {
        "key": trace.received_us,
        "at_s": round(trace.received_at_s + after_s, 3),
        "after_s": after_s,
        "end": trace.end,
        "status": trace.status,
        "reason": _reason(trace),
        "attempts": [
            {"prefill_node": each.prefill_node, "decode_node": each.decode_node, "reason": _REASONS.get(each.end, "")}
            for each in attempts[:_MAX_ATTEMPTS]
        ],
    }


def _reason(trace: RequestTrace) -> str:
    if trace.end == FINISHED:
        return f"an attempt failed, attempt {trace.num_attempts} finished it"
    if trace.end == CANCELLED:
        return "an attempt failed, then the client left"
    if trace.end in _REASONS:
        return _REASONS[trace.end]
    try:
        return HTTPStatus(trace.status or 0).phrase.lower()
    except ValueError:
        return "an error"


def _current(trace: RequestTrace) -> FlightTrace | None:
    """The choice that stands for the request: the first that has not ended."""
    running = (flight for flight in trace.flights if not flight.end)
    return next(running, trace.flights[0] if trace.flights else None)


def _spans_s(trace: RequestTrace, flight: FlightTrace | None, until_us: int) -> list[float]:
    """The leg in which a moment is not known yet goes on until now. Where nodes have another clock, token 1 counts from
    its arrival at the router, and the transfer is a part of the decode leg."""
    sent_us = first_us = ready_us = None
    if flight is not None:
        times = flight.times
        has_clock, has_prefill_node = bool(times.clock), any(each.prefill_node for each in flight.attempts)
        sent_us = times.sent_us
        first_us = times.first.sampled_us if has_clock and times.first is not None else trace.first_token_us
        if not has_prefill_node or not has_clock:
            ready_us = first_us
        elif times.second is not None:
            ready_us = first_us if times.second.ready_us is None else times.second.ready_us
    moments = [trace.received_us]
    for at_us in (sent_us, first_us, ready_us, until_us):
        moments.append(min(until_us, max(moments[-1], until_us if at_us is None else at_us)))
    return [_seconds(after - before) for before, after in pairwise(moments)]


def _seconds(duration_us: int) -> float:
    return duration_us / 1e6
