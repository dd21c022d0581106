"""Drafts of a second model: it decodes a few tokens ahead, and the model verifies them in one step.

Owns how far the draft's KV follows each request. It never goes ahead of what is known: what was guessed counts only as
far as the request has gone on so. Tokens that the draft has not seen are caught up with when drafts of the request are
wanted, all requests in one pass. A long catch-up goes on over several steps, so that no stream waits long for it.

A guess is drawn as the model draws: with the parameters of the request and the noise of the place. Two models that give
tokens similar chances then draw the same token most of the time, at any temperature.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from baton.engine.cache.block_pool import BlockTable
from baton.engine.cache.draft_coverage import DraftCoverage
from baton.engine.scheduler.proposer import FREE, NO_DRAFT, Draft, DraftCost, Wanted
from baton.engine.scheduler.request import Request, ScheduledRequest
from baton.engine.scheduler.step import SampledTokens
from baton.engine.speculation.draft_model.checkpoint import DraftCheckpoint
from baton.engine.speculation.draft_model.passes import DraftPasses
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams

_CATCH_UP_S, _FEWEST_CAUGHT_UP = 0.02, 32
"""A step waits so long for draft KV of known tokens, or for so many of them, whichever is more."""
_LIKELIEST = DecodingParams(temperature=0.0, logprobs=0)


@dataclass(slots=True)
class _Followed:
    """A request as the draft knows it: in the blocks of `table`, its first `num_covered` tokens have draft KV, and so
    have the guesses of `ahead` behind them, as long as the blocks of both are in this `use`."""

    params: DecodingParams
    table: BlockTable
    num_covered: int
    ahead: Sequence[int] = ()
    use: Sequence[tuple[int, int]] = ()


@dataclass(slots=True)
class _Drafting:
    """A draft of `wanted` that is being made. `token_ids` are all of its tokens, of which `num_stored` have draft KV
    and `num_asked` have it after the next pass; behind the known ones are those that were drawn."""

    wanted: Wanted
    followed: _Followed
    token_ids: list[int]
    num_stored: int
    num_asked: int
    num_known: int
    confidences: list[float] = field(default_factory=list)
    chance: float = 1.0
    is_over: bool = False

    @property
    def num_new(self) -> int:
        """Tokens of the next pass."""
        return self.num_asked - self.num_stored

    @property
    def share(self) -> ScheduledRequest:
        """Its share of the next pass."""
        request, needs_sample = self.wanted.request, self.num_asked == len(self.token_ids)
        return ScheduledRequest(
            request.key,
            self.num_stored,
            self.num_new,
            self.token_ids,
            request.prompt,
            request.block_table,
            self.followed.params,
            needs_sample,
        )

    def take(self, sampled: SampledTokens, end_token_ids: frozenset[int]) -> None:
        """The pass was computed, and has drawn this token; none where it was not asked to, and where it has no
        numbers."""
        self.num_stored = self.num_asked
        if not sampled:
            self.is_over = True
            return
        (token,) = sampled
        confidence = 0.0 if token.logprobs is None else math.exp(token.logprobs.logprob)
        self.token_ids.append(token.token_id)
        self.num_asked += 1
        self.confidences.append(confidence)
        self.chance *= confidence
        is_full = len(self.confidences) >= self.wanted.max_tokens
        self.is_over = is_full or self.chance < self.wanted.least_chance or token.token_id in end_token_ids


class DraftModelProposer:
    """Of the model `draft`, by `passes`. `coverage`: of the pool. See `Proposer`."""

    method = "draft_model"
    stores_kv = True

    def __init__(self, draft: DraftCheckpoint, passes: DraftPasses, coverage: DraftCoverage) -> None:
        self._passes = passes
        self._coverage = coverage
        self._num_tokens = draft.num_tokens
        self._max_tokens = draft.max_tokens
        self._end_token_ids = frozenset(draft.config.eos_token_ids)
        self._is_greedy = draft.is_greedy
        self._requests: dict[RequestKey, _Followed] = {}
        self._num_rows = 1

    def follows(self, request: Request) -> bool:
        """Whether the draft can follow it: it sees text alone, and not too much of it."""
        if request.prompt.media or request.block_copy is not None:
            return False
        return len(request.token_ids) < self._max_tokens

    def cost(self, request: Request) -> DraftCost:
        """To catch up with what the draft has not seen, and a pass for each token, of which requests share the time."""
        start = self._follow(request).num_covered
        num_uncovered = len(request.token_ids) - start
        token_s = self._passes.decode_s(self._num_rows, self._num_rows * start) / self._num_rows
        if not token_s:
            return FREE
        return DraftCost(self.catch_up_s(num_uncovered, start) if num_uncovered > self._num_tokens else 0.0, token_s)

    def catch_up_s(self, num_uncovered: int, start: int) -> float:
        """The seconds to see so many tokens from place `start` on."""
        return self._passes.prompt_s(num_uncovered, start)

    def propose(self, wanted: Sequence[Wanted]) -> list[Draft]:
        """Catch up with all of them, then decode ahead, as long as one of them wants more."""
        made: dict[RequestKey, _Drafting] = {}
        left, room = self._most_caught_up(), self._passes.max_tokens - len(wanted)
        for each in wanted:
            begun = self._begin(each, min(max(left, 1 + self._num_tokens), 1 + room))
            if begun is not None:
                made[each.request.key] = begun
                left, room = left - begun.num_new, room - begun.num_new + 1
        going_on = list(made.values())
        self._num_rows = max(1, len(going_on))
        while going_on:
            self._take(going_on, self._passes.compute([each.share for each in going_on]))
            going_on = [each for each in going_on if not each.is_over]
        for drafting in made.values():
            self._note(drafting)
        return [self._draft_of(made.get(each.request.key)) for each in wanted]

    def verified(self, request: Request, draft: Draft, num_accepted: int) -> None:
        """What was right is seen when the next draft is wanted."""

    def forget(self, request: Request) -> None:
        """What is known of it goes with it."""
        self._requests.pop(request.key, None)

    def _begin(self, wanted: Wanted, most: int) -> _Drafting | None:
        """With at most so many tokens to catch up with. None where others read the blocks that the draft has to write
        into."""
        request = wanted.request
        followed = self._follow(request)
        known = request.token_ids
        end = min(len(known), followed.num_covered + most)
        if not self._coverage.can_fill(request.block_table, followed.num_covered, end):
            return None
        most_drafts = min(wanted.max_tokens, self._num_tokens, self._max_tokens - len(known))
        wanted = wanted._replace(max_tokens=most_drafts)
        return _Drafting(wanted, followed, list(known), followed.num_covered, end, len(known))

    def _take(self, computed: Sequence[_Drafting], sampled: Mapping[RequestKey, SampledTokens]) -> None:
        for each in computed:
            ends = frozenset[int]() if each.followed.params.ignore_eos else self._end_token_ids
            each.take(sampled.get(each.wanted.request.key, ()), ends)

    def _note(self, made: _Drafting) -> None:
        """What of the request has draft KV now."""
        followed, known = made.followed, min(made.num_stored, made.num_known)
        self._coverage.fill(followed.table, followed.num_covered, known)
        followed.num_covered, followed.ahead = known, made.token_ids[known : made.num_stored]
        followed.use = self._coverage.uses(followed.table, known, made.num_stored)

    def _draft_of(self, made: _Drafting | None) -> Draft:
        if made is None or not made.confidences:
            return NO_DRAFT
        return Draft(made.token_ids[made.num_known :], made.confidences, self.method)

    def _most_caught_up(self) -> int:
        """How many tokens a step may catch up with."""
        token_s = self._passes.prompt_s(_FEWEST_CAUGHT_UP, 0) / _FEWEST_CAUGHT_UP
        return max(_FEWEST_CAUGHT_UP, int(_CATCH_UP_S / token_s)) if token_s else _FEWEST_CAUGHT_UP

    def _follow(self, request: Request) -> _Followed:
        """What the draft has seen of it, which is never its last token."""
        followed, most = self._requests.get(request.key), len(request.token_ids) - 1
        if followed is None:
            params = _LIKELIEST if self._is_greedy else replace(request.params, logprobs=0, prompt_logprobs=None)
            followed = self._requests[request.key] = _Followed(params, request.block_table, 0)
            followed.num_covered = self._coverage.of(request.block_table, most)
        elif followed.table is not request.block_table:  # it was preempted
            followed.table, followed.ahead = request.block_table, ()
            followed.num_covered = self._coverage.of(request.block_table, most)
        elif followed.ahead:
            self._compare(followed, request.token_ids)
        followed.num_covered = min(followed.num_covered, most)
        return followed

    def _compare(self, followed: _Followed, token_ids: Sequence[int]) -> None:
        """Of the guesses that have draft KV, those that came true are covered."""
        first, last = followed.num_covered, len(token_ids) - 1
        end = first
        for guess in followed.ahead:
            if end >= last or token_ids[end] != guess:
                break
            end += 1
        use = self._coverage.uses(followed.table, first, end)
        if use != followed.use[: len(use)]:  # a block of guesses was released in between
            end = first
        self._coverage.fill(followed.table, first, end)
        followed.num_covered, followed.ahead = end, ()
