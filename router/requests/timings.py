"""Timestamps of a request on its way through the programs, in microseconds of the clock that a host's programs share.

Owns the stamps and their names in `usage.timings`. Every stamp is taken before the token or message that it belongs to
is passed on, so the time between two stamps in order is never negative. Stamps of different programs are compared only
when all of them named the same clock (see `baton.runtime.clock`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from baton.wire.messages.output import StepTimes

Timings: TypeAlias = dict[str, int | str | None]
"""The member `timings` of an answer's usage."""


@dataclass(slots=True)
class RelayTimes:
    """Stamps on the way from the router to the nodes and back. `clock` is the one that all legs share with the router,
    or ""."""

    clock: str = ""
    sent_us: int | None = None
    first: StepTimes | None = None
    second: StepTimes | None = None

    def legs_sent(self, at_us: int, *clocks: str) -> None:
        """The legs of an attempt go out to nodes with these clocks; the first attempt's time is kept."""
        if self.sent_us is None:
            self.sent_us = at_us
        if any(clock != self.clock for clock in clocks):
            self.clock = ""

    def sampled(self, index: int, times: StepTimes) -> None:
        """Record the times of output `index`; only the first report of it counts."""
        if index == 0 and self.first is None:
            self.first = times
        elif index == 1 and self.second is None:
            self.second = times


@dataclass(slots=True)
class ClientTimes:
    """Stamps between client and router. A time of writing is None when that token was not written in an event of its
    own."""

    received_us: int
    first_written_us: int | None = None
    second_written_us: int | None = None

    def written(self, num_tokens: int, at_us: int) -> None:
        """An event is about to be written; with it the client has `num_tokens` tokens in all."""
        if num_tokens == 1:
            self.first_written_us = at_us
        elif num_tokens == 2 and self.first_written_us is not None:
            self.second_written_us = at_us


def timings_of(client: ClientTimes, relay: RelayTimes, num_attempts: int) -> Timings | None:
    """The `timings` member for a client that asked for it; None when a node used another clock."""
    if not relay.clock:
        return None
    first, second = relay.first, relay.second
    return {
        "clock": relay.clock,
        "received_us": client.received_us,
        "sent_us": relay.sent_us,
        "prefill_begun_us": None if first is None else first.begun_us,
        "first_sampled_us": None if first is None else first.sampled_us,
        "kv_ready_us": None if second is None else second.ready_us,
        "decode_begun_us": None if second is None else second.begun_us,
        "second_sampled_us": None if second is None else second.sampled_us,
        "first_written_us": client.first_written_us,
        "second_written_us": client.second_written_us,
        "attempts": num_attempts,
    }
