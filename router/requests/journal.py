"""The journal of one request: what the client has been sent, and what another attempt would need to continue it.

Owns the order of tokens. Invariants: each output index is delivered once, in order, whatever attempt it came from; a
token of an attempt that is not the current one changes nothing, nor does one that comes after the end. Where log
probabilities of the prompt are wanted, no token is delivered before they are whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from baton.router.requests.scored_prompt import ScoredPrompt
from baton.router.requests.timings import RelayTimes
from baton.wire.messages import HandoffFigures, PromptRead, TokenEvent, TokenLogprobs

_MAX_EARLY_EVENTS = 64


class Delivery(NamedTuple):
    """Tokens that can be sent to the client now, with one entry of logprobs each or none, and the finish reason or "".

    It is a tuple because there is one for each token, and a dataclass takes three times as long to construct.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: str


@dataclass(slots=True)
class Journal:
    """Everything emitted so far, the number of the current attempt, and the measurements of the request.

    `prompt`: its log probabilities as far as they are known, None when nobody wants them.
    """

    attempt: int = 1
    prompt: ScoredPrompt | None = None
    token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int | None = None
    handoff: HandoffFigures | None = None
    times: RelayTimes = field(default_factory=RelayTimes)
    has_finished: bool = False
    _early: dict[int, TokenEvent] = field(default_factory=dict)
    _last_attempt: int = 1

    @property
    def awaits_prompt(self) -> bool:
        """Whether log probabilities of the prompt have yet to come, for which all tokens wait."""
        return self.prompt is not None and not self.prompt.is_whole

    @property
    def has_gap(self) -> bool:
        """Whether tokens have come whose predecessors have not."""
        return bool(self._early) and not self.awaits_prompt

    @property
    def can_move(self) -> bool:
        """Whether another node could go on with what is known."""
        return bool(self.token_ids) and not self.has_finished and not self.awaits_prompt

    def next_attempt(self) -> int:
        """Begin the next attempt: whatever the current one may still send is ignored from now on."""
        self.begin_attempt(self.reserve_attempt())
        return self.attempt

    def reserve_attempt(self) -> int:
        """A number for an attempt that may begin later; no other attempt gets it."""
        self._last_attempt = max(self._last_attempt, self.attempt) + 1
        return self._last_attempt

    def begin_attempt(self, number: int) -> None:
        """As `next_attempt`, with a number that was reserved."""
        self.attempt = number
        self._early.clear()
        if self.prompt is not None:
            self.prompt.begin_again()

    def record_prompt(self, read: PromptRead) -> list[Delivery]:
        """Record log probabilities of the prompt; returns the tokens that can be delivered now, in order. Raises
        `ValueError` when some before them were lost."""
        if read.attempt != self.attempt or self.prompt is None or self.prompt.is_whole:
            return []
        self.prompt.add(read)
        return self._take_early() if self.prompt.is_whole else []

    def record(self, event: TokenEvent) -> list[Delivery]:
        """Record an event; returns what can be delivered now, in order. Raises `ValueError` for a gap that cannot
        close."""
        if event.attempt != self.attempt or self.has_finished:
            return []
        self._note_figures(event)
        if event.index > len(self.token_ids) or (self.prompt is not None and not self.prompt.is_whole):
            self._store_early(event)
            return []
        deliveries = [self._append(event)]
        if self._early:
            deliveries += self._take_early()
        return [delivery for delivery in deliveries if delivery.token_ids]

    def _take_early(self) -> list[Delivery]:
        deliveries = []
        while self._early and not self.has_finished and (first := min(self._early)) <= len(self.token_ids):
            deliveries.append(self._append(self._early.pop(first)))
        if self.has_finished:
            self._early.clear()  # tokens after the end are not a gap
        return [delivery for delivery in deliveries if delivery.token_ids]

    def _note_figures(self, event: TokenEvent) -> None:
        if self.num_cached_tokens is None:
            self.num_cached_tokens = event.num_cached_tokens
        if event.handoff is not None:
            self.handoff = event.handoff
        if event.times is not None:
            self.times.sampled(event.index, event.times)

    def _store_early(self, event: TokenEvent) -> None:
        if len(self._early) >= _MAX_EARLY_EVENTS:
            raise ValueError(f"output {len(self.token_ids)} never came, {event.index} did")
        known = self._early.get(event.index)
        if known is None or len(known.token_ids) < len(event.token_ids):
            self._early[event.index] = event

    def _append(self, event: TokenEvent) -> Delivery:
        num_known = len(self.token_ids) - event.index
        new_ids = event.token_ids[num_known:]
        if not new_ids:
            return Delivery((), (), "")
        self.token_ids += new_ids
        self.has_finished = bool(event.finish_reason)
        return Delivery(new_ids, event.logprobs[num_known:], event.finish_reason)
