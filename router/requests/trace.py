"""What happened to a request, for people who look at it later: when, on which nodes, in which attempts, how it ended.

Owns the record of one HTTP request and of each of its flights. A record holds ids, stamps, codes and counts: no prompt,
no text, no token ids. Writers note moments that come once per request or attempt, never per token. Stamps are
microseconds of the host's clock (`baton.runtime.clock`).

The record that a task works for is in a context variable, so that it need not be handed through every call: whoever
answers HTTP sets it, flights and timers that begin in that task find it, and outside of any request there is none.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field

from baton.router.requests.output import Output
from baton.router.requests.timings import RelayTimes
from baton.runtime.clock import now_us
from baton.wire.messages.output import HandoffFigures

FINISHED, CANCELLED = "finished", "cancelled"
CURRENT_TRACE: ContextVar[RequestTrace | None] = ContextVar("current_trace", default=None)


@dataclass(slots=True)
class AttemptTrace:
    """One try at a request. `prefill_node` is "" where the decode node computes the prompt. `end` is "" while it runs,
    then `FINISHED`, `CANCELLED`, or the code of the error that ended it."""

    sent_us: int
    prefill_node: str
    decode_node: str
    ended_us: int | None = None
    end: str = ""


@dataclass(slots=True)
class FlightTrace:
    """One choice of a request, over all its attempts. `end` is as that of an attempt; `finish_reason` is the client's.

    `num_output_tokens` counts what the client got; while the flight runs, what came from the nodes.
    """

    request_id: str
    handoff_id: str
    index: int
    num_prompt_tokens: int
    times: RelayTimes
    attempts: list[AttemptTrace] = field(default_factory=list)
    finish_reason: str = ""
    end: str = ""
    ended_us: int | None = None
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    handoff: HandoffFigures | None = None
    _output: Output | None = None

    def attempt_sent(self, sent_us: int, prefill_node: str, decode_node: str) -> None:
        """The legs of the next attempt were sent; `sent_us` is from before the first of them left."""
        self.attempts.append(AttemptTrace(sent_us, prefill_node, decode_node))

    def attempt_ended(self, end: str) -> None:
        """The current attempt is over, if there is one. Harmless when repeated."""
        if self.attempts and not self.attempts[-1].end:
            self.attempts[-1].end, self.attempts[-1].ended_us = end, now_us()

    def finished(self, finish_reason: str, num_output_tokens: int) -> None:
        """The choice is complete: the client gets so many tokens and this reason."""
        self._end(FINISHED)
        self.finish_reason, self.num_output_tokens = finish_reason, num_output_tokens

    def failed(self, code: str) -> None:
        """The flight ends with an error."""
        self._end(code)

    def closed(self) -> None:
        """The reader wants no more."""
        self._end(CANCELLED)

    def so_far(self) -> FlightTrace:
        """This trace with the counts of now."""
        self._read_output()
        return self

    def _end(self, end: str) -> None:
        if not self.end:
            self._read_output()
            self.attempt_ended(end)
            self.end, self.ended_us, self._output = end, now_us(), None

    def _read_output(self) -> None:
        output = self._output
        if output is not None:
            self.num_cached_tokens, self.handoff = output.num_cached_tokens or 0, output.handoff
            self.num_output_tokens = len(output.token_ids)


@dataclass(slots=True)
class RequestTrace:
    """One HTTP request. `status` is None while it runs, and when the client left before it had an answer."""

    request_id: str
    path: str
    traceparent: str = ""
    received_us: int = field(default_factory=now_us)
    received_at_s: float = field(default_factory=time.time)
    model: str = ""
    num_prompt_tokens: int = 0
    first_token_us: int | None = None
    ended_us: int | None = None
    status: int | None = None
    flights: list[FlightTrace] = field(default_factory=list)

    def first_token(self, at_us: int) -> None:
        """A choice has its first token; only the first of all choices counts."""
        if self.first_token_us is None:
            self.first_token_us = at_us

    @property
    def end(self) -> str:
        """How it ended: `FINISHED`, `CANCELLED`, or the code of an error; "" while it runs."""
        if self.ended_us is None:
            return ""
        ends = [flight.end for flight in self.flights if flight.end != FINISHED]
        errors = [end for end in ends if end != CANCELLED]
        if errors or ends:
            return (errors or ends)[0]
        return CANCELLED if self.status is None else FINISHED if self.status < 400 else "refused"

    @property
    def is_refused(self) -> bool:
        """Whether its client is to blame: the request was not valid, asked for what is not there, or for too much."""
        return self.status is not None and 400 <= self.status < 500

    @property
    def num_attempts(self) -> int:
        """The most attempts that a choice needed."""
        return max((len(flight.attempts) for flight in self.flights), default=0)

    def after_us(self, at_us: int | None) -> float | None:
        """Seconds from the arrival of the request to that moment."""
        return None if at_us is None else (at_us - self.received_us) / 1e6


def begin_flight(handoff_id: bytes, index: int, num_prompt_tokens: int, output: Output) -> FlightTrace:
    """The trace of a flight that begins; it belongs to the request that the running task answers, if any."""
    request = CURRENT_TRACE.get()
    request_id = "" if request is None else request.request_id
    trace = FlightTrace(request_id, handoff_id.hex(), index, num_prompt_tokens, output.times, _output=output)
    if request is not None:
        request.flights.append(trace)
    return trace


def note_request(model: str, num_prompt_tokens: int) -> None:
    """The request that the running task answers is for this model. `num_prompt_tokens`: of all its prompts, before any
    truncation."""
    request = CURRENT_TRACE.get()
    if request is not None:
        request.model, request.num_prompt_tokens = model, num_prompt_tokens
