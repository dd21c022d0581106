"""Where the KV pool of a node lies, and how KV leaves it and comes into it.

Owns the pool's memory, the other ranks that share it, and each end of a handoff that a leg asks for. Knows no leg. What
is opened is closed here, in two steps: the ends before the engine whose KV they move, the memory after it.

Invariant: memory that peers may write into is allocated for a role that says so, and for no other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace

import zmq

from baton.engine.build import Engine
from baton.engine.runner.kv_memory import ByteArray, SharedRegion, allocate_private
from baton.kvtransfer.facts import ReceivingFacts, SendingFacts
from baton.kvtransfer.incoming_handoffs import ReceivingCounters
from baton.kvtransfer.integrity import resolve
from baton.kvtransfer.process_identity import this_process
from baton.kvtransfer.receiving_end import ReceivingEnd, open_receiving_end
from baton.kvtransfer.sending import SendingCounters
from baton.kvtransfer.sending_end import ListenAt, SendingEnd, open_sending_end
from baton.kvtransfer.transports.registry import PoolMemory, TransportSettings, listens, load_plugged
from baton.node.settings import NodeSettings
from baton.ranks.handoff_ends import Transfers, open_transfers
from baton.ranks.opening import open_ranks
from baton.ranks.transfer.messages import Begin
from baton.runtime.watchdog import Beat
from baton.wire import links

Context = zmq.Context[zmq.Socket[bytes]]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NodeParts:
    """One life of a node: its engine, its id and epoch, and a function that makes the beat of a thread, by its name."""

    engine: Engine
    node_id: str
    epoch: int
    watch: Callable[[str], Beat]


class NodePool:
    """A node's KV pool and what moves its KV. `use` says who may write into it (`PoolMemory.role`); `ranks` starts the
    other ranks of the node's engine."""

    def __init__(
        self, settings: NodeSettings, context: Context, link_settings: links.LinkSettings, role: str, use: str
    ) -> None:
        self._settings, self._role = settings, role
        self._transports = TransportSettings(
            settings.kv_transport,
            context,
            settings.host,
            link_settings,
            this_process(),
            settings.port,
            load_plugged(settings.kv_transport),
        )
        has_ranks = settings.num_ranks > 1 and not settings.divides_pool
        self._memory = PoolMemory(self._transports, use, allocate_private, has_ranks, reserved_bytes=0)
        self._opened = ExitStack()
        self._opened.callback(self._memory.close)
        self.ranks = open_ranks(settings, role, link_settings.cluster_key, self._opened.callback)

    def allocate(self, num_bytes: int) -> ByteArray | SharedRegion:
        """Host memory, where the transports reach it, and the other ranks of the node if it has any."""
        array = self._memory.allocate(num_bytes)
        return array if self._memory.segment is None else SharedRegion(array, self._memory.segment.descriptor)

    def open_ends(self, parts: NodeParts) -> Ends:
        """The opener of the ends over the pool of this engine. Raises `InvalidSetting`."""
        settings, transports, engine = self._settings, self._transports, parts.engine
        begin = Begin(settings.host, settings.cluster_key, self._role)
        transfers = open_transfers(
            engine, transports, self._memory, begin, settings.rank_machines, self._opened.callback
        )
        checksum = resolve(
            settings.kv_checksum, in_device_memory=transfers.is_device, in_rank_pools=settings.expects_rank_pools
        )
        facts = SendingFacts(
            parts.node_id,
            parts.epoch,
            engine.fingerprint,
            engine.memory.layout,
            transports.process,
            settings.lease_s,
            checksum,
        )
        return Ends(transfers, transports, facts, engine.num_blocks, parts.watch, pulls=settings.enable_prefix_pulls)

    def close(self) -> None:
        """Close data sockets and processes, then the pool's memory."""
        self._opened.close()


class Ends:
    """Opens each end once; both run until they are closed. `transports`: those of the node. `pulls`: it takes prefixes
    from other nodes, and lends them. Whichever is opened first has the node's first port."""

    def __init__(
        self,
        transfers: Transfers,
        transports: TransportSettings,
        facts: SendingFacts,
        num_blocks: int,
        watch: Callable[[str], Beat],
        *,
        pulls: bool = True,
    ) -> None:
        self.transports, self.pulls = transports, pulls
        self._transfers, self._facts, self._num_blocks, self._watch = transfers, facts, num_blocks, watch
        self._num_ports_taken = 0
        self._opened = ExitStack()

    def receive(self, transports: TransportSettings) -> ReceivingEnd:
        """The end by which the KV of peers comes into the pool, by `transports`: on the next ports. Raises
        `InvalidSetting`."""
        own, counters = self._facts, ReceivingCounters()
        receivers, pool = self._transfers.receiving(self._on_next_port(transports), counters)
        for receiver in receivers:
            _log.info("KV comes by %s at %s", receiver.endpoint.transport, receiver.endpoint.address)
        self._num_ports_taken += sum(map(listens, receivers))
        facts = ReceivingFacts(
            own.node_id,
            own.epoch,
            own.fingerprint,
            own.layout,
            self._num_blocks,
            own.process,
            own.lease_s,
            own.checksum,
        )
        beat = self._watch("kv-receiving thread")
        end = open_receiving_end(facts, transports.context, transports.links, receivers, pool, beat, counters)
        self._opened.callback(end.close)
        return end

    def send(self, transports: TransportSettings) -> tuple[SendingEnd, str]:
        """The end that hands KV over by `transports`, and the address at which receivers dial it: on the next port.
        Raises `InvalidSetting`."""
        counters = SendingCounters()
        senders, pool = self._transfers.sending(transports, counters)
        port = self._on_next_port(transports).port
        self._num_ports_taken += 1
        at = ListenAt(transports.context, transports.host, port, transports.links)
        beat = self._watch("kv-sending thread")
        end, address = open_sending_end(self._facts, at, senders, pool, beat, counters)
        self._opened.callback(end.close)
        return end, address

    def _on_next_port(self, transports: TransportSettings) -> TransportSettings:
        """Port 0 stays 0: the system chooses."""
        return replace(transports, port=transports.port and transports.port + self._num_ports_taken)

    def close(self) -> None:
        """End the threads of both ends and close their connections."""
        self._opened.close()
