"""Proposers guess the next tokens of requests, so that one step can compute several of them.

A token costs a step because the next one cannot be computed before it is known. Two things may be known of it earlier:

- A grammar may leave one token only. It is *forced*: it is taken without asking the model, so it needs no row of logits
  and comes out with the token before it. That is `baton.engine.scheduler.output_ends`. As a draft it would come out a
  step later and cost a product with the whole vocabulary, so forced tokens do not pass through here.
- A proposer may have a guess, a *draft*. Drafts are computed behind the last known token, in the same step, and the
  model samples a token at each of these places. Those up to the first that differs from its draft are the output.

The protocol, whoever proposes:

1. The scheduler asks when it has planned a step, for all requests at once that decode in it and have drafts now. Drafts
   have what is left of the step's rows and of its token budget, and blocks that nobody else needs now: they preempt
   nobody and make no prompt wait. How many of them a request gets is chosen by `baton.engine.scheduler.draft_depth`.
2. A share with drafts has them behind its tokens (`ScheduledRequest.num_drafts`). The runner samples behind the last
   known token and behind each draft, each with the noise, penalties, withheld tokens and mask of its place, as if the
   drafts before it were the output. It returns a token for each of these rows. A grammar cuts a draft before the step
   where it refuses a token. Where layers have states, the runner has these go back behind wrong drafts.
3. `baton.engine.scheduler.drafts` compares. A row whose drafts were all right has seen what it would have seen alone,
   so its token is the one that plain decoding samples, whether it is the likeliest or drawn. The others are dropped.
4. The request goes on behind the last token that was taken. KV of wrong drafts lies behind its computed tokens, where
   the next step overwrites it; nothing there is published, counted as stored or handed over. Blocks for them are
   released.

So a wrong draft costs time and nothing else. Whoever cannot be verified gets no drafts, and is counted with the reason.

A step ahead of a result, and a series of steps, know nothing of the tokens before them. A request that a proposer
`follows` is therefore left out of both: its next step waits for its token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from baton.engine.scheduler.request import Request


class Wanted(NamedTuple):
    """Drafts are wanted for `request`: `max_tokens` at most. One that costs time should end where it is right with a
    chance below `least_chance`."""

    request: Request
    max_tokens: int
    least_chance: float = 0.0


class Draft(NamedTuple):
    """Guessed tokens. `confidences`: for each of them how sure the method is that it is right when those before it are,
    from 0 to 1. What that is worth is learned by `method` (`baton.engine.scheduler.acceptance`)."""

    token_ids: Sequence[int]
    confidences: Sequence[float]
    method: str

    def first(self, count: int) -> Draft:
        """Its first `count` tokens."""
        return self if count >= len(self.token_ids) else Draft(self.token_ids[:count], self.confidences, self.method)


NO_DRAFT = Draft((), (), "")


class DraftCost(NamedTuple):
    """Seconds that it takes to make a draft: to begin, and for each token."""

    begin_s: float
    token_s: float


FREE = DraftCost(0.0, 0.0)


class Proposer(Protocol):
    """Called by the scheduler, between steps: everybody waits for it.

    `method`: the usual one of its drafts. `stores_kv`: it writes KV behind the tokens of requests, which have blocks
    for it when it is asked. Both are constant. What it keeps of a request goes with `forget`."""

    @property
    def method(self) -> str:
        """Of `Draft`."""
        ...

    @property
    def stores_kv(self) -> bool:
        """Whether drafts have KV."""
        ...

    def follows(self, request: Request) -> bool:
        """Whether there may be a draft for `request` now, so that its step should wait for its tokens. Asked in each
        step: a microsecond."""
        ...

    def cost(self, request: Request) -> DraftCost:
        """What a draft for `request` costs now, as far as that is known."""
        ...

    def propose(self, wanted: Sequence[Wanted]) -> Sequence[Draft]:
        """A draft for each, which may be empty, of requests whose tokens are all known. They must not be changed."""
        ...

    def verified(self, request: Request, draft: Draft, num_accepted: int) -> None:
        """The tokens of `draft` were computed, and the first `num_accepted` were right. The tokens of `request` are
        those from before."""
        ...

    def forget(self, request: Request) -> None:
        """`request` has left."""
        ...
