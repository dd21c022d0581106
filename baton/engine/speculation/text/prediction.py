"""Drafts from a request's prediction: a text that the output will be like, such as the file that is being edited.

Owns the place in the prediction where the output stands. Output and prediction go on side by side until they differ.
Then the place is found again as in a diff: where the last tokens of the output stand in the prediction, near the place
where the two parted, and the more of them the further away. One token that replaces another costs one step.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from baton.engine.scheduler.proposer import NO_DRAFT, Draft
from baton.engine.speculation.text.sources import sureness
from baton.wire.drafts import PREDICTION

_WIDTH = array("I").itemsize
_REACHES = ((4, 1 << 30), (2, 64), (1, 0))
"""Where so many last tokens of the output are looked for: so far behind the place where output and prediction parted,
and behind as many tokens as the output has had since. Only the first are looked for before that place, too."""
_KEPT = _REACHES[0][0]
_WORTH = 2.0
"""A token in common with a prediction says as much as so many in common with any text."""


class Prediction:
    """Of `token_ids`, with which the output may begin. It is given the output."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        self._packed = array("I", token_ids).tobytes()
        self._place = 0
        self._match = 1
        """Tokens before the place that are those of the output; the begin of both counts as one."""
        self._last: list[int] = []
        self._num_apart = 0

    @property
    def has_draft(self) -> bool:
        """Whether the output stands somewhere in the prediction."""
        return self._match > 0 and self._place < len(self._token_ids)

    def read(self, token_ids: Sequence[int]) -> None:
        """The output goes on with these."""
        for token_id in token_ids:
            self.read_one(token_id)

    def read_one(self, token_id: int) -> None:
        """The output goes on with this one."""
        if self._match and self._place < len(self._token_ids) and self._token_ids[self._place] == token_id:
            self._place += 1
            self._match += 1
            return
        if self._match:
            self._last = list(self._token_ids[max(0, self._place - self._match) : self._place][-_KEPT:])
            self._num_apart = self._match = 0
        self._last = [*self._last[1 - _KEPT :], token_id]
        self._num_apart += 1
        self._find_again()

    def draft(self, max_tokens: int) -> Draft:
        """What the prediction goes on with."""
        if not self.has_draft:
            return NO_DRAFT
        found = self._token_ids[self._place : self._place + max_tokens]
        confidences = [sureness(_WORTH * (self._match + number)) for number in range(len(found))]
        return Draft(found, confidences, PREDICTION)

    def _find_again(self) -> None:
        for length, reach in _REACHES:
            if length <= len(self._last):
                place = self._behind(length, self._place + self._num_apart + reach)
                if place:
                    self._place, self._match = place, length
                    return

    def _behind(self, length: int, stop: int) -> int:
        """The place behind the last `length` tokens of the output: the first from the present place on that begins
        before `stop`. Many of them may also stand before it. 0: there is none."""
        wanted = array("I", self._last[-length:]).tobytes()
        begin, end = self._place * _WIDTH, min(len(self._packed), (stop + length) * _WIDTH)
        found = self._packed.find(wanted, begin, end)
        while found > 0 and found % _WIDTH:
            found = self._packed.find(wanted, found + 1, end)
        if found < 0 and length == _KEPT:
            found = self._packed.rfind(wanted, 0, begin)
            while found > 0 and found % _WIDTH:
                found = self._packed.rfind(wanted, 0, found + len(wanted) - 1)
        return 0 if found < 0 else found // _WIDTH + length
