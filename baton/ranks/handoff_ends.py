"""The two ends of a node's handoffs, over the one pool of a node or over those of its ranks.

Owns which parts of `kvtransfer` make them; the role that opens them closes them.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from baton.engine.build import Engine
from baton.engine.runner.kv_memory import KvMemory
from baton.kvtransfer.incoming_handoffs import ReceivingCounters
from baton.kvtransfer.messages import PeerHello
from baton.kvtransfer.pools.base import HashedPool
from baton.kvtransfer.pools.open import open_pool
from baton.kvtransfer.process_identity import shares_memory
from baton.kvtransfer.sender_connections import SenderOpener
from baton.kvtransfer.sending import SendingCounters
from baton.kvtransfer.transports.base import Receiver
from baton.kvtransfer.transports.part_registry import Network, RankPool, taken_by_ranks
from baton.kvtransfer.transports.registry import PoolMemory, SenderFactory, TransportSettings, open_receivers
from baton.kvtransfer.transports.shm.segment import sweep_orphans
from baton.ranks.transfer.end import RankEnd
from baton.ranks.transfer.lines import RankLines
from baton.ranks.transfer.messages import Begin
from baton.ranks.transfer.pool import RanksPool
from baton.ranks.transfer.receiver import open_ranks_receivers
from baton.ranks.transfer.senders import RanksSenders
from baton.wire.kv_shard import KvShard

OnClose = Callable[[Callable[[], None]], object]
"""Is given what closes what was opened."""


class Transfers(Protocol):
    """Opens the ends. `is_device`: KV is in device memory."""

    is_device: bool

    def receiving(
        self, transports: TransportSettings, counters: ReceivingCounters
    ) -> tuple[Sequence[Receiver], HashedPool]:
        """The receivers, and the pool as a receiving side sees it. Raises `InvalidSetting`."""
        ...

    def sending(self, transports: TransportSettings, counters: SendingCounters) -> tuple[SenderOpener, HashedPool]:
        """The opener of senders, and the pool as a sending side sees it. Raises `InvalidSetting`."""
        ...


def open_transfers(
    engine: Engine,
    transports: TransportSettings,
    memory: PoolMemory,
    begin: Begin,
    num_machines: int,
    on_close: OnClose,
) -> Transfers:
    """The opener of the ends of `engine`, whose ranks are on `num_machines` machines. Raises `InvalidSetting` for a
    transport that the ranks do not have.

    `memory` has allocated the pool. `begin`: what ranks with pools of their own are told first.
    """
    if engine.memory.is_divided:
        return _RankTransfers(engine, transports, taken_by_ranks(transports.choice, num_machines), begin, on_close)
    return _PoolTransfers(engine.memory, memory, on_close)


class _PoolTransfers:
    """The ends of handoffs over one pool of whole blocks."""

    def __init__(self, memory: KvMemory, pool_memory: PoolMemory, on_close: OnClose) -> None:
        self.is_device = not isinstance(memory.blocks, np.ndarray)
        self._memory, self._pool_memory = memory, pool_memory
        self._on_close = on_close

    def receiving(
        self, transports: TransportSettings, counters: ReceivingCounters
    ) -> tuple[Sequence[Receiver], HashedPool]:
        """A receiver for each transport, and the pool. Raises `InvalidSetting`."""
        pool = open_pool(self._memory.blocks)
        receivers = open_receivers(transports, self._pool_memory, pool, self._memory.layout)
        for receiver in receivers:
            self._on_close(receiver.close)
        return receivers, pool

    def sending(self, transports: TransportSettings, counters: SendingCounters) -> tuple[SenderOpener, HashedPool]:
        """What opens senders, and the pool. The sending thread has a view of the pool of its own."""
        pool = open_pool(self._memory.blocks)
        senders = SenderFactory(transports, self._pool_memory, pool)
        self._on_close(senders.close)
        return senders, pool


class _RankTransfers:
    """The ends of handoffs where each rank moves what lies in its own pool."""

    def __init__(
        self, engine: Engine, transports: TransportSettings, taken: Sequence[str], begin: Begin, on_close: OnClose
    ) -> None:
        self._transports, self._taken, memory = transports, taken, engine.memory
        self._own = RankPool(open_pool(memory.blocks), memory.layout, memory.shard.kv, memory.descriptor)
        self.is_device = self._own.pool.is_device
        on_close(_sweep)
        self._network = Network(transports.context, transports.host, transports.links)
        self._begin, self._on_close = begin, on_close
        self._receiving_ends: dict[KvShard, socket.socket] = {}
        self._sending_ends: dict[KvShard, socket.socket] = {}
        for shard, (receiving, sending) in engine.executor.take_transfer_ends().items():
            self._receiving_ends[shard.kv], self._sending_ends[shard.kv] = receiving, sending
            on_close(receiving.close)
            on_close(sending.close)

    def receiving(
        self, transports: TransportSettings, counters: ReceivingCounters
    ) -> tuple[Sequence[Receiver], HashedPool]:
        """Receivers that combine those of all ranks, and the pool they form. Raises `InvalidSetting`."""
        lines = self._lines(self._receiving_ends)
        receivers = open_ranks_receivers(lines, counters, self._taken, is_device=self.is_device)
        return receivers, RanksPool(lines, self._own.layout)

    def sending(self, transports: TransportSettings, counters: SendingCounters) -> tuple[SenderOpener, HashedPool]:
        """What opens a sender at every rank, and the pool they form."""
        lines = self._lines(self._sending_ends)
        senders = RanksSenders(lines, counters, self._taken, self._shares_memory, are_mapping=self.is_device)
        return senders, RanksPool(lines, self._own.layout)

    def _shares_memory(self, hello: PeerHello) -> bool:
        return shares_memory(self._transports.process, hello.process)

    def _lines(self, ends: Mapping[KvShard, socket.socket]) -> RankLines:
        lines = RankLines(RankEnd(self._own.for_thread(), self._network), self._own.shard, ends, self._begin)
        self._on_close(lines.close)
        return lines


def _sweep() -> None:
    """Remove segments of ranks that were killed: there may be no later start that would."""
    with contextlib.suppress(OSError):
        sweep_orphans()
