"""One answer while it is generated: a relay request for each of its choices, their tokens turned into text.

Owns the start, the order and the end of an answer's choices. The code that writes the answer takes all pieces that are
ready; this module does not know in which format they are written.

Choices of one prompt start together, so that the prompt is computed and moved once. An answer that is resumed begins
with the deliveries that it has had; its choices that have not ended start each by itself, because each continues after
other tokens.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, TypeAlias

from baton.engine.text.choice_text import ChoiceText, TextDelta, TextOptions
from baton.engine.text.tokenizer import Tokenizer
from baton.router.health.metrics import ModelMetrics, RequestTimer
from baton.router.http.admission.admission import Admission, Demand, Permit
from baton.router.http.openai.usage import Usage
from baton.router.http.resume.records import Past, ToldFigures
from baton.router.requests.attempt import RelayRequest
from baton.router.requests.figures import DraftedTokens, FlightFigures
from baton.router.requests.flight import Flight
from baton.router.requests.inbox import Inbox
from baton.router.requests.output import Delivery, ScoredPrompt
from baton.router.requests.relay import Relay
from baton.wire.messages.output import FINISH_LENGTH, TokenLogprobs

_MAX_PAST = 64
_Record: TypeAlias = "Sequence[tuple[int, Delivery]] | ToldFigures"
"""What is written down of a stream that can be resumed."""


class OutputText(Protocol):
    """Turns the tokens of a choice into text; see `ChoiceText`."""

    stop_string: str | None
    """The stop string that ended the choice."""

    @property
    def num_completion_tokens(self) -> int:
        """Tokens generated for this choice."""
        ...

    def push(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = (), node_finish_reason: str = ""
    ) -> TextDelta:
        """The text that the next tokens add."""
        ...


class NoText:
    """The text of a choice that generates nothing. Nodes sample one token at least, which is dropped here."""

    num_completion_tokens = 0
    stop_string: str | None = None

    def push(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = (), node_finish_reason: str = ""
    ) -> TextDelta:
        """No text: the first token ends the choice."""
        return TextDelta("", (), FINISH_LENGTH)


@dataclass(slots=True)
class Choice:
    """One of the answers to one prompt. `figures` are there when it has ended. `echo`: the text of the prompt, where
    the answer begins with it. `past_ids`: its tokens of before the answer was resumed; it may have
    ended with them. `past_figures`: what its client was told then. `ended_at` is in seconds since 1970."""

    index: int
    request: RelayRequest
    text: OutputText
    echo: str = ""
    flight: Flight | None = None
    figures: FlightFigures | None = None
    past_ids: list[int] = field(default_factory=list)
    had_ended: bool = False
    past_figures: ToldFigures | None = None
    ended_at: int = 0
    drafted: DraftedTokens = field(default_factory=DraftedTokens)

    def push(self, delivery: Delivery) -> TextDelta:
        """The text that the next tokens add."""
        if delivery.draft is not None:
            self.drafted.add(delivery.draft, len(delivery.token_ids))
        return self.text.push(delivery.token_ids, delivery.logprobs, delivery.finish_reason)

    @property
    def told_figures(self) -> ToldFigures | None:
        """The figures that its client is told: those of before the answer was resumed, where there were some."""
        flight, past = self.figures, self.past_figures
        if flight is None and self.flight is not None:
            flight = self.flight.figures
        if flight is None:
            return past
        now = ToldFigures(
            self.index,
            flight.num_cached_tokens,
            dict(flight.cached_by_role),
            flight.handoff,
            self.ended_at,
            dict(flight.cached_by_place),
        )
        if past is None:
            return now
        roles = now.cached_by_role | past.cached_by_role
        return replace(past, cached_by_role=roles, handoff=past.handoff or now.handoff, ended_at=now.ended_at)


class Piece(NamedTuple):
    """The next text of a choice. `num_tokens`: tokens of the choice so far, those of this piece included."""

    choice: Choice
    delta: TextDelta
    num_tokens: int


class Answer:
    """All choices of one request, in order of their index. Context manager: leaving it cancels what still runs."""

    def __init__(
        self,
        prompts: Sequence[Sequence[Choice]],
        relay: Relay,
        metrics: ModelMetrics,
        admission: Admission,
        demand: Demand,
    ) -> None:
        """`prompts`: the choices of each prompt. Nothing is asked of admission and relay before the first `take`."""
        self.choices = tuple(choice for choices in prompts for choice in choices)
        self._firsts = tuple(choices[0] for choices in prompts)
        self._relay = relay
        self._metrics = metrics
        self._admission = admission
        self._demand = demand
        self._permit: Permit | None = None
        self._inbox = Inbox()
        self._timers: dict[int, RequestTimer] = {}
        # the next `take` handles both lists: what the last one returned is to be written first
        self._to_start = list(prompts)
        self._to_close: list[Flight] = []
        self._num_ended = 0
        self._past: list[tuple[int, Delivery]] = []
        self._is_resumed = False
        self._write_down: Callable[[_Record], None] | None = None
        self._with_figures: set[int] = set()
        self.is_scored = any(first.request.params.prompt_logprobs is not None for first in self._firsts)
        self._early: list[tuple[int, Delivery]] = []

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *_: object) -> None:
        for choice in self.choices:
            if choice.flight is not None:
                self._relay.close(choice.flight)
        if self._permit is not None:
            num_past_tokens = sum(len(choice.past_ids) for choice in self.choices)
            self._permit.close(self.num_prompt_tokens, max(0, self.num_completion_tokens - num_past_tokens))

    @property
    def has_ended(self) -> bool:
        """Whether every choice has its finish reason."""
        return self._num_ended == len(self.choices)

    @property
    def prompts(self) -> Sequence[Sequence[int]]:
        """The tokens of each prompt."""
        return [first.request.prompt.token_ids for first in self._firsts]

    @property
    def seed(self) -> int:
        """What all its noise is made of."""
        return self.choices[0].request.params.seed or 0

    def go_on_after(self, past: Past) -> None:
        """Begin with what came before the answer was resumed. To be called before `take`."""
        self._is_resumed = True
        self._past = list(past.deliveries)
        for index, figures in past.figures.items():
            self.choices[index].past_figures = figures

    def write_down(self, write: Callable[[_Record], None]) -> None:
        """Call `write` with all deliveries that come, before `take` returns anything of them, and with the figures of a
        choice when it begins and when it has ended."""
        self._write_down = write

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompts, each counted once."""
        return sum(choice.request.prompt.num_tokens for choice in self._firsts)

    @property
    def num_completion_tokens(self) -> int:
        """Tokens generated so far, over all choices."""
        return sum(choice.text.num_completion_tokens for choice in self.choices)

    async def take(self) -> list[Piece]:
        """Return what has come since the last call: at least one piece, or none when all choices have ended.

        The first call waits until the answer is admitted. Raises what the relay hands its readers, and what
        `Admission.admit` raises.
        """
        pieces = await self._take_past() if self._past else []
        if pieces or self.has_ended:
            return pieces
        if self._permit is None:
            self._permit = await self._admission.admit(self._demand)
            self._metrics.admission_wait.observe(self._permit.waited_s)
        self._close_ended()
        while not pieces and not self.has_ended:
            self._start_waiting()
            came = await self._deliveries()
            if self._write_down is not None:
                self._write_down(came)
            for index, delivery in came:
                choice = self.choices[index]
                if choice.figures is None:
                    delta = self._advance(choice, delivery)
                    if not delta.is_empty:
                        pieces.append(Piece(choice, delta, choice.text.num_completion_tokens))
            if self._write_down is not None:
                self._write_figures(self._write_down, dict.fromkeys(index for index, _ in came))
        return pieces

    def _write_figures(self, write: Callable[[_Record], None], indices: Iterable[int]) -> None:
        for index in indices:
            choice = self.choices[index]
            if index not in self._with_figures or choice.figures is not None:
                self._with_figures.add(index)
                if (figures := choice.told_figures) is not None:
                    write(figures)

    async def _take_past(self) -> list[Piece]:
        """The next pieces of before the answer was resumed, none when there are no more."""
        pieces: list[Piece] = []
        while self._past and not pieces:
            await asyncio.sleep(0)
            taken, self._past = self._past[:_MAX_PAST], self._past[_MAX_PAST:]
            for index, delivery in taken:
                choice = self.choices[index]
                if choice.had_ended:
                    continue  # its node went on for a moment behind a stop string: nothing of that was ever told
                choice.past_ids += delivery.token_ids
                delta = choice.push(delivery)
                self._num_ended += delta.finish_reason is not None
                if not delta.is_empty:
                    pieces.append(Piece(choice, delta, choice.text.num_completion_tokens))
                choice.had_ended |= delta.finish_reason is not None
        return pieces

    async def _deliveries(self) -> list[tuple[int, Delivery]]:
        """What has come, but for tokens of choices whose prompt is not told whole yet: it is told for the first choice
        of a prompt, and its siblings may be ahead."""
        came = await self._inbox.take()
        if not self.is_scored:
            return came
        came, self._early = [*self._early, *came], []
        known: list[tuple[int, Delivery]] = []
        for index, delivery in came:
            scored = self.scored_prompt(self.choices[index])
            (known if scored is None or scored.is_whole else self._early).append((index, delivery))
        return known

    def scored_prompt(self, choice: Choice) -> ScoredPrompt | None:
        """The log probabilities of the prompt of `choice`, of which there has been a piece; None when not asked for.
        Nodes tell them for the first choice of a prompt only."""
        first = self._firsts[choice.index * len(self._firsts) // len(self.choices)]
        return None if first.flight is None else first.flight.scored_prompt

    def usage(self) -> Usage:
        """Tokens of an answer that has ended: each prompt counted once."""
        figures = [told for choice in self.choices if (told := choice.told_figures) is not None]
        firsts = [told for first in self._firsts if (told := first.told_figures) is not None]
        cached_by_role, cached_by_place, drafted = Counter[str](), Counter[str](), DraftedTokens()
        for first in firsts:
            cached_by_role.update(first.cached_by_role)
            cached_by_place.update(first.cached_by_place)
        for choice in self.choices:
            drafted.add_all(choice.drafted)
        return Usage(
            num_prompt_tokens=self.num_prompt_tokens,
            num_completion_tokens=self.num_completion_tokens,
            num_cached_tokens=sum(first.num_cached_tokens for first in firsts),
            handoffs=[each.handoff for each in figures if each.handoff is not None],
            cached_by_role=cached_by_role,
            cached_by_place=cached_by_place,
            ended_at=max((each.ended_at for each in figures), default=0),
            drafted=drafted,
            is_predicted=any(first.request.params.prediction_ids for first in self._firsts),
        )

    def _advance(self, choice: Choice, delivery: Delivery) -> TextDelta:
        self._timers[choice.index].tokens(len(delivery.token_ids))
        delta = choice.push(delivery)
        if delta.finish_reason is not None:
            self._end(choice, delta.finish_reason)
        return delta

    def _end(self, choice: Choice, finish_reason: str) -> None:
        if choice.flight is not None:
            choice.figures, choice.ended_at = choice.flight.figures, int(time.time())
            choice.flight.trace.finished(finish_reason, choice.text.num_completion_tokens)
            self._timers[choice.index].finished(finish_reason, choice.figures, choice.text.num_completion_tokens)
            self._to_close.append(choice.flight)
        self._num_ended += 1

    def _close_ended(self) -> None:
        # the node may still generate tokens for the choice: stop strings are found here, not there
        for flight in self._to_close:
            self._relay.close(flight)
        self._to_close.clear()

    def _start_waiting(self) -> None:
        for choices in self._to_start:
            if self._is_resumed:
                self._go_on([choice for choice in choices if not choice.had_ended])
                continue
            requests = [choice.request for choice in choices]
            flights = self._relay.start_choices(requests, self._inbox, choices[0].index)
            num_prompt_tokens = choices[0].request.prompt.num_tokens
            for choice, flight in zip(choices, flights, strict=True):
                attainment, goals = self._relay.attainments.get(choice.request.model), choice.request.goals
                self._timers[choice.index] = RequestTimer(self._metrics, num_prompt_tokens, attainment, goals)
                choice.flight = flight
                num_prompt_tokens = 0  # the prompt is counted once
        self._to_start.clear()

    def _go_on(self, choices: Sequence[Choice]) -> None:
        for choice in choices:
            request = replace(choice.request, emitted_ids=tuple(choice.past_ids))
            self._timers[choice.index] = RequestTimer(self._metrics, request.prompt.num_tokens)
            choice.flight = self._relay.start(request, self._inbox, choice.index)


def make_choices(
    requests: Sequence[RelayRequest],
    num_choices: int,
    options: TextOptions,
    tokenizer: Tokenizer,
    echoes: Sequence[str] = (),
    *,
    generates: bool = True,
) -> list[list[Choice]]:
    """The choices of each request, which has one prompt. Choice c of request r has index r * num_choices + c.

    Requests without a seed get a random one here, so that every attempt samples with the same noise. `echoes`: the
    texts of the prompts, where they are echoed. Without `generates` the choices have no tokens.
    """
    random_seed = secrets.randbits(62)
    found: list[list[Choice]] = []
    for number, (request, echo) in enumerate(zip(requests, echoes or [""] * len(requests), strict=True)):
        seed = random_seed if request.params.seed is None else request.params.seed
        first = replace(request, params=replace(request.params, seed=seed))
        sibling = replace(first.params, prompt_logprobs=None)
        choices = [
            Choice(
                index=number * num_choices + position,
                request=replace(first, params=replace(sibling, choice=position)) if position else first,
                text=ChoiceText(tokenizer, options, request.prompt.token_ids, len(echo)) if generates else NoText(),
                echo=echo,
            )
            for position in range(num_choices)
        ]
        found.append(choices)
    return found
