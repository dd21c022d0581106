"""Settings of a prefill node."""

from __future__ import annotations

from dataclasses import dataclass

from engine.service.settings import NodeSettings


@dataclass(frozen=True, slots=True)
class PrefillNodeSettings(NodeSettings):
    """Nothing beyond what every node has."""
