"""Counts of drafts, for metrics: what was proposed and verified, what of it was right, and who got none and why.

Owns numbers that only rise. Knows no request.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class DraftCounts:
    """Since the engine was built. `drafts`: verified drafts, by method. `tokens` and `accepted`: their tokens, and
    those that were right, by method and place in the draft, from 0. `undrafted`: requests without drafts, by reason."""

    drafts: Counter[str] = field(default_factory=Counter)
    tokens: Counter[tuple[str, int]] = field(default_factory=Counter)
    accepted: Counter[tuple[str, int]] = field(default_factory=Counter)
    undrafted: Counter[str] = field(default_factory=Counter)

    def verified(self, method: str, num_tokens: int, num_accepted: int) -> None:
        """A step has verified `num_tokens` guesses of one draft, of which the first `num_accepted` were right."""
        self.drafts[method] += 1
        for place in range(num_tokens):
            self.tokens[method, place] += 1
        for place in range(num_accepted):
            self.accepted[method, place] += 1
