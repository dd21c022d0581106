"""In the place of `DraftDepth`: all that is proposed is verified. How many drafts pay is a question of time."""

from __future__ import annotations

from collections.abc import Sequence

from baton.engine.scheduler.draft_depth import DecodingStep, DraftDepth
from baton.engine.scheduler.proposer import Draft, Proposer, Wanted
from baton.engine.scheduler.request import Request


class AllDrafts(DraftDepth):
    """Nobody rests, whatever drafts have shown."""

    def is_resting(self, request: Request) -> bool:
        return False

    def is_declined(self, request: Request) -> bool:
        return False

    def wanted(self, at_most: Sequence[Wanted], proposer: Proposer, step: DecodingStep) -> list[Wanted]:
        for each in at_most:
            proposer.cost(each.request)
        return list(at_most)

    def chosen(self, requests: Sequence[Request], drafts: Sequence[Draft], step: DecodingStep) -> list[int]:
        return [len(draft.token_ids) for draft in drafts]
