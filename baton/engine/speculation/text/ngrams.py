"""Drafts from a request's own text: where its last tokens have been before, what came behind them may come again.

Needs no model and keeps nothing between steps.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from baton.engine.scheduler.proposer import FREE, NO_DRAFT, Draft, DraftCost, Wanted
from baton.engine.scheduler.request import Request

_LAST = 4096
"""Tokens that are looked through, from the end: what takes some 50 us."""
_WIDTH = array("I").itemsize


class NgramProposer:
    """Proposes what followed the last tokens when they stood in the text before. Looks for the last `longest` tokens,
    then for fewer, down to `shortest`."""

    method = "ngram"
    stores_kv = False

    def __init__(self, num_tokens: int, shortest: int, longest: int) -> None:
        """`num_tokens`: that are proposed at most."""
        self._num_tokens = num_tokens
        self._lengths = range(longest, shortest - 1, -1)

    def follows(self, request: Request) -> bool:
        """Whether the last tokens stand in the text before."""
        return self._found(request) is not None

    def cost(self, request: Request) -> DraftCost:
        """Nothing."""
        return FREE

    def propose(self, wanted: Sequence[Wanted]) -> list[Draft]:
        """What followed the same tokens earlier. Of several places the last one counts."""
        return [self._draft(each.request, each.max_tokens) for each in wanted]

    def verified(self, request: Request, draft: Draft, num_accepted: int) -> None:
        """Nothing is learnt from it here."""

    def forget(self, request: Request) -> None:
        """Nothing is kept."""

    def _draft(self, request: Request, max_tokens: int) -> Draft:
        found = self._found(request)
        if found is None:
            return NO_DRAFT
        place, length = found
        tokens = request.token_ids[place : place + min(self._num_tokens, max_tokens)]
        return Draft(tokens, [length / (length + 1)] * len(tokens), self.method)

    def _found(self, request: Request) -> tuple[int, int] | None:
        """The place behind the last tokens where they were before, and how many they are."""
        first = max(0, len(request.token_ids) - _LAST)
        packed = array("I", request.token_ids[first:]).tobytes()
        for length in self._lengths:
            behind = _behind_last(packed, length)
            if behind:
                return first + behind, length
        return None


def _behind_last(packed: bytes, length: int) -> int:
    """The place behind the last `length` tokens of `packed` where they were before; 0: nowhere."""
    wanted, end = packed[-length * _WIDTH :], len(packed) - _WIDTH
    while (place := packed.rfind(wanted, 0, end)) > 0 and place % _WIDTH:
        end = place + len(wanted) - 1
    return 0 if place < 0 or len(wanted) < length * _WIDTH else place // _WIDTH + length
