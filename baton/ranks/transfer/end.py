"""What one rank does of its node's handoffs: it receives, sends and adds up what lies in its own pool, as it is told.

Owns the rank's sockets and what it has been told and not reported yet. Decides nothing: which blocks may be written,
what is sent to whom, and what a handoff is, is the driver's. The driver has such an end for its own pool, too.

What may happen to the driver: if it is gone, the process of the rank ends. To a peer: what it sends and no grant has
announced changes nothing (`tcp_zmq`); a receiver that cannot be reached is reported, and its sender is of no use then.
While an agent of nixl starts again, its senders are not opened yet and what they are told to push waits. The driver
counts the time: its pusher gives up a sender that takes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from baton.kvtransfer.pools.base import Pending
from baton.kvtransfer.pools.cut import StrandTotals
from baton.kvtransfer.process_identity import this_process
from baton.kvtransfer.transports.announced import Look
from baton.kvtransfer.transports.base import Move, Sender, Starting
from baton.kvtransfer.transports.part_registry import (
    Network,
    RankPool,
    Reached,
    open_nixl_senders,
    open_part_receiver,
    open_parts,
)
from baton.ranks.transfer.intake import Intake
from baton.ranks.transfer.messages import (
    AddUp,
    Broken,
    EndSender,
    Expect,
    Fence,
    Forget,
    Listen,
    Order,
    Prepare,
    Prepared,
    Push,
    Reach,
    Read,
    Report,
    Taken,
    Totals,
)
from baton.wire.errors import BatonError
from baton.wire.request_key import RequestKey

if TYPE_CHECKING:
    from baton.kvtransfer.transports.nixl.sender import NixlSenders

_NIXL = "nixl"
_MASK = 2**64 - 1


@dataclass(slots=True)
class _Outgoing:
    """A sender towards one receiver; None while what it needs starts. `told`: pushes that it has not taken;
    `taken`: how many it has, by handoff, of how many blocks."""

    number: int
    receiver: Reached
    sender: Sender | None = None
    bytes_per_block: int = 0
    told: deque[tuple[RequestKey, Sequence[Move]]] = field(default_factory=deque)
    taken: dict[RequestKey, tuple[int, int]] = field(default_factory=dict)
    is_closed: bool = False


class RankEnd:
    """One rank's part in its node's handoffs. Driven by one thread: `take` orders, `work`, and hand on the `reports`.

    `look` takes orders that have come, or come soon. Blocks may arrive before the order to expect them was read,
    because their sender was told of the grant at the same time.
    """

    def __init__(self, own: RankPool, network: Network, look: Look | None = None) -> None:
        self.reports: list[Report] = []
        self._look = look
        self._own = own
        self._network = network
        self._totals = StrandTotals(own.pool, own.layout, own.shard)
        self._adding: deque[tuple[int, Pending]] = deque()
        self._intakes: dict[str, Intake] = {}
        self._nixl: NixlSenders | None = None
        self._outgoing: dict[int, _Outgoing] = {}

    @property
    def is_busy(self) -> bool:
        """Whether there is something that nothing wakes it for."""
        return bool(self._adding) or any(each.told or each.taken for each in self._outgoing.values())

    def wait_on(self) -> Sequence[Any]:
        """Sockets that are readable when `work` has something to do."""
        senders = [outgoing.sender for outgoing in self._outgoing.values() if outgoing.sender is not None]
        sending = [source for sender in senders for source in sender.wait_on()]
        agent = self._nixl.wait_on() if self._nixl is not None else ()
        receiving = [source for intake in self._intakes.values() for source in intake.wait_on()]
        return list(dict.fromkeys([*sending, *agent, *receiving]))

    def take(self, order: Order) -> None:
        """Carry out an order of the driver."""
        match order:
            case Listen():
                self._listen(order)
            case Prepare():
                if _NIXL in order.transports:
                    self._nixl = open_nixl_senders(self._own, self._network)
                self.reports.append(Prepared(this_process()))
            case Expect():
                self._intake(order.transport).expect(order)
            case Forget():
                self.reports.append(self._intake(order.transport).forget(order.key))
            case Fence():
                self._intake(order.transport).fence(order.addresses)
            case Reach():
                self._reach(order)
            case Push():
                self._push(order)
            case EndSender():
                self._end_sender(order.number)
            case AddUp():
                self._adding.append((order.number, self._totals.begin(order.block_ids)))
                self._report_totals()
            case _:
                raise ValueError(f"{type(order).__name__} is no order to a rank that has begun")

    def work(self) -> None:
        """Take what has arrived, and send what can be sent."""
        self._report_totals()
        for intake in self._intakes.values():
            self.reports += intake.work()
        if self._nixl is not None:
            self._nixl.poll()
        for outgoing in tuple(self._outgoing.values()):
            self._send(outgoing)

    def close(self) -> None:
        """Close this rank's sockets."""
        for outgoing in self._outgoing.values():
            _close(outgoing)
        for intake in self._intakes.values():
            intake.close()
        if self._nixl is not None:
            self._nixl.close()

    def enter(self) -> None:
        """Make the calling thread the one that uses this rank's pool."""
        self._own.pool.enter()

    def _report_totals(self) -> None:
        """What is added up; on a device that is later."""
        while self._adding and (totals := self._adding[0][1].take()) is not None:
            number, _ = self._adding.popleft()
            self.reports.append(Totals(number, tuple(total & _MASK for total in totals)))

    def _listen(self, order: Listen) -> None:
        for transport in order.transports:
            receiver = open_part_receiver(transport, self._own, self._network)
            if self._look is not None:
                receiver.look_by(self._look)
            self._intakes[transport] = Intake(transport, receiver)

    def _intake(self, transport: str) -> Intake:
        intake = self._intakes.get(transport)
        if intake is None:
            raise ValueError(f"the rank was not told to listen for {transport}")
        return intake

    def _reach(self, order: Reach) -> None:
        receiver = Reached(order.transport, order.division, order.ranks, order.num_blocks)
        self._outgoing[order.number] = _Outgoing(order.number, receiver)

    def _push(self, order: Push) -> None:
        columns = zip(order.sources, order.targets, order.generations, strict=True)
        moves = [Move(order.first_index + place, *column) for place, column in enumerate(columns)]
        outgoing = self._outgoing.get(order.number)
        if outgoing is None or outgoing.is_closed:  # it has broken, and the driver has not heard yet
            self.reports += [Taken(order.number), Read(order.number, order.key, 1, 0)]
        else:
            outgoing.told.append((order.key, moves))

    def _end_sender(self, number: int) -> None:
        outgoing = self._outgoing.get(number)
        if outgoing is not None:
            _close(outgoing)

    def _send(self, outgoing: _Outgoing) -> None:
        if not outgoing.is_closed:
            try:
                self._push_told(outgoing)
            except Starting:
                pass  # asked again in the next round
            except BatonError as error:
                self.reports.append(Broken(outgoing.number, str(error)))
                _close(outgoing)
        if outgoing.is_closed:
            self._drop_told(outgoing)
        sender = outgoing.sender
        for key, (count, num_blocks) in tuple(outgoing.taken.items()):
            if sender is None or not sender.is_reading(key):
                del outgoing.taken[key]
                needs_fence = sender is not None and sender.needs_fence
                num_bytes = num_blocks * outgoing.bytes_per_block
                self.reports.append(Read(outgoing.number, key, count, num_bytes, needs_fence))
        if outgoing.is_closed and not outgoing.taken:
            del self._outgoing[outgoing.number]

    def _push_told(self, outgoing: _Outgoing) -> None:
        """Open the sender, if that is still to be done, and push. Raises `BatonError`: `Starting` when it cannot be
        opened now, anything else when it is of no use."""
        if outgoing.sender is None:
            opened = open_parts(self._own, self._network, self._nixl, outgoing.receiver)
            outgoing.sender, outgoing.bytes_per_block = opened
        outgoing.sender.poll()
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


def _close(outgoing: _Outgoing) -> None:
    outgoing.is_closed = True
    if outgoing.sender is not None:
        outgoing.sender.close()
