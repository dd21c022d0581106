"""Settings of a prefill node."""

from __future__ import annotations

from dataclasses import dataclass

from baton.node.settings import NodeSettings


@dataclass(frozen=True, slots=True)
class PrefillNodeSettings(NodeSettings):
    """The settings that every node has, and no others."""
