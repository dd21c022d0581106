"""Settings of a decode node."""

from __future__ import annotations

from dataclasses import dataclass

from node.settings import NodeSettings


@dataclass(frozen=True, slots=True)
class DecodeNodeSettings(NodeSettings):
    """Nothing beyond what every node has."""
