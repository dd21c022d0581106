"""The two ends of a node's handoffs, over the one pool of a node or over those of its ranks.

Owns which parts of `kvtransfer` make them; the role that opens them closes them.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, cast

import numpy as np

from engine.build import Engine
from engine.runner.kv_memory import ByteArray, KvMemory
from kvtransfer.incoming_handoffs import ReceivingCounters
from kvtransfer.pools.base import HashedPool
from kvtransfer.pools.host import HostPool
from kvtransfer.ranks.end import Network, RankEnd, RankPool
from kvtransfer.ranks.lines import RankLines
from kvtransfer.ranks.messages import Begin
from kvtransfer.ranks.pool import RanksPool
from kvtransfer.ranks.receiver import RanksReceiver
from kvtransfer.ranks.senders import RanksSenders
from kvtransfer.sender_connections import SenderOpener
from kvtransfer.sending import SendingCounters
from kvtransfer.transports.base import Receiver
from kvtransfer.transports.registry import (
    AUTO,
    ZMQ,
    PoolMemory,
    SenderFactory,
    TransportSettings,
    open_pool,
    open_receivers,
)
from wire.errors import InvalidSetting
from wire.kv_share import KvShare

OnClose = Callable[[Callable[[], None]], object]
"""Is given what closes what was opened."""


class Transfers(Protocol):
    """Opens the ends. `is_device`: KV is in device memory."""

    is_device: bool

    def receiving(self, counters: ReceivingCounters) -> tuple[Sequence[Receiver], HashedPool]:
        """What receives, and the pool as a receiving side sees it. Raises `InvalidSetting`."""
        ...

    def sending(self, transports: TransportSettings, counters: SendingCounters) -> tuple[SenderOpener, HashedPool]:
        """What opens senders, and the pool as a sending side sees it. Raises `InvalidSetting`."""
        ...


def open_transfers(
    engine: Engine, transports: TransportSettings, memory: PoolMemory, begin: Begin, on_close: OnClose
) -> Transfers:
    """Those of `engine`. `memory`: has allocated its pool; `begin`: what ranks with pools of their own are told first.
    Raises `InvalidSetting` for a transport that they do not have."""
    if engine.memory.is_divided:
        return _RankTransfers(engine, transports, begin, on_close)
    return _PoolTransfers(engine.memory, transports, memory, on_close)


class _PoolTransfers:
    """See `Transfers`: one pool of whole blocks."""

    def __init__(
        self, memory: KvMemory, transports: TransportSettings, pool_memory: PoolMemory, on_close: OnClose
    ) -> None:
        self.is_device = not isinstance(memory.blocks, np.ndarray)
        self._memory, self._transports, self._pool_memory = memory, transports, pool_memory
        self._on_close = on_close

    def receiving(self, counters: ReceivingCounters) -> tuple[Sequence[Receiver], HashedPool]:
        """See `Transfers.receiving`."""
        pool = open_pool(self._memory.blocks)
        receivers = open_receivers(self._transports, self._pool_memory, pool, self._memory.layout)
        for receiver in receivers:
            self._on_close(receiver.close)
        return receivers, pool

    def sending(self, transports: TransportSettings, counters: SendingCounters) -> tuple[SenderOpener, HashedPool]:
        """See `Transfers.sending`. The sending thread has a view of the pool of its own."""
        pool = open_pool(self._memory.blocks)
        senders = SenderFactory(transports, self._pool_memory, pool)
        self._on_close(senders.close)
        return senders, pool


class _RankTransfers:
    """See `Transfers`: each rank moves what lies in its own pool."""

    is_device = False

    def __init__(self, engine: Engine, transports: TransportSettings, begin: Begin, on_close: OnClose) -> None:
        if transports.choice not in (AUTO, ZMQ):
            raise InvalidSetting(f"--kv-transport {transports.choice}: ranks with pools of their own have zmq alone")
        memory = engine.memory
        self._own = RankPool(HostPool(cast("ByteArray", memory.blocks)), memory.layout, memory.shard.kv)
        self._network = Network(transports.context, transports.host, transports.links)
        self._begin, self._on_close = begin, on_close
        self._receiving_ends: dict[KvShare, socket.socket] = {}
        self._sending_ends: dict[KvShare, socket.socket] = {}
        for shard, (receiving, sending) in engine.executor.take_transfer_ends().items():
            self._receiving_ends[shard.kv], self._sending_ends[shard.kv] = receiving, sending
            on_close(receiving.close)
            on_close(sending.close)

    def receiving(self, counters: ReceivingCounters) -> tuple[Sequence[Receiver], HashedPool]:
        """See `Transfers.receiving`."""
        lines = self._lines(self._receiving_ends)
        return [RanksReceiver(lines, counters)], RanksPool(lines, self._own.layout)

    def sending(self, transports: TransportSettings, counters: SendingCounters) -> tuple[SenderOpener, HashedPool]:
        """See `Transfers.sending`."""
        lines = self._lines(self._sending_ends)
        return RanksSenders(lines, counters), RanksPool(lines, self._own.layout)

    def _lines(self, ends: Mapping[KvShare, socket.socket]) -> RankLines:
        lines = RankLines(RankEnd(self._own, self._network), self._own.share, ends, self._begin)
        self._on_close(lines.close)
        return lines
