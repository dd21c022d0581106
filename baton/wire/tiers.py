"""What a node tells of the tiers of its KV store, which it names itself. Fields of `baton.wire.messages`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias

from baton.wire.codec import Bounds, Length

_MAX_TIERS = 8
_Name = Annotated[str, Length(128)]


@dataclass(frozen=True, slots=True)
class TierUsage:
    """How full a tier is, 0 to 1."""

    tier: _Name
    usage: Annotated[float, Bounds(0, 1)]


@dataclass(frozen=True, slots=True)
class TierTokens:
    """So many tokens of a prompt have their KV from this tier."""

    tier: _Name
    num_tokens: Annotated[int, Bounds(0, 2**40)]


TierUsages: TypeAlias = Annotated[tuple[TierUsage, ...], Length(_MAX_TIERS)]
TokensByTier: TypeAlias = Annotated[tuple[TierTokens, ...], Length(_MAX_TIERS)]
