"""What a node is to its routers and peers, and the leg it serves: the one thing in which node programs differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton.engine.build import Engine
from baton.node.pool import Ends
from baton.node.sharing_leg import SharingLeg


@dataclass(frozen=True, slots=True)
class Role:
    """One role of a node.

    `name`: `PREFILL` or `DECODE` of `baton.wire.messages.membership`. `pool`: `SENDER` or `RECEIVER`, see
    `PoolMemory.role`. `open_leg` asks for the ends that the leg needs, which are closed after it. It returns the leg,
    and the address at which peers dial this node ("" where they do not). It raises `BatonError`. `preference`: see
    `Hello.prefers`.
    """

    name: str
    pool: str
    open_leg: Callable[[Engine, Ends], tuple[SharingLeg, str]]
    preference: str = ""
