"""The drafts of a step: who gets any, and which of them were right.

Owns the bounds that a draft keeps to, and the rule by which it is accepted. What the tokens are is the `Proposer`'s
(see `baton.engine.scheduler.proposer` for the whole protocol), and how many there are is `DraftDepth`'s.

Invariant: what is accepted is what decoding without drafts samples.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from itertools import takewhile
from typing import NamedTuple

from baton.engine.scheduler.draft_counts import DraftCounts
from baton.engine.scheduler.draft_depth import DecodingStep, DraftDepth
from baton.engine.scheduler.limits import SchedulerLimits
from baton.engine.scheduler.proposer import NO_DRAFT, Draft, Proposer, Wanted
from baton.engine.scheduler.request import Request, ScheduledRequest
from baton.engine.scheduler.request_blocks import RequestBlocks
from baton.engine.scheduler.step import SampledTokens
from baton.wire.drafts import VerifiedDraft
from baton.wire.request_key import RequestKey

_log = logging.getLogger(__name__)


class Speculation(NamedTuple):
    """Drafts are those of `proposer`, as many as `depth` chooses. Without it all are verified. `reason`: why it is not
    the proposer that was asked for, in a word."""

    proposer: Proposer
    depth: DraftDepth | None = None
    reason: str = ""


class Drafts:
    """Of `speculation`, if there is any. `limits` and `blocks`: the scheduler's. `counts`: for reading."""

    def __init__(self, speculation: Speculation | None, limits: SchedulerLimits, blocks: RequestBlocks) -> None:
        self.counts = DraftCounts()
        self._proposer = None if speculation is None else speculation.proposer
        self._depth = None if speculation is None else speculation.depth
        self._limits = limits
        self._blocks = blocks
        self._in_flight: dict[RequestKey, Draft] = {}
        self._reason = "" if speculation is None else speculation.reason
        if self._proposer is not None and not limits.max_num_drafts:
            self._proposer, self._depth, self._reason = None, None, "states"
            _log.warning(
                "drafts are not used: this model has states, which go back on a single rank with room for them"
            )

    def needs_last_token(self, request: Request) -> bool:
        """Whether the next step of `request` depends on the value of the token that the last one samples."""
        return request.params.needs_last_token or request.has_drafts or self._follows(request)

    def follows_any(self, requests: Iterable[Request]) -> bool:
        """Whether one of `requests` may have drafts in the next step."""
        if self._proposer is None:
            return False
        if self._depth is not None:
            self._depth.planned()
        return any(self._follows(request) for request in requests)

    def add(
        self,
        shares: MutableMapping[RequestKey, ScheduledRequest],
        running: Mapping[RequestKey, Request],
        num_rows: int,
        budget: int,
    ) -> None:
        """Put drafts behind those of `shares` that decode. The step has `num_rows` rows without them, and `budget`
        tokens are left of it."""
        limits, proposer = self._limits, self._proposer
        num_left = min(budget, limits.max_num_seqs - num_rows, limits.max_num_drafts)
        if proposer is None or num_left <= 0:
            return
        decoding = [running[key] for key, share in shares.items() if share.needs_sample and running[key].has_jumped]
        wanted = [Wanted(request, most) for request in decoding if (most := self._most(request, num_left)) > 0]
        if not wanted:
            return
        for request, draft in self._chosen(wanted, proposer, tuple(shares.values()), decoding):
            draft = draft.first(min(num_left, self._blocks.num_slots_behind(request)))
            num_left -= len(draft.token_ids)
            if proposer.stores_kv:
                self._blocks.trim(request, len(draft.token_ids))
            else:
                self._blocks.extend(request, len(draft.token_ids))
            if draft.token_ids:
                shares[request.key] = shares[request.key].with_drafts(draft.token_ids)
                self._in_flight[request.key] = draft

    def _chosen(
        self,
        wanted: Sequence[Wanted],
        proposer: Proposer,
        shares: Sequence[ScheduledRequest],
        decoding: Sequence[Request],
    ) -> Iterable[tuple[Request, Draft]]:
        """The drafts that are worth verifying in a step over `shares`, of which `decoding` have one token each."""
        step = None
        if self._depth is not None:
            step = DecodingStep.of(shares, decoding, self._depth.costs)
            wanted = self._depth.wanted(wanted, proposer, step)
        if proposer.stores_kv:
            wanted = self._with_slots(wanted)
        requests = [each.request for each in wanted]
        drafts = [self._usable(*each) for each in zip(wanted, proposer.propose(wanted), strict=True)]
        if self._depth is not None and step is not None:
            counts = self._depth.chosen(requests, drafts, step)
            drafts = [draft.first(count) for draft, count in zip(drafts, counts, strict=True)]
        return zip(requests, drafts, strict=True)

    def accepted(self, request: Request, sampled: SampledTokens) -> tuple[SampledTokens, VerifiedDraft]:
        """Those of `sampled`, the tokens behind the last known one and behind each draft of `request`, that decoding
        without drafts samples, and what became of the draft. There are fewer where the model computed NaN for one of
        them; the next step finds it again."""
        draft = self._in_flight.pop(request.key, NO_DRAFT)
        pairs = zip(draft.token_ids, sampled, strict=False)
        num_accepted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1].token_id, pairs))
        if self._proposer is not None:
            self.counts.verified(draft.method, len(draft.token_ids), num_accepted)
            self._proposer.verified(request, draft, num_accepted)
        if self._depth is not None:
            self._depth.verified(request, draft, num_accepted)
        return sampled[: num_accepted + 1], VerifiedDraft(draft.method, len(draft.token_ids), num_accepted)

    def drop(self, request: Request) -> None:
        """The drafts of `request` are over: release the blocks that only they needed."""
        request.has_drafts = False
        self._in_flight.pop(request.key, None)
        self._blocks.trim(request)

    def forget(self, request: Request) -> None:
        """`request` has left."""
        if self._reason:
            self.counts.undrafted[self._reason] += 1
        if self._proposer is not None:
            self._in_flight.pop(request.key, None)
            self._proposer.forget(request)
        if self._depth is not None:
            self._depth.forget(request)

    def _most(self, request: Request, num_left: int) -> int:
        """How many drafts `request` may have."""
        if request.num_pending_tokens or not self._follows(request):
            return 0
        num_wanted = request.most_tokens - len(request.token_ids) - 1  # a token is sampled behind the last draft, too
        return min(num_left, num_wanted, self._blocks.num_slots_behind(request))

    def _with_slots(self, wanted: Sequence[Wanted]) -> list[Wanted]:
        """Those of `wanted` for whose drafts there are slots, which they have now."""
        found = []
        for each in wanted:
            count = min(each.max_tokens, self._blocks.num_slots_behind(each.request))
            if count > 0:
                self._blocks.extend(each.request, count)
                found.append(each._replace(max_tokens=count))
        return found

    def _usable(self, wanted: Wanted, draft: Draft) -> Draft:
        """Of `draft` as much as was wanted, of tokens that exist and that the grammar allows."""
        size, matcher = self._limits.vocab_size, wanted.request.matcher
        known = list(takewhile(lambda token_id: 0 <= token_id < size, draft.token_ids[: wanted.max_tokens]))
        if known and matcher is not None:
            known = known[: matcher.num_allowed(known)]
        return Draft(known, draft.confidences, draft.method)

    def _follows(self, request: Request) -> bool:
        if self._proposer is None or request.first_token_only or request.forks:
            return False
        if self._depth is not None and self._depth.is_resting(request):
            return False
        return self._proposer.follows(request)
