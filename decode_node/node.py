"""Builds a decode node: engine + receiving side + transports."""

from __future__ import annotations

import logging
from contextlib import ExitStack

from decode_node.leg import DecodeLeg
from engine.runner.kv_memory import ByteArray, allocate_private
from kvtransfer.commands import ReceivingNotice
from kvtransfer.facts import ReceivingFacts
from kvtransfer.integrity import resolve
from kvtransfer.mailbox import Mailbox
from kvtransfer.process_identity import this_process
from kvtransfer.receiving import ReceivingSide
from kvtransfer.thread import TransferThread
from kvtransfer.transports.registry import PoolMemory, TransportSettings, open_pool, open_receivers
from node.first_steps import FirstSteps
from node.loop import Leg
from node.process import Context, NodeParts
from node.settings import NodeSettings
from wire import links
from wire.messages import DECODE

_log = logging.getLogger(__name__)


class DecodeRole:
    """See `node.process.Role`."""

    name = DECODE

    def __init__(self, settings: NodeSettings, context: Context, link_settings: links.LinkSettings) -> None:
        self._settings = settings
        self._context = context
        self._links = link_settings
        self._transports = TransportSettings(
            settings.kv_transport, context, settings.host, link_settings, this_process(), settings.port
        )
        self._memory = PoolMemory(self._transports, "receiver", allocate_private)
        self._opened = ExitStack()
        self._opened.callback(self._memory.close)

    def allocate(self, num_bytes: int) -> ByteArray:
        """Memory that peers can reach, if the transport writes into memory."""
        return self._memory.allocate(num_bytes)

    def build_leg(self, parts: NodeParts) -> tuple[Leg, str]:
        """See `Role`. There is no address, because a decode node dials its peers itself."""
        pool = open_pool(parts.engine.memory.blocks)
        facts = ReceivingFacts(
            node_id=parts.node_id,
            epoch=parts.epoch,
            fingerprint=parts.engine.fingerprint,
            layout=parts.engine.memory.layout,
            num_blocks=parts.engine.num_blocks,
            process=self._transports.process,
            lease_s=self._settings.lease_s,
            checksum=resolve(self._settings.kv_checksum, in_device_memory=pool.is_device),
        )
        receivers = open_receivers(self._transports, self._memory, pool)
        for receiver in receivers:
            self._opened.callback(receiver.close)
            _log.info("KV comes by %s at %s", receiver.endpoint.transport, receiver.endpoint.address)
        notices: Mailbox[ReceivingNotice] = Mailbox()
        receiving = ReceivingSide(facts, self._context, self._links, receivers, pool, notices)
        thread = TransferThread(receiving, "kv-receiving", pool.enter, parts.transfer_beat)
        thread.start()
        return DecodeLeg(parts.engine.core, receiving, thread, notices, FirstSteps()), ""

    def close(self) -> None:
        """Close data sockets and processes, then shared segments."""
        self._opened.close()
