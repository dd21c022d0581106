"""Proposers guess the next tokens of a request, so that one step can compute several of them.

A token costs a step because the next one cannot be computed before it is known. Two things may be known of it earlier:

- A grammar may leave one token only. It is *forced*: it is taken without asking the model, so it needs no row of logits
  and comes out with the token before it. That is `baton.engine.scheduler.output_ends`. As a draft it would come out a
  step later and cost a product with the whole vocabulary, so forced tokens do not pass through here.
- A proposer may have a guess, a *draft*. Drafts are computed behind the last known token, in the same step, and the
  model samples a token at each of these places. Those up to the first that differs from its draft are the output.

The protocol, whoever proposes:

1. The scheduler asks when it has planned a step, for requests that decode in it. Drafts have what is left of the step's
   rows and of its token budget, and blocks that nobody else needs now: they preempt nobody and make no prompt wait.
2. A share with drafts has them behind its tokens (`ScheduledRequest.num_drafts`). The runner samples behind the last
   known token and behind each draft, each with the noise, penalties and withheld tokens of its place, as if the drafts
   before it were the output. It knows nothing else of drafts, and returns a token for each of these rows.
3. `baton.engine.scheduler.drafts` compares. A row whose drafts were all right has seen what it would have seen alone,
   so its token is the one that plain decoding samples, whether it is the likeliest or drawn. The others are dropped.
4. The request goes on behind the last token that was taken. KV of wrong drafts lies behind its computed tokens, where
   the next step overwrites it; nothing there is published, counted as stored or handed over. Blocks for them are
   released.

So a wrong draft costs time and nothing else. Whoever cannot be verified gets no drafts: requests with a grammar, whose
matcher cannot be asked about a place before it is there; those of which one token is wanted; and models with states,
which cannot go back.

A step ahead of a result, and a series of steps, know nothing of the tokens before them. A request that a proposer
`follows` is therefore left out of both: its next step waits for its token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from baton.engine.scheduler.request import Request


class Proposer(Protocol):
    """Called by the scheduler, between steps: everybody waits for it, so each call takes microseconds and has a
    bound."""

    def follows(self, request: Request) -> bool:
        """Whether there may be drafts for `request` soon, so that its steps should wait for its tokens. Asked in each
        step."""
        ...

    def propose(self, request: Request, max_tokens: int) -> Sequence[int]:
        """Tokens that may come behind those of `request`, all of which are known: `max_tokens` at most, or none. The
        request must not be changed."""
        ...

    def verified(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Of `num_drafts` drafts that were computed the first `num_accepted` were right. The tokens of `request` are
        those from before."""
        ...
