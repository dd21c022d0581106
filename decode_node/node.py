"""Builds a decode node: engine + receiving side + transports."""

from __future__ import annotations

from decode_node.leg import DecodeLeg
from engine.api import links
from engine.runner.kv_memory import ByteArray
from engine.service.loop import Leg
from engine.service.process import Context, NodeParts
from engine.service.settings import NodeSettings
from kvtransfer.host import this_process
from kvtransfer.receiving import ReceivingFacts, ReceivingSide
from kvtransfer.transports.registry import PoolMemory


class DecodeRole:
    """See `engine.service.process.Role`."""

    name = "decode"

    def __init__(self, settings: NodeSettings, context: Context, link_settings: links.LinkSettings) -> None:
        self._settings = settings
        self._context = context
        self._links = link_settings
        self._memory = PoolMemory(settings.kv_transport, context, settings.host, link_settings)

    def allocate(self, num_bytes: int) -> ByteArray:
        """Where peers can reach it, if the transport writes into memory."""
        return self._memory.allocate(num_bytes)

    def build_leg(self, parts: NodeParts) -> tuple[Leg, str]:
        """See `Role`. Nobody dials a decode node: it dials."""
        blocks = parts.engine.memory.blocks
        facts = ReceivingFacts(
            node_id=parts.node_id,
            epoch=parts.epoch,
            fingerprint=parts.engine.fingerprint,
            layout=parts.engine.memory.layout,
            num_blocks=parts.engine.num_blocks,
            process=this_process(),
            lease_s=self._settings.lease_s,
        )
        leg = DecodeLeg(parts.engine.core, self._settings.lease_s)
        receivers = self._memory.open_receivers(blocks)
        leg.attach(ReceivingSide(facts, self._context, self._links, receivers, blocks, leg))
        return leg, ""

    def close(self) -> None:
        """Remove shared segments and data sockets."""
        self._memory.close()
