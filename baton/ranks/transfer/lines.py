"""The lines of one transfer thread of a driver to every rank of its node, its own among them.

Owns the channels, and who hears of which kind of report. A node has such lines for each of its transfer threads, so
nothing is shared between them. A rank that says nothing, or is gone, fails the thread, and so its node: a little
later, because whoever watches the processes can tell why.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from baton.ranks.transfer.end import RankEnd
from baton.ranks.transfer.messages import Begin, Order, Report, TransferChannel
from baton.runtime.channel import ChannelBroken
from baton.wire.kv_shard import KvDivision, KvShard

SAY_S = 10.0
"""How long a rank may leave a message unread, or take for the rest of one."""
_REASON_S = 1.0
Handler = Callable[[KvShard, Any], None]
"""Takes a report, and whose it is."""


class RankLines:
    """The lines of one transfer thread to all ranks. `own`: the driver's end; `sockets`: to the other ranks, which are
    told `begin` first. Raises `ChannelBroken`."""

    def __init__(
        self, own: RankEnd, own_shard: KvShard, sockets: Mapping[KvShard, socket.socket], begin: Begin
    ) -> None:
        self.division: KvDivision = own_shard.division
        self._own, self._own_shard = own, own_shard
        self._channels = {shard: TransferChannel(end, f"rank {shard}") for shard, end in sockets.items()}
        self._handlers: dict[type[Any], Handler] = {}
        self._reason_s = _REASON_S
        self._tell_others(begin)

    def enter(self) -> None:
        """Have the calling thread be the one that uses the driver's own pool."""
        self._own.enter()

    def hear(self, kind: type[Report], handler: Handler) -> None:
        """Have reports of this kind handled."""
        self._handlers[kind] = handler

    def tell(self, order: Order) -> None:
        """Tell every rank, the driver's own first."""
        self._own.take(order)
        self._tell_others(order)

    def round(self) -> None:
        """Have the own rank work, and handle what all ranks have reported."""
        self._own.work()
        reports, self._own.reports = self._own.reports, []
        for report in reports:
            self._handle(self._own_shard, report)
        with self._losing():
            for shard, channel in self._channels.items():
                while channel.is_readable:
                    self._handle(shard, channel.receive(SAY_S))

    def wait(self, timeout_s: float) -> None:
        """Wait for a report of another rank."""
        select.select(list(self._channels.values()), [], [], timeout_s)

    def wait_on(self) -> Sequence[Any]:
        """Sockets that are readable when `round` has something to do."""
        return [*self._channels.values(), *self._own.wait_on()]

    def close(self) -> None:
        """Close all lines; ranks that notice it end theirs."""
        self._own.close()
        for channel in self._channels.values():
            channel.close()

    def _handle(self, shard: KvShard, report: Order | Report) -> None:
        handler = self._handlers.get(type(report))
        if handler is None:
            raise ChannelBroken(f"rank {shard} says {type(report).__name__} out of turn")
        handler(shard, report)

    def _tell_others(self, order: Order) -> None:
        frame = TransferChannel.encode(order)
        with self._losing():
            for channel in self._channels.values():
                channel.send_encoded(frame, SAY_S)

    @contextmanager
    def _losing(self) -> Iterator[None]:
        try:
            yield
        except ChannelBroken:
            reason_s, self._reason_s = self._reason_s, 0.0
            time.sleep(reason_s)
            raise
