"""When the mock server answers what, and how it fails: a plan that is data. Knows no HTTP and no clock."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol


class FaultKind(enum.StrEnum):
    """What a request may meet; all but the first break a stream, after `Fault.after_chunks` chunks."""

    HTTP_ERROR = "http-error"
    RESET = "reset"
    CUT = "cut"
    STALL = "stall"


@dataclass(frozen=True, slots=True)
class Fault:
    """`status` is that of an HTTP error."""

    kind: FaultKind
    after_chunks: int = 0
    status: int = 503
    message: str = "this request was to fail"


@dataclass(frozen=True, slots=True)
class Answer:
    """The first token is due `ttft_s` after the request came, each further one `gaps_s` after that before it."""

    ttft_s: float
    gaps_s: tuple[float, ...] = ()
    fault: Fault | None = None

    @property
    def due_s(self) -> list[float]:
        """When each token is due, from the request on."""
        return list(accumulate((self.ttft_s, *self.gaps_s)))


class Schedule(Protocol):
    def answer(self, number: int, num_output_tokens: int) -> Answer:
        """The answer of request `number` (from 0, in order of arrival), which asks for at most `num_output_tokens`."""
        ...


@dataclass(frozen=True, slots=True)
class Script:
    """Answers one after the other, from the beginning again at their end, whatever was asked for."""

    answers: tuple[Answer, ...]

    def answer(self, number: int, num_output_tokens: int) -> Answer:
        return self.answers[number % len(self.answers)]


@dataclass(frozen=True, slots=True)
class Steady:
    """As many tokens as were asked for, evenly."""

    ttft_s: float
    itl_s: float
    fault: Fault | None = None

    def answer(self, number: int, num_output_tokens: int) -> Answer:
        return Answer(self.ttft_s, (self.itl_s,) * (num_output_tokens - 1), self.fault)
