"""The ceiling `zmq round trip`: a small message to a process on another core and back.

Owns the rounds. Each round's value is the median of its trips.
"""

from __future__ import annotations

from contextlib import ExitStack

from bench.child import Child
from bench.limits.result import Ceiling, ceiling_of
from bench.stats import median, percentile

_END = "bench.limits.round_trip_process"
_MESSAGE_BYTES = 256
_NUM_WARM_UP = 50


def zmq_round_trip(num_rounds: int, num_trips: int, cores: tuple[int, int] | None) -> Ceiling:
    """Microseconds, over so many rounds of so many trips. Raises `RequestFailed`."""
    spec = {"message_bytes": _MESSAGE_BYTES}
    rounds_us = []
    with ExitStack() as stack:
        sender, other = (stack.enter_context(Child(_END, spec, cpu)) for cpu in cores or (None, None))
        sender.hear()
        other.hear()
        sender.ask("connect", address=other.ask("bind"))
        for number in range(1 + num_rounds):
            count = num_trips if number else _NUM_WARM_UP
            other.tell("send_back", count=count)
            trips_us = [trip_s * 1e6 for trip_s in sender.ask("round_trips", count=count)]
            other.hear()
            if number:
                rounds_us.append(trips_us)
    p99_us = percentile([trip_us for trips_us in rounds_us for trip_us in trips_us], 99)
    where = f"cores {cores[0]} and {cores[1]}" if cores else "any cores"
    note = f"{_MESSAGE_BYTES} bytes over TCP between processes on {where}; p99 {p99_us:.0f} us"
    return ceiling_of("zmq round trip", list(map(median, rounds_us)), "us", note)
