"""The draft KV of prompts that are computed for other nodes.

It is computed beside the prompt, chunk by chunk, and then travels with it. Where somebody waits, nothing is computed:
the node that generates can do it later, when it wants drafts. Nothing is caught up with here, because blocks of earlier
chunks are on their way already.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.engine.attention.base import LayerStored
from baton.engine.cache.draft_coverage import DraftCoverage
from baton.engine.runner.base import RunningStep
from baton.engine.scheduler.live_requests import LiveRequests
from baton.engine.scheduler.request import Request, ScheduledRequest
from baton.engine.scheduler.step import Step
from baton.engine.speculation.draft_model.passes import DraftPasses

_FEWEST_OUTPUT = 8
"""A shorter output is not worth it."""


class PromptDrafts:
    """Of the `requests` of a scheduler, as long as they have at most `max_tokens` tokens. `coverage`: of its pool."""

    def __init__(self, passes: DraftPasses, coverage: DraftCoverage, requests: LiveRequests, max_tokens: int) -> None:
        self._passes = passes
        self._coverage = coverage
        self._requests = requests
        self._max_tokens = max_tokens

    def launch(self, step: Step, layer_stored: LayerStored | None) -> RunningStep | None:
        """Begin to compute what the draft stores of `step`, which was just launched; None where that is nothing."""
        shares = self._shares_of(step)
        if not shares:
            return None
        launched = self._passes.launch(shares, layer_stored)
        for share in shares:
            self._coverage.fill(share.block_table, share.start, share.context_len)
        return launched

    def _shares_of(self, step: Step) -> Sequence[ScheduledRequest]:
        if self._requests.num_waiting:
            return ()
        found = []
        for share in step.requests:
            request = self._requests.get(share.key)
            if request is None or not request.first_token_only:
                return ()  # it waits for its token
            if self._is_wanted(request, share):
                found.append(share._replace(needs_sample=False, forks=(), block_copy=None))
        return found

    def _is_wanted(self, request: Request, share: ScheduledRequest) -> bool:
        if request.prompt.media or share.context_len > self._max_tokens:
            return False
        if request.most_tokens - request.num_prompt_tokens < _FEWEST_OUTPUT:
            return False
        return self._coverage.of(share.block_table, share.start) == share.start
