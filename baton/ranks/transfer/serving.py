"""The transfer threads of a rank that is not the driver's: each carries out what one of the driver's says.

Owns a thread's loop. It ends with the driver; when it fails, it closes its channel, which ends the driver's thread and
so the node.

What a peer sends goes straight to a rank, what the driver orders may have to go to another machine first. So a rank
there waits for an order: for `ORDER_S`, once for each handoff that it was never told of, and once for doubled blocks of
a grant. The thread does nothing else meanwhile, and a peer that holds the cluster key and sends what nobody has granted
can keep it from its work.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence

import zmq

from baton.kvtransfer.transports.part_registry import Network, RankPool
from baton.ranks.transfer.end import RankEnd
from baton.ranks.transfer.lines import SAY_S
from baton.ranks.transfer.messages import Begin, TransferChannel
from baton.runtime.channel import ChannelBroken

_IDLE_MS = 1000
_BUSY_MS = 1
ORDER_S = 2.0
_log = logging.getLogger(__name__)

OpenNetwork = Callable[[Begin], Network]
"""Sockets and keys as the driver says."""


def start_transfers(
    own: RankPool, ends: Sequence[socket.socket], open_network: OpenNetwork, order_s: float = 0.0
) -> Sequence[threading.Thread]:
    """Begin with a thread for each of these channels to the driver. Each ends with its channel. `order_s`: for how long
    an order may be on its way while what it is about has come."""
    channels = [TransferChannel(end, "the driver") for end in ends]
    threads = [
        threading.Thread(target=_serve, args=(own.for_thread(), each, open_network, order_s), daemon=True)
        for each in channels
    ]
    for thread in threads:
        thread.start()
    return threads


def _serve(own: RankPool, channel: TransferChannel, open_network: OpenNetwork, order_s: float) -> None:
    try:
        begin = channel.receive(None)
        if not isinstance(begin, Begin):
            raise ChannelBroken("the driver begins with something else")
        end = RankEnd(own, open_network(begin), lambda is_known: _look(end, channel, is_known, order_s))
        _carry_out(end, channel)
    except ChannelBroken:
        pass  # the driver is gone, and this process ends
    except Exception:  # nobody could catch it: the driver notices that the channel is closed
        _log.exception("the transfers of this rank have failed")
    finally:
        channel.close()


def _carry_out(end: RankEnd, channel: TransferChannel) -> None:
    try:
        end.enter()
        while True:
            _turn(end, channel)
    finally:
        end.close()


def _take_orders(end: RankEnd, channel: TransferChannel) -> None:
    while channel.is_readable:
        order = channel.receive(SAY_S)
        end.take(order)  # type: ignore[arg-type]


def _look(end: RankEnd, channel: TransferChannel, is_known: Callable[[], bool], order_s: float) -> None:
    deadline_s = time.monotonic() + order_s
    _take_orders(end, channel)
    while not is_known() and (left_s := deadline_s - time.monotonic()) > 0:
        select.select([channel], [], [], left_s)
        _take_orders(end, channel)


def _turn(end: RankEnd, channel: TransferChannel) -> None:
    poller = zmq.Poller()
    for source in (channel, *end.wait_on()):
        poller.register(source, zmq.POLLIN)
    poller.poll(_BUSY_MS if end.is_busy else _IDLE_MS)
    _take_orders(end, channel)
    end.work()
    reports, end.reports = end.reports, []
    for report in reports:
        channel.send(report, SAY_S)
