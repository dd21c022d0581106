"""When a request passed which station on its way, in microseconds of the clock that a host's programs share.

Owns the stamps and their names in `usage.timings`. Every stamp is taken before what it announces is handed on, so the
time between two stations is never negative. Stamps of different programs are put side by side only when all of them
named the same clock (see `program.clock`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from wire.messages import StepTimes

Timings: TypeAlias = dict[str, int | str | None]
"""The member `timings` of an answer's usage."""


@dataclass(slots=True)
class RelayTimes:
    """From the router to the nodes and back. `clock` is the one that all legs share with the router, or ""."""

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
        """How output `index` came about; the first word about it counts."""
        if index == 0 and self.first is None:
            self.first = times
        elif index == 1 and self.second is None:
            self.second = times


@dataclass(slots=True)
class ClientTimes:
    """From the client to the router and back. A time of writing is None where its event was not that token alone."""

    received_us: int
    first_written_us: int | None = None
    second_written_us: int | None = None

    def written(self, num_tokens: int, at_us: int) -> None:
        """An event is about to be written with which `num_tokens` tokens have been sampled in all."""
        if num_tokens == 1:
            self.first_written_us = at_us
        elif num_tokens == 2 and self.first_written_us is not None:
            self.second_written_us = at_us


def timings_of(client: ClientTimes, relay: RelayTimes, num_attempts: int) -> Timings | None:
    """What a client that asked for it is told; None when a node went by another clock."""
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
