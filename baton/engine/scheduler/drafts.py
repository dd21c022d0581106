"""The drafts of a step: who gets any and how many, and which of them were right.

Owns the bounds that a draft keeps to, and the rule by which it is accepted; what the tokens are is the `Proposer`'s,
see `baton.engine.scheduler.proposer` for the whole protocol.

Invariant: what is accepted is what decoding without drafts samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from itertools import islice, takewhile

from baton.engine.scheduler.limits import SchedulerLimits
from baton.engine.scheduler.proposer import Proposer
from baton.engine.scheduler.request import Request, ScheduledRequest
from baton.engine.scheduler.request_blocks import RequestBlocks
from baton.engine.scheduler.step import SampledTokens
from baton.wire.request_key import RequestKey


class Drafts:
    """Of `proposer`, if there is one. `limits` and `blocks`: the scheduler's."""

    def __init__(self, proposer: Proposer | None, limits: SchedulerLimits, blocks: RequestBlocks) -> None:
        self._proposer = None if limits.has_states else proposer
        self._limits = limits
        self._blocks = blocks

    def needs_last_token(self, request: Request) -> bool:
        """Whether the next step of `request` depends on the value of the token that the last one samples."""
        return request.params.needs_last_token or request.has_drafts or self._follows(request)

    def follows_any(self, requests: Iterable[Request]) -> bool:
        """Whether one of `requests` may have drafts soon."""
        return self._proposer is not None and any(self._follows(request) for request in requests)

    def add(
        self,
        shares: MutableMapping[RequestKey, ScheduledRequest],
        running: Mapping[RequestKey, Request],
        num_rows: int,
        budget: int,
    ) -> None:
        """Put drafts behind those of `shares` that decode, in their order. The step has `num_rows` rows without them,
        and `budget` tokens are left of it."""
        if self._proposer is None:
            return
        num_left = min(budget, self._limits.max_num_seqs - num_rows)
        for key, share in shares.items():
            request = running[key]
            if num_left <= 0:
                return
            if request.has_jumped and share.needs_sample and not request.num_pending_tokens:
                drafts = self._propose(self._proposer, request, num_left)
                places = request.matcher.places(drafts) if drafts and request.matcher is not None else ()
                if request.matcher is not None:
                    drafts = drafts[: len(places)]
                if drafts:
                    self._blocks.extend(request, len(drafts))
                    shares[key] = share.with_drafts(drafts, places)
                    num_left -= len(drafts)

    def accepted(self, request: Request, share: ScheduledRequest, sampled: SampledTokens) -> SampledTokens:
        """Those of `sampled`, the tokens behind the last known one and behind each draft of `share`, that decoding
        without drafts samples. There are fewer where the model computed NaN for one of them; the next step finds it
        again."""
        drafts = share.token_ids[len(share.token_ids) - share.num_drafts :]
        pairs = zip(drafts, sampled, strict=False)
        num_accepted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1].token_id, pairs))
        if self._proposer is not None:
            self._proposer.verified(request, len(drafts), num_accepted)
        return sampled[: num_accepted + 1]

    def drop(self, request: Request) -> None:
        """The drafts of `request` are over: release the blocks that only they needed."""
        request.has_drafts = False
        self._blocks.trim(request)

    def _propose(self, proposer: Proposer, request: Request, at_most: int) -> list[int]:
        """Drafts that can be computed: there are slots for them, and their ids exist."""
        num_wanted = request.most_tokens - len(request.token_ids) - 1  # a token is sampled behind the last draft, too
        at_most = min(at_most, num_wanted, self._blocks.num_slots_behind(request))
        if at_most <= 0 or not self._follows(request):
            return []
        drafts = islice(proposer.propose(request, at_most), at_most)
        return list(takewhile(lambda token_id: 0 <= token_id < self._limits.vocab_size, drafts))

    def _follows(self, request: Request) -> bool:
        if self._proposer is None or request.first_token_only or request.forks:
            return False
        return self._proposer.follows(request)
