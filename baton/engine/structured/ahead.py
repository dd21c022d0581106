"""Places in a grammar ahead of an output: those behind drafts, tokens of which nobody knows whether they will follow.

Owns a second matcher of the library, which goes over the drafts of one step and back again. That of the output never
leaves its place. To copy one takes some 50 us, and longer for a long output. To go over a token, or back, takes one.

A place answers as `GrammarMatcher` would if the drafts before it were taken. Where something goes wrong the drafts end,
and the output goes on without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Ahead:
    """Goes ahead of one output with `matcher`, which stands behind it and belongs to nobody else. `num_tokens`: see
    `FirstMatcher`."""

    __slots__ = ("_drafts", "_matcher", "_num_ahead", "_num_tokens")

    def __init__(self, matcher: LLMatcher, num_tokens: int) -> None:
        self._matcher = matcher
        self._num_tokens = num_tokens
        self._drafts: list[int] = []
        self._num_ahead = 0

    def num_allowed(self, drafts: Sequence[int]) -> int:
        """How many of `drafts` may come next, up to the first behind which nothing can follow."""
        self._stand_behind(0)
        self._drafts = []
        for token_id in drafts:
            if not self._goes_on_with(token_id):
                break
            self._drafts.append(token_id)
        return len(self._drafts)

    def accepts(self, number: int, token_id: int) -> bool:
        """Whether `token_id` may stand behind the first `number` drafts."""
        self._stand_behind(number)
        if not self._consume(token_id):
            return False
        self._matcher.rollback(1)
        return True

    def mask(self, number: int) -> bytes | None:
        """The tokens that may stand behind the first `number` drafts."""
        self._stand_behind(number)
        bits = self._matcher.compute_bitmask()
        return None if self._matcher.is_error() else bits

    def _goes_on_with(self, token_id: int) -> bool:
        """Whether `token_id` may be next, and something may follow. If so, the matcher stands behind it."""
        if not self._consume(token_id):
            return False
        if self._matcher.is_stopped():
            self._matcher.rollback(1)
            return False
        self._num_ahead += 1
        return True

    def _consume(self, token_id: int) -> bool:
        """As `GrammarMatcher.accepts`."""
        matcher = self._matcher
        if token_id >= self._num_tokens or matcher.is_error():
            return False
        if matcher.compute_ff_bytes() and not has_bit(matcher.compute_bitmask(), token_id):
            return False
        return matcher.try_consume_tokens([token_id]) == 1

    def _stand_behind(self, number: int) -> None:
        """Have the matcher stand behind the first `number` drafts."""
        if number < self._num_ahead:
            self._matcher.rollback(self._num_ahead - number)
        elif number > self._num_ahead:
            self._matcher.consume_tokens(self._drafts[self._num_ahead : number])
        self._num_ahead = number


class Place(NamedTuple):
    """The place behind the first `number` drafts. See `MaskSource`."""

    ahead: Ahead
    number: int

    def accepts(self, token_id: int) -> bool:
        """Whether this token may stand there."""
        return self.ahead.accepts(self.number, token_id)

    def mask(self) -> bytes | None:
        """The tokens that may stand there."""
        return self.ahead.mask(self.number)

    def behind(self, number: int) -> Place:
        """The place behind so many more drafts."""
        return Place(self.ahead, self.number + number)

    def fail(self, reason: str) -> None:
        """Say nothing: the output may never come here, and finds it out if it does."""


def has_bit(mask: bytes, token_id: int) -> bool:
    """Whether `mask` has the bit of this token."""
    return token_id < 8 * len(mask) and bool(mask[token_id >> 3] >> (token_id & 7) & 1)
