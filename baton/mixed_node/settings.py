"""Settings of a mixed node."""

from __future__ import annotations

from dataclasses import dataclass

from baton.node.settings import NodeSettings
from baton.runtime.settings import setting
from baton.wire.messages import BOTH, DECODE, PREFILL


@dataclass(frozen=True, slots=True)
class MixedNodeSettings(NodeSettings):
    """Those of every node, and what this one prefers."""

    role: str = setting(
        BOTH, "the legs that the node is given where there is a choice; it can do any", choices=(PREFILL, DECODE, BOTH)
    )
