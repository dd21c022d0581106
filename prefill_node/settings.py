"""Settings of a prefill node."""

from __future__ import annotations

from dataclasses import dataclass

from node.settings import NodeSettings


@dataclass(frozen=True, slots=True)
class PrefillNodeSettings(NodeSettings):
    """The settings that every node has, and no others."""
