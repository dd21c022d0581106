"""Builds a mixed node: a decode node, and a prefill leg over the same engine and the same sending side."""

from __future__ import annotations

from dataclasses import dataclass

from baton.decode_node.node import DecodeRole
from baton.engine.runner.kv_memory import ByteArray, SharedRegion
from baton.kvtransfer.sending_end import SendingEnd
from baton.kvtransfer.transports.registry import NIXL, source_settings
from baton.mixed_node.leg import MixedLeg
from baton.node.first_steps import FirstSteps
from baton.node.loop import Leg
from baton.node.metrics import StepCounters
from baton.node.process import Context, NodeParts
from baton.node.settings import NodeSettings
from baton.prefill_node.leg import PrefillLeg
from baton.wire import links
from baton.wire.messages import DECODE


class MixedRole:
    """See `baton.node.process.Role`. To the router and to other nodes it is a decode node that takes prefill legs
    too."""

    name = DECODE

    def __init__(
        self, settings: NodeSettings, context: Context, link_settings: links.LinkSettings, preference: str
    ) -> None:
        self.preference = preference
        self._decode = DecodeRole(settings, context, link_settings)
        self.ranks = self._decode.ranks

    def allocate(self, num_bytes: int) -> ByteArray | SharedRegion:
        """See `Role`."""
        return self._decode.allocate(num_bytes)

    def build_leg(self, parts: NodeParts) -> tuple[Leg, str]:
        """See `Role`."""
        counters, layer_ends = StepCounters(), parts.engine.memory.layout.layer_ends

        def beside(end: SendingEnd) -> PrefillLeg:
            return PrefillLeg(parts.engine.core, end, layer_ends, FirstSteps(), counters)

        # an agent of nixl either sends or receives: where it is asked for, this node has one of each
        own = self._decode.transports
        sending = own if own.choice == NIXL else source_settings(own)
        decode, prefill, address = self._decode.open_legs(parts, beside, sending, counters)
        return MixedLeg(prefill, decode), address

    def close(self) -> None:
        """See `Role`."""
        self._decode.close()


@dataclass(slots=True)
class MixedRoles:
    """See `baton.node.process.RoleFactory`; of nodes with this preference."""

    preference: str
    name: str = DECODE

    def __call__(self, settings: NodeSettings, context: Context, link_settings: links.LinkSettings, /) -> MixedRole:
        return MixedRole(settings, context, link_settings, self.preference)
