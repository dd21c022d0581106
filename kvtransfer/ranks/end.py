"""What one rank does of its node's handoffs: it receives, sends and adds up what lies in its own pool, as it is told.

Owns the rank's sockets and what it has been told and not reported yet. Decides nothing: which blocks may be written,
what is sent to whom, and what a handoff is, is the driver's. The driver has such an end for its own pool, too.

What may happen to the driver: if it is gone, the process of the rank ends. To a peer: what it sends and no grant has
announced changes nothing (`tcp_zmq`); a receiver that cannot be reached is reported, and its sender is of no use then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq

from kvtransfer.messages import Endpoint
from kvtransfer.parts import part_runs
from kvtransfer.pools.cut import StrandTotals, source_of
from kvtransfer.pools.host import HostPool
from kvtransfer.ranks.inlets import RankInlets
from kvtransfer.ranks.messages import (
    AddUp,
    Arrived,
    Broken,
    Expect,
    Forget,
    Forgotten,
    Listen,
    Listening,
    Order,
    Part,
    Push,
    Reach,
    Read,
    Report,
    Taken,
    Totals,
)
from kvtransfer.transports import tcp_zmq
from kvtransfer.transports.base import Move, Sender
from kvtransfer.transports.fan_out import FanOutSender
from wire.errors import BatonError
from wire.kv_share import WHOLE_BLOCK, KvShare
from wire.layout import KvLayout
from wire.links import LinkSettings
from wire.request_key import RequestKey


@dataclass(frozen=True, slots=True)
class RankPool:
    """The pool of one rank: it holds `share` of blocks of `layout`."""

    pool: HostPool
    layout: KvLayout
    share: KvShare


@dataclass(frozen=True, slots=True)
class Network:
    """Where a process listens, and with which keys it talks."""

    context: zmq.Context[zmq.Socket[bytes]]
    host: str
    links: LinkSettings


def open_parts(
    own: RankPool, network: Network, targets: Sequence[tuple[KvShare, str]]
) -> tuple[list[tcp_zmq.ZmqSender], int]:
    """Senders of what this rank has for each of these ranks of a receiver, and how many bytes of a block these are.
    Raises `TransferFailed` for an address that cannot be dialled."""
    senders: list[tcp_zmq.ZmqSender] = []
    num_bytes, source = 0, None if own.share == WHOLE_BLOCK else own.share
    for target, address in targets:
        runs = part_runs(own.layout, own.share.division, target).get(own.share)
        if runs:
            part = source_of(own.pool, runs)
            num_bytes += part.block_bytes
            endpoint = Endpoint(tcp_zmq.NAME, address)
            senders.append(tcp_zmq.ZmqSender(network.context, endpoint, part, network.links, source))
    return senders, num_bytes


@dataclass(slots=True)
class _Outgoing:
    """A sender towards one receiver. `told`: pushes that it has not taken; `taken`: how many it has, by handoff, of
    how many blocks."""

    number: int
    sender: Sender
    bytes_per_block: int
    told: deque[tuple[RequestKey, Sequence[Move]]] = field(default_factory=deque)
    taken: dict[RequestKey, tuple[int, int]] = field(default_factory=dict)
    is_closed: bool = False


class RankEnd:
    """See the module. Driven by one thread: `take` orders, `work`, and hand on the `reports`."""

    def __init__(self, own: RankPool, network: Network) -> None:
        self.reports: list[Report] = []
        self._own = own
        self._network = network
        self._totals = StrandTotals(own.pool, own.layout, own.share)
        self._receiver: tcp_zmq.ZmqReceiver | None = None
        self._expected: dict[RequestKey, int] = {}
        self._num_told_bytes = 0
        self._outgoing: dict[int, _Outgoing] = {}

    @property
    def is_busy(self) -> bool:
        """Whether there is something that nothing wakes it for."""
        return any(outgoing.told or outgoing.taken for outgoing in self._outgoing.values())

    def wait_on(self) -> Sequence[Any]:
        """Sockets that are readable when `work` has something to do."""
        sending = [source for outgoing in self._outgoing.values() for source in outgoing.sender.wait_on()]
        return [*sending, *(self._receiver.wait_on() if self._receiver is not None else ())]

    def take(self, order: Order) -> None:
        """Carry out an order."""
        match order:
            case Listen():
                self._listen()
            case Expect():
                self._expected[order.key] = order.number
                self._listening().expect(order.key, order.block_ids, order.generations)
            case Forget():
                self._expected.pop(order.key, None)
                self._listening().forget(order.key)
                self.reports.append(Forgotten(order.key))
            case Reach():
                self._reach(order)
            case Push():
                self._push(order)
            case Part():
                self._part(order.number)
            case AddUp():
                self.reports.append(Totals(order.number, tuple(self._totals.of(order.block_ids))))
            case _:
                raise ValueError(f"{type(order).__name__} is no order to a rank that has begun")

    def work(self) -> None:
        """Take what has arrived, and send what can be sent."""
        if self._receiver is not None:
            self._receiver.poll()
            for each in self._receiver.take_arrivals():
                number, num_bytes = self._expected[each.key], self._receiver.num_bytes - self._num_told_bytes
                self._num_told_bytes += num_bytes
                self.reports.append(Arrived(number, each.key, each.first_index, each.count, num_bytes))
        for outgoing in tuple(self._outgoing.values()):
            self._send(outgoing)

    def close(self) -> None:
        """Close its sockets."""
        if self._receiver is not None:
            self._receiver.close()
        for outgoing in self._outgoing.values():
            outgoing.sender.close()

    def _listen(self) -> None:
        own, network = self._own, self._network
        inlets = RankInlets(own.pool, own.layout, own.share)
        self._receiver = tcp_zmq.ZmqReceiver(network.context, network.host, own.pool, network.links, inlets=inlets)
        self.reports.append(Listening(self._receiver.endpoint.address))

    def _listening(self) -> tcp_zmq.ZmqReceiver:
        if self._receiver is None:
            raise ValueError("the rank was not told to listen")
        return self._receiver

    def _reach(self, order: Reach) -> None:
        targets = list(zip(order.division.shares, order.addresses, strict=True))
        try:
            senders, num_bytes = open_parts(self._own, self._network, targets)
        except BatonError as error:
            senders, num_bytes = [], 0
            self.reports.append(Broken(order.number, str(error)))
        self._outgoing[order.number] = _Outgoing(order.number, FanOutSender(senders), num_bytes)

    def _push(self, order: Push) -> None:
        columns = zip(order.sources, order.targets, order.generations, strict=True)
        moves = [Move(order.first_index + place, *column) for place, column in enumerate(columns)]
        outgoing = self._outgoing.get(order.number)
        if outgoing is None or outgoing.is_closed:  # it has broken, and the driver has not heard yet
            self.reports += [Taken(order.number), Read(order.number, order.key, 1, 0)]
        else:
            outgoing.told.append((order.key, moves))

    def _part(self, number: int) -> None:
        outgoing = self._outgoing.get(number)
        if outgoing is not None:
            outgoing.is_closed = True
            outgoing.sender.close()

    def _send(self, outgoing: _Outgoing) -> None:
        if not outgoing.is_closed:
            try:
                outgoing.sender.poll()
                self._push_told(outgoing)
            except BatonError as error:
                self.reports.append(Broken(outgoing.number, str(error)))
                outgoing.is_closed = True
                outgoing.sender.close()
        if outgoing.is_closed:
            self._drop_told(outgoing)
        for key, (count, num_blocks) in tuple(outgoing.taken.items()):
            if not outgoing.sender.is_reading(key):
                del outgoing.taken[key]
                num_bytes = num_blocks * outgoing.bytes_per_block
                self.reports.append(Read(outgoing.number, key, count, num_bytes))
        if outgoing.is_closed and not outgoing.taken:
            del self._outgoing[outgoing.number]

    def _push_told(self, outgoing: _Outgoing) -> None:
        while outgoing.told and outgoing.sender.push(*outgoing.told[0]):
            key, moves = outgoing.told.popleft()
            self._note_taken(outgoing, key, len(moves))

    def _drop_told(self, outgoing: _Outgoing) -> None:
        while outgoing.told:
            key, _ = outgoing.told.popleft()
            self._note_taken(outgoing, key, 0)

    def _note_taken(self, outgoing: _Outgoing, key: RequestKey, num_blocks: int) -> None:
        count, blocks_before = outgoing.taken.get(key, (0, 0))
        outgoing.taken[key] = (count + 1, blocks_before + num_blocks)
        self.reports.append(Taken(outgoing.number))
