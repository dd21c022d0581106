"""Drafts from a text by plain search, for machines without the compiled kernels.

Where the last tokens have been before, what came behind them may come again. The search costs some 50 us a token.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from baton.engine.scheduler.proposer import NO_DRAFT, Draft
from baton.engine.speculation.text.sources import sureness

_LAST = 4096
"""Tokens that are looked through, from the end."""
_WIDTH = array("I").itemsize


class NgramText:
    """Proposes what followed the last tokens when they stood in the text before. Looks for the last `longest` tokens,
    then for fewer, down to `shortest`."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        self._token_ids = array("I")

    @property
    def has_draft(self) -> bool:
        """Whether the last tokens stand in the text before."""
        return self._found() is not None

    def read(self, token_ids: Sequence[int]) -> None:
        """The text goes on with these."""
        self._token_ids.extend(token_ids)

    def read_one(self, token_id: int) -> None:
        """The text goes on with this one."""
        self._token_ids.append(token_id)

    def draft(self, max_tokens: int) -> Draft:
        """What followed the same tokens earlier. Of several places the last one counts."""
        found = self._found()
        if found is None:
            return NO_DRAFT
        place, length = found
        tokens = list(self._token_ids[place : place + max_tokens])
        return Draft(tokens, [sureness(length + number) for number in range(len(tokens))], "ngram")

    def _found(self) -> tuple[int, int] | None:
        """The place behind the last tokens where they were before, and how many they are."""
        first = max(0, len(self._token_ids) - _LAST)
        packed = self._token_ids[first:].tobytes()
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
