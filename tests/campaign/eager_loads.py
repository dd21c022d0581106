"""Nodes that load whatever a tier has, however long computing it takes: nearly all loads of a campaign are theirs.

A busy machine computes the prompts of a tiny model sooner than it loads them, so nodes that choose would try little.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

from baton.engine.cache.load_choice import LoadChoice, LoadPlan


def eager() -> Any:
    """While this context lasts, nodes of this process are such nodes. They wait as long as those do that do not know
    what computing takes."""

    def plan(_: LoadChoice, tiers: Sequence[str], start: int, num_tokens: int) -> LoadPlan | None:
        return LoadPlan(tiers, 0.0, 0.0) if tiers else None

    return mock.patch.object(LoadChoice, "plan", plan)
