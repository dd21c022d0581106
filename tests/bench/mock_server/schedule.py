"""When the mock server answers what, and how it fails: a plan that is data.

Owns answers, faults and the rules that give request n its answer. Knows no HTTP and no clock.
Invariant: an answer depends on the schedule, the request's number and how many tokens it asks for, on nothing else.
"""

from __future__ import annotations

import enum
import math
import random
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol


class FaultKind(enum.StrEnum):
    """What a request may meet. `BREAKS` are those that break a stream, after `Fault.after_chunks` chunks."""

    HTTP_ERROR = "http-error"
    NOT_EVENTS = "not-events"
    NO_CHOICES = "no-choices"
    WRONG_COMPLETION_USAGE = "wrong-completion-usage"
    WRONG_PROMPT_USAGE = "wrong-prompt-usage"
    NO_USAGE = "no-usage"
    RESET = "reset"
    CUT = "cut"
    STALL = "stall"
    NO_DONE = "no-done"
    ERROR_EVENT = "error-event"
    BAD_JSON = "bad-json"


BREAKS = frozenset(
    (FaultKind.RESET, FaultKind.CUT, FaultKind.STALL, FaultKind.NO_DONE, FaultKind.ERROR_EVENT, FaultKind.BAD_JSON)
)


@dataclass(frozen=True, slots=True)
class Fault:
    """`status` is that of an HTTP error."""

    kind: FaultKind
    after_chunks: int = 0
    status: int = 503
    message: str = "this request was to fail"


@dataclass(frozen=True, slots=True)
class Answer:
    """The first chunk is due `ttft_s` after the request came, each further one `gaps_s` after that before it.

    A gap of 0 puts a chunk into the same write as the one before. Chunk i carries `tokens_per_chunk[i]` tokens, token t
    the text `texts[t]`; both begin again at their end.
    """

    ttft_s: float
    gaps_s: tuple[float, ...] = ()
    tokens_per_chunk: tuple[int, ...] = (1,)
    texts: tuple[str, ...] = (" word",)
    fault: Fault | None = None

    @property
    def num_chunks(self) -> int:
        return 1 + len(self.gaps_s)

    def num_tokens(self, num_chunks: int) -> int:
        """How many tokens the first `num_chunks` chunks carry."""
        rounds, rest = divmod(num_chunks, len(self.tokens_per_chunk))
        return rounds * sum(self.tokens_per_chunk) + sum(self.tokens_per_chunk[:rest])

    def text(self, begin: int, end: int) -> str:
        """The text of tokens `begin` to `end`."""
        return "".join(self.texts[place % len(self.texts)] for place in range(begin, end))

    def writes(self) -> list[tuple[float, int]]:
        """(seconds after the request came, chunks written by then), one entry per write."""
        due_s = accumulate((self.ttft_s, *self.gaps_s))
        is_last = [gap_s > 0 for gap_s in self.gaps_s] + [True]
        return [(at_s, place + 1) for place, at_s in enumerate(due_s) if is_last[place]]


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
    """As many tokens as were asked for, evenly; each time is random within `jitter` (a share) around its value.

    `fault` befalls a share of the requests.
    """

    ttft_s: float
    itl_s: float
    jitter: float = 0.0
    tokens_per_chunk: int = 1
    text: str = " word"
    fault: Fault | None = None
    fault_share: float = 0.0
    seed: int = 0

    def answer(self, number: int, num_output_tokens: int) -> Answer:
        chance = random.Random(f"{self.seed}/{number}")
        has_fault = self.fault is not None and chance.random() < self.fault_share
        num_more = max(1, math.ceil(num_output_tokens / self.tokens_per_chunk)) - 1
        bases_s = [self.ttft_s] + [self.itl_s * self.tokens_per_chunk] * num_more
        ttft_s, *gaps_s = (base_s * (1 + self.jitter * chance.uniform(-1, 1)) for base_s in bases_s)
        last = num_output_tokens - num_more * self.tokens_per_chunk
        tokens_per_chunk = (self.tokens_per_chunk,) * num_more + (last,)
        return Answer(ttft_s, tuple(gaps_s), tokens_per_chunk, (self.text,), self.fault if has_fault else None)
