"""One request inside the engine, and its share of a step.

Values that a step has once for each request are named tuples: a frozen dataclass takes four times as long to construct.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field, replace
from functools import partial
from typing import NamedTuple, Protocol

from baton.engine.cache.block_pool import BlockTable, pack_blocks
from baton.engine.cache.offload import PoolLoad
from baton.engine.scheduler.first_tokens import FirstTokens
from baton.engine.scheduler.reading import Reading, ReadSpan
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams
from baton.wire.tiers import TierTokens

PENDING_TOKEN = -1
"""In `token_ids`: a token that the step in flight is going to sample."""
MAX_FORCED = 64
"""Tokens that a request takes at once at most where its grammar forces them: each takes as long as its mask, and a
grammar may force text without an end."""
MEDIA_GONE = "there was no room to keep its KV, and its media are not here to compute it again"
"""The failure of a request that was preempted where it had got its KV from another node."""


class MaskSource(Protocol):
    """A place in a grammar, as sampling asks about it."""

    def accepts(self, token_id: int) -> bool:
        """Whether this token may be next."""
        ...

    def mask(self) -> bytes | None:
        """A bit for each token id, the lowest first: whether it may be next. None: none may."""
        ...

    def fail(self, reason: str) -> None:
        """No token can follow, for a reason that the grammar does not know."""
        ...


class GrammarPlace(MaskSource, Protocol):
    """A place in the grammar of a request, which drafts may follow."""

    def behind(self, number: int) -> GrammarPlace:
        """The place behind so many of the drafts that were asked about last."""
        ...


class Matcher(GrammarPlace, Protocol):
    """Follows the output of one request through its grammar. It is behind the last token whose value is known, and that
    is the place that is asked about. To `take` a token that it has just accepted costs nothing."""

    @property
    def is_ready(self) -> bool:
        """Whether it can be asked without waiting. A request is admitted only then."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether the output, of which a token was taken, obeys the grammar and nothing can follow."""
        ...

    @property
    def leaves_choice(self) -> bool:
        """Whether the grammar is known to allow several bytes behind the output, of which a token was taken: there is
        no forced token to be asked for."""
        ...

    @property
    def error(self) -> str:
        """Why no token can follow although the output is not complete; "" as long as nothing is wrong."""
        ...

    def goes_on_with(self, token_id: int) -> bool:
        """Whether this token is the last that it `accepts`, and leaves the output incomplete and a choice of what
        comes next: then there is nothing to do but to `take` it."""
        ...

    def take(self, token_id: int) -> None:
        """The output goes on with this token."""
        ...

    def forced_token(self) -> int | None:
        """The only token that may be next; None when there are several, or none, or when it would take a mask to
        know."""
        ...

    def fork(self, output: Sequence[int]) -> Matcher:
        """The matcher of another output in the same grammar."""
        ...

    def num_allowed(self, drafts: Sequence[int]) -> int:
        """How many of `drafts` may come next, up to the first behind which nothing can follow."""
        ...


class Awaited(Protocol):
    """What makes the beginning of a prompt come into the prefix cache, from elsewhere."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come that is worth waiting for."""
        ...


class BlockCopy(NamedTuple):
    """A copy of all that block `source` holds into block `target`."""

    source: int
    target: int


class Fork(NamedTuple):
    """Another choice of a request's prompt: it becomes a request of its own when its first token is sampled."""

    key: RequestKey
    params: DecodingParams


def choices_of(keys: Sequence[RequestKey], params: DecodingParams) -> list[Fork]:
    """The choices of one prompt: the first samples with `params`, and each with the next number of a choice. Only the
    first reports log probabilities of the prompt."""
    fork_params = replace(params, prompt_logprobs=None)
    forks = [Fork(key, replace(fork_params, choice=params.choice + number)) for number, key in enumerate(keys)]
    return [Fork(keys[0], params), *forks[1:]]


