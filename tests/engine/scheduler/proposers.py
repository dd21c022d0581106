"""Proposers of tests: one that knows what follows, some that lie."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from baton.engine.scheduler.proposer import FREE, Draft, DraftCost, Wanted
from baton.engine.scheduler.request import PENDING_TOKEN, Request

Following: TypeAlias = Callable[[Request, int], Sequence[int]]
"""The next tokens of a request, as many as wanted, as decoding without drafts samples them."""


@dataclass
class Guessing:
    """Each draft is the token that follows, with the probability `share_right`, as long as all before it were; else it
    is some other number, of no token perhaps. There may be more than asked for. `follows_some`: not every request is
    followed all the time."""

    following: Following
    share_right: float
    chance: random.Random = field(default_factory=lambda: random.Random(0))
    follows_some: bool = False
    most: int = 9
    num_drafts: int = 0
    num_accepted: int = 0
    method: str = "guess"
    stores_kv: bool = False

    def follows(self, request: Request) -> bool:
        return not self.follows_some or self.chance.random() < 0.7

    def cost(self, request: Request) -> DraftCost:
        return FREE

    def forget(self, request: Request) -> None:
        pass

    def propose(self, wanted: Sequence[Wanted]) -> list[Draft]:
        found = [self._guesses(each.request, each.max_tokens) for each in wanted]
        return [Draft(guesses, [0.5] * len(guesses), self.method) for guesses in found]

    def _guesses(self, request: Request, max_tokens: int) -> Sequence[int]:
        assert max_tokens > 0
        assert PENDING_TOKEN not in request.token_ids
        drafts = list(self.following(request, self.chance.randrange(min(self.most, max_tokens) + 2)))
        for place in range(len(drafts)):
            if self.chance.random() >= self.share_right:
                drafts[place] = self.chance.choice((drafts[place] + 1, drafts[place] - 1, -1, 2**40))
        return drafts

    def verified(self, request: Request, draft: Draft, num_accepted: int) -> None:
        num_drafts = len(draft.token_ids)
        assert 0 <= num_accepted <= num_drafts > 0
        self.num_drafts += num_drafts
        self.num_accepted += num_accepted


def oracle(following: Following, most: int = 9) -> Guessing:
    """Knows what follows."""
    return Guessing(following, 1.0, most=most)


def liar(following: Following, most: int = 9) -> Guessing:
    """Never says what follows."""
    return Guessing(following, 0.0, most=most)
