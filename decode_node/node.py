"""Builds a decode node: engine + receiving side + sending side + transports."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from contextlib import ExitStack
from typing import Protocol, TypeVar

from baton.decode_node.leg import DecodeLeg
from baton.decode_node.source import Source
from baton.engine.runner.kv_memory import ByteArray, SharedRegion, allocate_private
from baton.kvtransfer.commands import ReceivingNotice, SendingNotice
from baton.kvtransfer.facts import ReceivingFacts, SendingFacts
from baton.kvtransfer.incoming_handoffs import ReceivingCounters
from baton.kvtransfer.integrity import resolve
from baton.kvtransfer.mailbox import Mailbox
from baton.kvtransfer.process_identity import this_process
from baton.kvtransfer.ranks.messages import Begin
from baton.kvtransfer.receiving import ReceivingSide
from baton.kvtransfer.sending import SendingCounters
from baton.kvtransfer.sending_end import ListenAt, SendingEnd, open_sending_end
from baton.kvtransfer.thread import TransferThread
from baton.kvtransfer.transports.registry import NIXL, PoolMemory, TransportSettings, listens, source_settings
from baton.node.first_steps import FirstSteps
from baton.node.loop import Leg
from baton.node.metrics import StepCounters
from baton.node.process import Context, NodeParts
from baton.node.settings import NodeSettings
from baton.ranks.driver import Transfers, open_transfers
from baton.ranks.opening import open_ranks
from baton.wire import links
from baton.wire.messages import DECODE
from baton.wire.request_key import RequestKey

_log = logging.getLogger(__name__)


class Beside(Protocol):
    """A leg that uses the engine and the sending side of a decode leg. `keys` shows its requests at any time."""

    @property
    def keys(self) -> Collection[RequestKey]: ...

    def take_notice(self, notice: SendingNotice) -> None:
        """The sending side is done with a handoff that is not the decode leg's."""
        ...


BesideT = TypeVar("BesideT", bound=Beside)


class _Nothing:
    keys: Collection[RequestKey] = ()

    def take_notice(self, notice: SendingNotice) -> None:
        """There are no others."""


def _nothing_beside(end: SendingEnd) -> _Nothing:
    return _Nothing()


class DecodeRole:
    """See `baton.node.process.Role`."""

    name = DECODE
    preference = ""

    def __init__(self, settings: NodeSettings, context: Context, link_settings: links.LinkSettings) -> None:
        self._settings = settings
        self._context = context
        self._links = link_settings
        self.transports = TransportSettings(
            settings.kv_transport, context, settings.host, link_settings, this_process(), settings.port
        )
        has_ranks = settings.num_ranks > 1 and not settings.divides_pool
        self._memory = PoolMemory(self.transports, "receiver", allocate_private, is_shared=has_ranks)
        self._opened = ExitStack()
        self._opened.callback(self._memory.close)
        self.ranks = open_ranks(settings, self.name, link_settings.cluster_key, self._opened.callback)

    def allocate(self, num_bytes: int) -> ByteArray | SharedRegion:
        """Memory that peers can reach, if the transport writes into memory."""
        array = self._memory.allocate(num_bytes)
        return array if self._memory.segment is None else SharedRegion(array, self._memory.segment.descriptor)

    def build_leg(self, parts: NodeParts) -> tuple[Leg, str]:
        """See `Role`. Decode nodes that go on with requests of this one dial its address; it has none where nothing but
        nixl may carry KV, which would take a second agent."""
        leg, _, address = self.open_legs(parts, _nothing_beside, source_settings(self.transports))
        return leg, "" if self._settings.kv_transport == NIXL else address

    def open_legs(
        self,
        parts: NodeParts,
        beside: Callable[[SendingEnd], BesideT],
        sending: TransportSettings,
        counters: StepCounters | None = None,
    ) -> tuple[DecodeLeg, BesideT, str]:
        """The decode leg, the leg that `beside` makes to use its sending side too, and the address of that side, whose
        transports are made from `sending`. `counters`: see `DecodeLeg`."""
        settings = self._settings
        begin = Begin(settings.host, settings.cluster_key, self.name)
        transfers = open_transfers(
            parts.engine, self.transports, self._memory, begin, settings.rank_machines, self._opened.callback
        )
        facts = ReceivingFacts(
            node_id=parts.node_id,
            epoch=parts.epoch,
            fingerprint=parts.engine.fingerprint,
            layout=parts.engine.memory.layout,
            num_blocks=parts.engine.num_blocks,
            process=self.transports.process,
            lease_s=settings.lease_s,
            checksum=resolve(
                settings.kv_checksum,
                in_device_memory=transfers.is_device,
                in_rank_pools=settings.expects_rank_pools,
            ),
        )
        received = ReceivingCounters()
        receivers, pool = transfers.receiving(received)
        for receiver in receivers:
            _log.info("KV comes by %s at %s", receiver.endpoint.transport, receiver.endpoint.address)
        notices: Mailbox[ReceivingNotice] = Mailbox()
        receiving = ReceivingSide(facts, self._context, self._links, receivers, pool, notices, counters=received)
        thread = TransferThread(receiving, "kv-receiving", pool.enter, parts.watch("kv-receiving thread"))
        end, address = self._open_source(parts, facts, transfers, sending, len(list(filter(listens, receivers))))
        other, core = beside(end), parts.engine.core
        thread.start()  # nothing above leaves one behind that polls sockets when a port is taken
        source = Source(core, end, other.take_notice)
        leg = DecodeLeg(core, receiving, thread, notices, FirstSteps(), source, other.keys, counters)
        return leg, other, address

    def _open_source(
        self,
        parts: NodeParts,
        own: ReceivingFacts,
        transfers: Transfers,
        sending: TransportSettings,
        num_ports_taken: int,
    ) -> tuple[SendingEnd, str]:
        """The sending side, which has a view of the pool for its own thread, and its address."""
        settings, counters = self._settings, SendingCounters()
        senders, pool = transfers.sending(sending, counters)
        facts = SendingFacts(
            own.node_id, own.epoch, own.fingerprint, own.layout, own.process, own.lease_s, own.checksum
        )
        port = settings.port and settings.port + num_ports_taken
        at = ListenAt(self._context, settings.host, port, self._links)
        return open_sending_end(facts, at, senders, pool, parts.watch("kv-sending thread"), counters)

    def close(self) -> None:
        """Close data sockets and processes, then shared segments."""
        self._opened.close()
