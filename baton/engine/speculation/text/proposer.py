"""Drafts from text: what the prediction of a request says, its own text, and the outputs of its tenant.

Owns which sources a request has, that they are given all its tokens, and which of their drafts is the best. Where two
are equally good the prediction is trusted before the own text, and that before the texts of others.

Invariants: no request has a draft from the text of another tenant. Nothing here takes a step longer than about a
millisecond, so long prompts are read in slices, by one request at a time. Memory is bounded: see `MAX_OWN_TOKENS`,
`MAX_TOKENS` and `baton.engine.speculation.text.tenants`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from baton.engine.scheduler.proposer import FREE, NO_DRAFT, Draft, DraftCost, Wanted
from baton.engine.scheduler.request import Request
from baton.engine.speculation.text.prediction import Prediction
from baton.engine.speculation.text.sources import Source
from baton.wire.request_key import RequestKey

MAX_OWN_TOKENS = 1 << 17
"""Of a request the newest tokens are kept, at most so many: some 100 bytes each."""
MAX_TOKENS = 1 << 20
"""Of the prompts of all requests, some 100 MB; outputs come on top. One that would exceed it has no own text here."""
_SLICE = 2048
"""Tokens that are read in a step, in about half a millisecond."""
_FEW = 64
"""So many are read whenever there are any."""
_SHARED_OF_PROMPT = 16
"""The end of a prompt is read as the output of a tenant is: something of it is what the first token follows."""
_log = logging.getLogger(__name__)


class Sources(NamedTuple):
    """Make the sources of a request: of its own text, and of what its tenant has said."""

    own: Callable[[Request], Source]
    others: Callable[[Request], Source] | None = None


@dataclass(slots=True)
class _Followed:
    """A request of which `num_read` tokens were read. Each of `sources` begins with the token at its place of `firsts`.
    `num_counted`: tokens that count in the bound of all."""

    sources: list[Source] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    num_read: int = 0
    num_counted: int = 0

    def add(self, source: Source, first: int) -> None:
        self.sources.append(source)
        self.firsts.append(first)


class TextProposer:
    """Drafts have `num_tokens` tokens at most. `method`: the name of most of them."""

    stores_kv = False

    def __init__(self, num_tokens: int, sources: Sources, method: str) -> None:
        self.method = method
        self._num_tokens = num_tokens
        self._sources = sources
        self._requests: dict[RequestKey, _Followed] = {}
        self._num_counted = 0
        self._slowest: Request | None = None
        self._has_said_so = False

    def follows(self, request: Request) -> bool:
        """Whether a source has a draft, once all tokens were read."""
        followed = self._followed(request)
        place = followed.num_read
        num_new = len(request.token_ids) - request.num_pending_tokens - place
        if num_new == 1 and place >= request.num_prompt_tokens:
            token_id = request.token_ids[place]
            for source in followed.sources:
                source.read_one(token_id)
            followed.num_read = place + 1
        elif num_new and not self._catch_up(request, followed, num_new):
            return False
        return any(source.has_draft for source in followed.sources)

    def cost(self, request: Request) -> DraftCost:
        """Nothing."""
        return FREE

    def propose(self, wanted: Sequence[Wanted]) -> list[Draft]:
        """The best draft of each, which of several is the one of which most tokens should be right."""
        return [self._best(each.request, min(each.max_tokens, self._num_tokens)) for each in wanted]

    def verified(self, request: Request, draft: Draft, num_accepted: int) -> None:
        """Nothing is learnt from it here."""

    def forget(self, request: Request) -> None:
        """What was kept of it goes; what it said stays with its tenant."""
        followed = self._requests.pop(request.key, None)
        if followed is not None:
            self._num_counted -= followed.num_counted
        if self._slowest is request:
            self._slowest = None

    def _followed(self, request: Request) -> _Followed:
        followed = self._requests.get(request.key)
        if followed is None:
            followed = self._requests[request.key] = self._begin(request)
        return followed

    def _begin(self, request: Request) -> _Followed:
        followed, num_known = _Followed(), request.num_known_tokens
        if request.params.prediction_ids:
            followed.add(Prediction(request.params.prediction_ids), request.num_prompt_tokens)
        if self._num_counted + num_known <= MAX_TOKENS:
            followed.add(self._sources.own(request), 0)
            followed.num_counted = num_known
            self._num_counted += num_known
        elif not self._has_said_so:
            self._has_said_so = True
            _log.warning("drafts are not taken from the text of each request: prompts have over %d tokens", MAX_TOKENS)
        if self._sources.others is not None:
            followed.add(self._sources.others(request), max(0, request.num_prompt_tokens - _SHARED_OF_PROMPT))
        return followed

    def _catch_up(self, request: Request, followed: _Followed, num_new: int) -> bool:
        """Read what is new of `request`, or a slice of it. Whether all was read. Only one request reads long text at a
        time, so that many new ones do not hold up the others all at once."""
        if num_new > _FEW:
            if self._slowest is not None and self._slowest is not request:
                return False
            self._slowest = request
        begin, end = followed.num_read, followed.num_read + min(num_new, _SLICE)
        for source, first in zip(followed.sources, followed.firsts, strict=True):
            if end > first:
                source.read(request.token_ids[max(begin, first) : end])
        followed.num_read = end
        if num_new > _SLICE:
            return False
        if self._slowest is request:
            self._slowest = None
        return True

    def _best(self, request: Request, max_tokens: int) -> Draft:
        if not self.follows(request):
            return NO_DRAFT
        drafts = [source.draft(max_tokens) for source in self._followed(request).sources if source.has_draft]
        return max(drafts, key=_num_expected, default=NO_DRAFT)


def _num_expected(draft: Draft) -> float:
    """How many tokens of `draft` should be right."""
    expected: float = sum(accumulate(draft.confidences, mul))
    return expected