@dataclass(slots=True)
class Request:
    """Mutable state of one request; only the scheduler changes it.

    `token_ids` is the prompt and everything generated, `output_ids` first; `num_computed_tokens` of them have their KV
    in `block_table`. `first_token_only`: the request leaves after one token, and its blocks are held for a handoff.
    `num_cached_tokens` is set at the first admission: prompt tokens that were found in the prefix cache or by a
    reservation; `tiers`: those of them that came from a KV store. `most_tokens`: prompt and output together can have no
    more. `takes_largest`: what the parameters say.

    While steps are in flight, their tokens count as computed, and the last `num_pending_tokens` of `token_ids` are
    `PENDING_TOKEN`. `num_steps_in_flight` of them write into `block_table`. `has_drafts`: the newest of them has drafts
    of it, which are no tokens of the request.

    `unread_rows`: those of the prompt that `reading` asks for and no step has told yet. Its start never falls, so that
    nothing is told twice when the prompt is computed again. One that `samples` nothing leaves when it is computed.
    `forks` are there until the first token is sampled. With `is_wanted` false only they are wanted of it, and it leaves
    then. `block_copy` is to be made by its first step: the source, which it holds until then, has the KV that belongs
    into the last block of its table. `matcher` is there for parameters with a grammar.
    With a `load` it waits for KV: a store's thread writes into blocks of its table behind what is computed. Before it
    has blocks it may wait for KV that is `awaited` in the prefix cache.

    `first_due_s`, `last_due_s`: when its first and its last token have to be there for its goals to be met, see
    `baton.engine.scheduler.step_bound`; the second is None until there is a first token, and -inf when that was late.
    `turn_s`: prompts are computed in the order of it, and of arrival where it is the same.
    """

    key: RequestKey
    prompt: Prompt
    params: DecodingParams
    hash_root: bytes
    max_total_tokens: int
    output_ids: InitVar[Sequence[int]] = ()
    first_token_only: bool = False
    arrival: int = 0
    block_table: BlockTable = field(default_factory=partial(pack_blocks, ()))
    block_hashes: list[bytes] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None
    tiers: tuple[TierTokens, ...] = ()
    num_published_blocks: int = 0
    num_pending_tokens: int = 0
    num_steps_in_flight: int = 0
    has_drafts: bool = False
    reading: Reading | None = None
    forks: tuple[Fork, ...] = ()
    is_wanted: bool = True
    block_copy: BlockCopy | None = None
    matcher: Matcher | None = None
    load: PoolLoad | None = None
    awaited: Awaited | None = None
    first_due_s: float = math.inf
    last_due_s: float | None = None
    turn_s: float = 0.0
    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    most_tokens: int = field(init=False)
    takes_largest: bool = field(init=False)
    samples: bool = field(init=False)
    unread_rows: range = field(init=False)

    def __post_init__(self, output_ids: Sequence[int]) -> None:
        self.token_ids = [*self.prompt.token_ids, *output_ids]
        self.num_prompt_tokens = self.prompt.num_tokens
        self.takes_largest = self.params.takes_largest
        self.samples = self.reading is None or self.reading.with_tokens
        self.unread_rows = range(0) if self.reading is None else self.reading.rows(self.num_prompt_tokens)
        self.most_tokens = self.max_total_tokens
        if self.params.max_tokens is not None:
            self.most_tokens = min(self.num_prompt_tokens + self.params.max_tokens, self.max_total_tokens)

    @property
    def is_ready(self) -> bool:
        """Whether it can be admitted as soon as there is room: its grammar, if it has one, is compiled, and it does not
        wait for KV."""
        if self.awaited is not None and not self.awaited.is_over:
            return False
        return (self.matcher is None or self.matcher.is_ready) and (self.load is None or self.load.is_over)

    @property
    def failure(self) -> str:
        """Why no token of it could be sampled, as far as its grammar knows."""
        return "" if self.matcher is None else self.matcher.error

    @property
    def lacks_payload(self) -> bool:
        """Whether a medium is to be computed whose payload is not here."""
        return any(not medium.payload and medium.stop > self.num_computed_tokens for medium in self.prompt.media)

    @property
    def held_blocks(self) -> BlockTable:
        """All blocks that it owns: those of its table, and the source of its copy."""
        return self.block_table if self.block_copy is None else pack_blocks((self.block_copy.source, *self.block_table))

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose KV is still missing; 1 for a request in the middle of decoding."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def has_jumped(self) -> bool:
        """Whether all that is to be computed are tokens of its output that it may have taken at once. It is served
        before prompts, and may lack blocks."""
        return self.num_computed_tokens >= self.num_prompt_tokens and self.num_uncomputed_tokens <= 1 + MAX_FORCED

    @property
    def num_reusable_tokens(self) -> int:
        """The tokens at the beginning whose KV may come from elsewhere, because nothing is read from their rows."""
        last = len(self.token_ids) - 1
        return min(self.unread_rows.start, last) if self.unread_rows else last

    @property
    def num_known_tokens(self) -> int:
        """Tokens whose values are known."""
        return len(self.token_ids) - self.num_pending_tokens

    @property
    def awaits_last_token(self) -> bool:
        """Whether the token that a step in flight samples for it is its last, whichever token that is."""
        if not self.num_pending_tokens:
            return False
        return self.first_token_only or not self.is_wanted or len(self.token_ids) >= self.most_tokens

    def share(self, count: int) -> ScheduledRequest:
        """Its share of a step that computes its next `count` tokens."""
        # no keywords: with them it would take twice as long
        return ScheduledRequest(
            self.key,
            self.num_computed_tokens,
            count,
            self.token_ids,
            self.prompt,
            self.block_table,
            self.params,
            count == len(self.token_ids) - self.num_computed_tokens and self.samples,
            self.arrival,
            self.forks,
            None if self.num_steps_in_flight else self.block_copy,
            self.matcher,
            self.takes_largest,
            self.hash_root,
        )

    def span(self, share: ScheduledRequest) -> ReadSpan | None:
        """The rows of `share`, its own, that nothing has read yet."""
        first = max(share.start, self.unread_rows.start)
        num_rows = min(share.context_len, self.unread_rows.stop) - first
        if self.reading is None or num_rows <= 0:
            return None
        return ReadSpan(self.key, self.reading, first, num_rows)

    def forked(self, fork: Fork, num_shared_tokens: int, token_id: int) -> Request:
        """The request that its `fork` becomes, with a token of its own behind those that both have; the prompt is not
        counted as cached a second time."""
        shared_ids = self.token_ids[self.num_prompt_tokens : num_shared_tokens]
        matcher = None if self.matcher is None else self.matcher.fork(shared_ids)
        return Request(
            key=fork.key,
            prompt=self.prompt,
            params=fork.params,
            hash_root=self.hash_root,
            max_total_tokens=self.max_total_tokens,
            output_ids=(*shared_ids, token_id),
            num_cached_tokens=0,
            matcher=matcher,
        )


