"""Builds a decode node: engine + receiving side + sending side + transports."""

from __future__ import annotations

import logging
from contextlib import ExitStack

from decode_node.leg import DecodeLeg
from decode_node.source import Source
from engine.runner.kv_memory import ByteArray, SharedRegion, allocate_private
from kvtransfer.commands import ReceivingNotice
from kvtransfer.facts import ReceivingFacts, SendingFacts
from kvtransfer.integrity import resolve
from kvtransfer.mailbox import Mailbox
from kvtransfer.process_identity import this_process
from kvtransfer.receiving import ReceivingSide
from kvtransfer.sending_end import ListenAt, SendingEnd, open_sending_end
from kvtransfer.thread import TransferThread
from kvtransfer.transports.registry import (
    NIXL,
    PoolMemory,
    SenderFactory,
    TransportSettings,
    listens,
    open_pool,
    open_receivers,
    source_settings,
)
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
        has_ranks = settings.tensor_parallel_size > 1
        self._memory = PoolMemory(self._transports, "receiver", allocate_private, is_shared=has_ranks)
        self._opened = ExitStack()
        self._opened.callback(self._memory.close)

    def allocate(self, num_bytes: int) -> ByteArray | SharedRegion:
        """Memory that peers can reach, if the transport writes into memory."""
        array = self._memory.allocate(num_bytes)
        return array if self._memory.segment is None else SharedRegion(array, self._memory.segment.descriptor)

    def build_leg(self, parts: NodeParts) -> tuple[Leg, str]:
        """See `Role`. Decode nodes that go on with requests of this one dial its address; it has none where nothing but
        nixl may carry KV, which would take a second agent."""
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
        thread = TransferThread(receiving, "kv-receiving", pool.enter, parts.watch("kv-receiving thread"))
        thread.start()
        end, address = self._open_source(parts, facts, len([each for each in receivers if listens(each)]))
        leg = DecodeLeg(parts.engine.core, receiving, thread, notices, FirstSteps(), Source(parts.engine.core, end))
        return leg, "" if self._settings.kv_transport == NIXL else address

    def _open_source(self, parts: NodeParts, own: ReceivingFacts, num_ports_taken: int) -> tuple[SendingEnd, str]:
        """The sending side, which has a view of the pool for its own thread, and its address."""
        settings = self._settings
        pool = open_pool(parts.engine.memory.blocks)
        senders = SenderFactory(source_settings(self._transports), self._memory, pool)
        self._opened.callback(senders.close)
        facts = SendingFacts(
            own.node_id, own.epoch, own.fingerprint, own.layout, own.process, own.lease_s, own.checksum
        )
        port = settings.port and settings.port + num_ports_taken
        at = ListenAt(self._context, settings.host, port, self._links)
        return open_sending_end(facts, at, senders, pool, parts.watch("kv-sending thread"))

    def close(self) -> None:
        """Close data sockets and processes, then shared segments."""
        self._opened.close()
