"""Counts of drafts, for metrics: what was proposed and verified, what of it was right, and who got none and why.

Owns numbers that only rise. Knows no request.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from baton.wire.drafts import MAX_POSITIONS, DraftsByMethod, DraftsOfMethod


@dataclass(slots=True)
class _OfMethod:
    num_drafts: int = 0
    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


class DraftCounts:
    """Since the engine was built. `undrafted`: requests without drafts, by reason."""

    def __init__(self) -> None:
        self.undrafted = Counter[str]()
        self._methods: dict[str, _OfMethod] = {}

    def verified(self, method: str, num_tokens: int, num_accepted: int) -> None:
        """A step has verified `num_tokens` guesses of one draft, of which the first `num_accepted` were right."""
        counted = self._methods.setdefault(method, _OfMethod())
        counted.num_drafts += 1
        _count(counted.tokens, num_tokens)
        _count(counted.accepted, num_accepted)

    def by_method(self) -> DraftsByMethod:
        """What was verified, by method. Asked after each step: a microsecond for each."""
        return tuple(
            [
                DraftsOfMethod(method, counted.num_drafts, tuple(counted.tokens), tuple(counted.accepted))
                for method, counted in self._methods.items()
            ]
        )


def _count(by_position: list[int], num_tokens: int) -> None:
    num_counted = min(num_tokens, MAX_POSITIONS)
    by_position += [0] * (num_counted - len(by_position))
    for position in range(num_counted):
        by_position[position] += 1
