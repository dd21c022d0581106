"""Builds a prefill node: engine + sending side + transports."""

from __future__ import annotations

from engine.api import links
from engine.runner.kv_memory import ByteArray, allocate_private
from engine.service.loop import Leg
from engine.service.process import Context, NodeParts
from engine.service.settings import NodeSettings
from kvtransfer.host import this_process
from kvtransfer.pusher import Pusher
from kvtransfer.sending import SendingFacts, SendingSide, open_listener
from kvtransfer.transports.registry import SenderFactory
from prefill_node.leg import EngineBlocks, PrefillLeg


class PrefillRole:
    """See `engine.service.process.Role`."""

    name = "prefill"

    def __init__(self, settings: NodeSettings, context: Context, link_settings: links.LinkSettings) -> None:
        self._settings = settings
        self._context = context
        self._links = link_settings
        self._pusher: Pusher | None = None

    def allocate(self, num_bytes: int) -> ByteArray:
        """Nobody else touches this pool: private memory."""
        return allocate_private(num_bytes)

    def build_leg(self, parts: NodeParts) -> tuple[Leg, str]:
        """See `Role`."""
        blocks = parts.engine.memory.blocks
        facts = SendingFacts(
            node_id=parts.node_id,
            epoch=parts.epoch,
            fingerprint=parts.engine.fingerprint,
            layout=parts.engine.memory.layout,
            process=this_process(),
            lease_s=self._settings.lease_s,
        )
        link, address = open_listener(self._context, self._settings.host, self._settings.port, self._links)
        self._pusher = Pusher(blocks)
        opener = SenderFactory(self._settings.kv_transport, self._context, blocks, facts.process, self._links)
        core = parts.engine.core
        sending = SendingSide(facts, link, opener, self._pusher, EngineBlocks(core))
        return PrefillLeg(core, sending, [link, self._pusher.wakeup]), address

    def close(self) -> None:
        """End the pushing thread."""
        if self._pusher is not None:
            self._pusher.close()
