"""What a source of drafts is: it reads what a request says, and has a guess of what comes next, or none.

Owns the scale on which all sources say how sure they are: the chance that was seen in code, prose, tables and JSON of
real models (`python -m tests.engine.speculation.text_drafts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from baton.engine.scheduler.proposer import Draft

_HALF_SURE = 2.0
"""What followed so many tokens before follows them again every second time."""


def sureness(match: float) -> float:
    """The chance of a token that always came behind the last `match` tokens."""
    return match / (match + _HALF_SURE)


class Source(Protocol):
    """Of one request. Each call takes microseconds, for each token that it is given."""

    @property
    def has_draft(self) -> bool:
        """Whether there is a guess now."""
        ...

    def read(self, token_ids: Sequence[int]) -> None:
        """The text goes on with these."""
        ...

    def read_one(self, token_id: int) -> None:
        """The text goes on with this one: the usual case, in a microsecond."""
        ...

    def draft(self, max_tokens: int) -> Draft:
        """The guess: `max_tokens` at most."""
        ...
