"""The tokens of rows that took their largest logit, or were drawn from all, on a host whose kernels found them; and
whose tokens they are.

Most rows are such rows, and most requests have one, so nothing of torch is in their way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, repeat, takewhile

from baton.engine.scheduler.step import SampledToken, SampledTokens
from baton.wire.request_key import RequestKey


@dataclass(frozen=True, slots=True)
class PlainRows:
    """Rows that are sampled already, and of which only the token is wanted. token_ids, is_number: [N]."""

    token_ids: Sequence[int]
    is_number: Sequence[int]

    def tokens(self) -> list[SampledToken | None]:
        """A token for each row; None where the model computed no number."""
        return plain_tokens(self.token_ids, self.is_number)


def plain_tokens(token_ids: Sequence[int], is_number: Sequence[int]) -> list[SampledToken | None]:
    """The tokens of rows that report nothing; None for a row without a number."""
    if all(is_number):
        # as calling the class, in a third of the time
        return list(map(tuple.__new__, repeat(SampledToken), zip(token_ids, repeat(None))))
    pairs = zip(token_ids, is_number, strict=True)
    return [SampledToken(token_id, None) if valid else None for token_id, valid in pairs]


def tokens_by_key(
    keys: Sequence[RequestKey], tokens: Sequence[SampledToken | None]
) -> Mapping[RequestKey, SampledTokens]:
    """What each request has sampled; `keys`: of the rows, those of a request beside each other. Behind a row without a
    number it has none."""
    found = {key: (token,) for key, token in zip(keys, tokens, strict=True) if token is not None}
    return found if len(found) == len(tokens) else _grouped(keys, tokens)


def _grouped(keys: Sequence[RequestKey], tokens: Sequence[SampledToken | None]) -> dict[RequestKey, SampledTokens]:
    found: dict[RequestKey, SampledTokens] = {}
    for key, rows in groupby(zip(keys, tokens, strict=True), lambda row: row[0]):
        if valid := tuple(token for _, token in takewhile(lambda row: row[1] is not None, rows) if token is not None):
            found[key] = valid
    return found
