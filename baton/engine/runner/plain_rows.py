"""The tokens of rows that took their largest logit, or were drawn from all, on a host whose kernels found them.

Knows no requests. Most rows are such rows, so nothing of torch is in their way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat

from baton.engine.scheduler.request import SampledToken


@dataclass(frozen=True, slots=True)
class PlainRows:
    """See `SampledRows`. token_ids, is_number: [N]."""

    token_ids: Sequence[int]
    is_number: Sequence[int]

    def tokens(self) -> list[SampledToken | None]:
        """See `SampledRows.tokens`."""
        return plain_tokens(self.token_ids, self.is_number)


def plain_tokens(token_ids: Sequence[int], is_number: Sequence[int]) -> list[SampledToken | None]:
    """The tokens of rows that report nothing; None for a row without a number."""
    if all(is_number):
        # as calling the class, in a third of the time
        return list(map(tuple.__new__, repeat(SampledToken), zip(token_ids, repeat(None))))
    pairs = zip(token_ids, is_number, strict=True)
    return [SampledToken(token_id, None) if valid else None for token_id, valid in pairs]