class ScheduledRequest(NamedTuple):
    """One request's share of a step. Written by the scheduler, read by the runner while it launches the step.

    Tokens start .. start + num_tokens - 1 of `token_ids` are computed and stored in the slots of `block_table`. Both
    lists are the request's own: they must not be changed, and they grow once the step was launched.
    `needs_sample`: this reaches the last token there is, so that the next one can be sampled. `arrival`: which of the
    requests that ever had this key. With `needs_sample`, a token of each of `forks` is sampled after the same tokens.
    `block_copy` is made before anything is computed. `matcher` knows which tokens may be sampled, None: all.
    `takes_largest`: that of `params`, so that it is not found out in every step; where it is false they say.
    `hash_root`: that of the request, so that nothing that is kept of a medium is found by another client.

    The last `num_drafts` tokens are guesses (see `baton.engine.scheduler.proposer`), in a list that is the share's own.
    A token is sampled behind the last one before them and behind each of them, as if all before it were known.
    """

    key: RequestKey
    start: int
    num_tokens: int
    token_ids: Sequence[int]
    prompt: Prompt
    block_table: Sequence[int]
    params: DecodingParams
    needs_sample: bool
    arrival: int = 0
    forks: tuple[Fork, ...] = ()
    block_copy: BlockCopy | None = None
    matcher: GrammarPlace | None = None
    takes_largest: bool = False
    hash_root: bytes = b""
    num_drafts: int = 0

    @property
    def computes_media(self) -> bool:
        """Whether there are tokens of media among those that are computed."""
        return any(medium.start < self.context_len and self.start < medium.stop for medium in self.prompt.media)

    @property
    def context_len(self) -> int:
        """Tokens that the last one of the share attends to, itself included."""
        return self.start + self.num_tokens

    def with_drafts(self, drafts: Sequence[int]) -> ScheduledRequest:
        """The same, with drafts behind the last token, whose value is known."""
        num_tokens, token_ids = self.num_tokens + len(drafts), [*self.token_ids, *drafts]
        return self._replace(num_tokens=num_tokens, token_ids=token_ids, num_drafts=len(drafts))

    def rows(self) -> list[ScheduledRequest]:
        """What is sampled of it: the share itself, and with drafts one after each of them and one before them, which
        know no more tokens than their place. In a grammar, this place is all that they know of it."""
        if not self.num_drafts:
            return [self]
        first = len(self.token_ids) - self.num_drafts
        rows, matcher = [self._replace(token_ids=FirstTokens(self.token_ids, first))], self.matcher
        for number in range(1, self.num_drafts + 1):
            place = None if matcher is None else matcher.behind(number)
            rows.append(self._replace(token_ids=FirstTokens(self.token_ids, first + number), matcher=place))
        return rows
