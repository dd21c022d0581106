"""The beginning of a list of tokens, as it was, while the list grows. Copies nothing: a context may be long."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import overload


class FirstTokens(Sequence[int]):
    """The first `count` of `tokens`, which are there and do not change; others may come behind them."""

    def __init__(self, tokens: Sequence[int], count: int) -> None:
        self._tokens, self._count = tokens, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return islice(self._tokens, self._count)

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[int]: ...

    def __getitem__(self, place: int | slice) -> int | Sequence[int]:
        if isinstance(place, slice):
            return self._tokens[slice(*place.indices(self._count))]
        return self._tokens[range(self._count)[place]]
