"""What a node tells of drafts, by which a step finds several tokens at once. Fields of `baton.wire.messages`.

Owns no rule of drafting: how methods are named and what they guess is the engine's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias

from baton.wire.codec import U32, Bounds, Length, Packed

PREDICTION = "prediction"
"""The method whose drafts come from a request's own prediction."""
_MAX_METHODS = 16
MAX_POSITIONS = 256
"""Places of a draft that are counted. Longer ones may be verified."""
_Method = Annotated[str, Length(64)]
_Count = Annotated[int, Bounds(0, 2**40)]
_CountByPosition = Annotated[tuple[int, ...], Packed("Q", MAX_POSITIONS)]


@dataclass(frozen=True, slots=True)
class VerifiedDraft:
    """The draft of one request in one step: by whom, how many tokens it had, and how many of them were right."""

    method: _Method
    num_tokens: U32
    num_accepted: U32


@dataclass(frozen=True, slots=True)
class DraftsOfMethod:
    """All drafts of a method since a node's start: how many, and their tokens by the place in the draft, those that
    were verified and those that were right."""

    method: _Method
    num_drafts: _Count
    tokens_by_position: _CountByPosition
    accepted_by_position: _CountByPosition


DraftsByMethod: TypeAlias = Annotated[tuple[DraftsOfMethod, ...], Length(_MAX_METHODS)]
