"""The output of one request: its tokens in order, whatever attempt they came from, and what nodes tell beside them.

Owns the order of tokens, the number of the current attempt, and what the next one needs to continue. Invariants: each
output index is delivered once, in order; a token of an attempt that is not the current one changes nothing, nor does
one that comes after the end. Where log probabilities of the prompt are wanted, they are delivered once and whole, and
no token is before they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from baton.router.requests.timings import RelayTimes
from baton.wire.drafts import VerifiedDraft
from baton.wire.messages.membership import DECODE, PREFILL
from baton.wire.messages.output import HandoffFigures, PromptRead, TokenEvent, TokenLogprobs
from baton.wire.prompt_logprobs import PromptTokenLogprobs, num_top_of, read_rows

PEER = "peer"
"""The place of tokens that were copied from another node, see `baton.router.requests.prefix_pull`."""
_MAX_EARLY_EVENTS = 64


class Delivery(NamedTuple):
    """Tokens that can be sent to the client now, with one entry of logprobs each or none, and the finish reason or "".
    `draft`: that by which they were found, if there was one.

    It is a tuple because there is one for each token, and a dataclass takes three times as long to construct.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: str
    draft: VerifiedDraft | None = None


@dataclass(slots=True)
class ScoredPrompt:
    """The log probabilities of a prompt of `num_tokens`, as its node tells them. The first token has none, so a prompt
    of one token is whole at once. They stay bytes until an answer is written (see `baton.wire.prompt_logprobs`)."""

    num_tokens: int
    num_top: int = 0
    _num_known: int = 1
    _pieces: list[tuple[bytes, int]] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing."""
        return self._num_known >= self.num_tokens

    def add(self, read: PromptRead) -> None:
        """The next piece. Raises `ValueError` when it is another one, or of another kind."""
        first = read.first_row + 1
        if first != self._num_known or self._num_known + read.num_rows > self.num_tokens:
            raise ValueError(f"log probabilities of prompt token {self._num_known} never came, {first} did")
        num_top = num_top_of(read.values, read.num_rows)
        if self._pieces and num_top != self.num_top:
            raise ValueError("log probabilities of a prompt changed their kind")
        self.num_top = num_top
        self._num_known += read.num_rows
        self._pieces.append((read.values, read.num_rows))

    def begin_again(self) -> None:
        """Another attempt begins, which tells everything anew unless nothing is missing."""
        if not self.is_whole:
            self._num_known = 1
            self._pieces.clear()

    def rows(self) -> Iterator[PromptTokenLogprobs]:
        """What is known, of the second token and those after it."""
        for values, num_rows in self._pieces:
            yield from read_rows(values, num_rows)


@dataclass(slots=True)
class Output:
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
        return Delivery(new_ids, event.logprobs[num_known:], event.finish_reason, event.draft)


class CachedTokens:
    """How many tokens of the prompt its nodes found in their prefix caches; `by_role` has an entry for each role that
    has reported. `awaits_more` is False once no further report counts.

    A prefill node reports its own number with token 1, which the decode node repeats with that number; the decode node
    reports its own from token 2 on: the part of the prompt whose KV did not have to be sent. Only a request's first
    attempt counts, because a later one finds what the first left behind. Places count as of the first report of all.
    """

    def __init__(self) -> None:
        self.by_role: dict[str, int] = {}
        self.awaits_more = False
        self._is_first_attempt = False
        self._is_split = False
        self._pool = ""
        self._tiers: list[tuple[str, int]] = []
        self._pulled = range(0)

    def begin(self, attempt: int, *, is_split: bool) -> None:
        """An attempt begins. `is_split`: a prefill node computes its prompt."""
        self._is_first_attempt = attempt == 1
        self.awaits_more = self._is_first_attempt or not self._pool
        self._is_split = is_split

    def by_place(self, num_cached_tokens: int) -> dict[str, int]:
        """Where so many cached tokens came from: the prefix cache of the role that computed the rest, `PEER`, or a tier
        of a KV store by its name. Places that gave none are left out."""
        found, num_left = Counter[str](), num_cached_tokens
        for place, num_tokens in self._tiers:
            found[place] += min(num_left, num_tokens)
            num_left -= min(num_left, num_tokens)
        num_pulled = len(range(self._pulled.start, min(num_left, self._pulled.stop)))
        found[PEER] += num_pulled
        found[self._pool] += num_left - num_pulled
        return {place: count for place, count in reversed(found.items()) if count}

    def note(self, event: TokenEvent, *, is_of_decode: bool, pulled: range = range(0)) -> None:
        """Take an event of the attempt that began last. `pulled`: the tokens of the prompt that were to be copied to
        the node that computes it. Of those that it has cached, these have come."""
        if not self._pool:
            self._pool = PREFILL if self._is_split else DECODE
            self._tiers = [(each.tier, each.num_tokens) for each in reversed(event.tiers or ())]
            self._pulled = pulled
        if not self._is_first_attempt:
            self.awaits_more = False
        elif self._is_split and event.index == 0:
            self.by_role[PREFILL] = event.num_cached_tokens
        elif is_of_decode:
            self.by_role[DECODE] = event.num_cached_tokens
            self.awaits_more = False
