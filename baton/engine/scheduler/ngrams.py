"""Drafts from a request's own text: where its last tokens have been before, what came behind them may come again.

Needs no model and keeps nothing between steps.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from baton.engine.scheduler.request import Request

_LAST = 4096
"""Tokens that are looked through, from the end: what takes some 50 us."""
_WIDTH = array("I").itemsize


class NgramProposer:
    """Proposes what followed the last tokens when they stood in the text before. Looks for the last `longest` tokens,
    then for fewer, down to `shortest`."""

    def __init__(self, num_tokens: int, shortest: int, longest: int) -> None:
        """`num_tokens`: that are proposed at most."""
        self._num_tokens = num_tokens
        self._lengths = range(longest, shortest - 1, -1)

    def follows(self, request: Request) -> bool:
        """Always true. Any text may repeat itself."""
        return True

    def propose(self, request: Request, max_tokens: int) -> Sequence[int]:
        """What followed the same tokens earlier. Of several places the last one counts."""
        token_ids = request.token_ids[-_LAST:]
        packed = array("I", token_ids).tobytes()
        for length in self._lengths:
            behind = _behind_last(packed, length)
            if behind:
                return token_ids[behind : behind + min(self._num_tokens, max_tokens)]
        return ()

    def verified(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Nothing is learnt from it."""


def _behind_last(packed: bytes, length: int) -> int:
    """The place behind the last `length` tokens of `packed` where they were before; 0: nowhere."""
    wanted, end = packed[-length * _WIDTH :], len(packed) - _WIDTH
    while (place := packed.rfind(wanted, 0, end)) > 0 and place % _WIDTH:
        end = place + len(wanted) - 1
    return 0 if place < 0 or len(wanted) < length * _WIDTH else place // _WIDTH + length
