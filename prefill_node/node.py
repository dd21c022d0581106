"""Builds a prefill node: engine + sending side + transports."""

from __future__ import annotations

from contextlib import ExitStack

from baton.engine.runner.kv_memory import ByteArray, SharedRegion, allocate_private
from baton.kvtransfer.facts import SendingFacts
from baton.kvtransfer.integrity import resolve
from baton.kvtransfer.process_identity import this_process
from baton.kvtransfer.ranks.messages import Begin
from baton.kvtransfer.sending import SendingCounters
from baton.kvtransfer.sending_end import ListenAt, open_sending_end
from baton.kvtransfer.transports.registry import PoolMemory, TransportSettings
from baton.node.first_steps import FirstSteps
from baton.node.loop import Leg
from baton.node.process import Context, NodeParts
from baton.node.settings import NodeSettings
from baton.prefill_node.leg import PrefillLeg
from baton.ranks.driver import open_transfers
from baton.ranks.opening import open_ranks
from baton.wire import links
from baton.wire.messages import PREFILL


class PrefillRole:
    """See `baton.node.process.Role`."""

    name = PREFILL
    preference = ""

    def __init__(self, settings: NodeSettings, context: Context, link_settings: links.LinkSettings) -> None:
        self._settings = settings
        self._context = context
        self._links = link_settings
        self._transports = TransportSettings(
            settings.kv_transport, context, settings.host, link_settings, this_process()
        )
        has_ranks = settings.num_ranks > 1 and not settings.divides_pool
        self._memory = PoolMemory(self._transports, "sender", allocate_private, is_shared=has_ranks)
        self._opened = ExitStack()
        self._opened.callback(self._memory.close)
        self.ranks = open_ranks(settings, self.name, link_settings.cluster_key, self._opened.callback)

    def allocate(self, num_bytes: int) -> ByteArray | SharedRegion:
        """Memory that the transport can read from."""
        array = self._memory.allocate(num_bytes)
        return array if self._memory.segment is None else SharedRegion(array, self._memory.segment.descriptor)

    def build_leg(self, parts: NodeParts) -> tuple[Leg, str]:
        """See `Role`."""
        settings, layout, counters = self._settings, parts.engine.memory.layout, SendingCounters()
        begin = Begin(settings.host, settings.cluster_key, self.name)
        transfers = open_transfers(
            parts.engine, self._transports, self._memory, begin, settings.rank_machines, self._opened.callback
        )
        facts = SendingFacts(
            node_id=parts.node_id,
            epoch=parts.epoch,
            fingerprint=parts.engine.fingerprint,
            layout=layout,
            process=self._transports.process,
            lease_s=settings.lease_s,
            checksum=resolve(
                settings.kv_checksum,
                in_device_memory=transfers.is_device,
                in_rank_pools=settings.expects_rank_pools,
            ),
        )
        senders, pool = transfers.sending(self._transports, counters)
        at = ListenAt(self._context, settings.host, settings.port, self._links)
        end, address = open_sending_end(facts, at, senders, pool, parts.watch("kv-sending thread"), counters)
        return PrefillLeg(parts.engine.core, end, layout.layer_ends, FirstSteps()), address

    def close(self) -> None:
        """Close the resources that the transports share, then the pool's memory."""
        self._opened.close()
