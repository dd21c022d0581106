"""The nodes of a simulation: legs, handoffs, engine core and loop are the real ones.

Owns one life of a node. What is a stand-in: the model (`engine`), the transport (`tests.kvtransfer.loopback`, which can
lose, flip, double and delay blocks), and whatever would need a real thread, signal or socket pair.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

import numpy as np
import zmq

from baton.decode_node.leg import DecodeLeg
from baton.decode_node.source import Source
from baton.kvtransfer.commands import ReceivingNotice, SendingNotice
from baton.kvtransfer.facts import ReceivingFacts, SendingFacts
from baton.kvtransfer.messages import PeerHello, ProcessIdentity
from baton.kvtransfer.pools.host import HostPool
from baton.kvtransfer.pusher import Pusher
from baton.kvtransfer.receiver_connections import ReceiverConnections
from baton.kvtransfer.receiving import ReceivingSide
from baton.kvtransfer.receiving_end import ReceivingEnd
from baton.kvtransfer.sender_connections import open_listener
from baton.kvtransfer.sending import SendingSide
from baton.kvtransfer.sending_end import SendingEnd
from baton.kvtransfer.thread import MAX_IDLE_S
from baton.kvtransfer.transports.base import Blocks
from baton.node.borrower import PrefixBorrower
from baton.node.first_steps import FirstSteps
from baton.node.lender import PrefixLender
from baton.node.loop import EngineLoop, Leg
from baton.node.metrics import StepCounters
from baton.node.mixed_leg import MixedLeg
from baton.node.router_link import RouterLink
from baton.node.router_links import RouterLinks
from baton.node.sharing_leg import SharingLeg
from baton.prefill_node.leg import PrefillLeg
from baton.wire import links
from baton.wire.errors import Refused, RequestFailed
from baton.wire.messages.membership import PREFILL, Heartbeat, Hello, NodeStatus
from baton.wire.messages.vocabulary import NODE_TO_ROUTER
from tests.kvtransfer.loopback import LoopbackNetwork, LoopbackOpener, LoopbackReceiver, LoopbackSender
from tests.kvtransfer.pools import BLOCK_BYTES, LAYOUT
from tests.simulation.clock import VirtualClock
from tests.simulation.engine import FINGERPRINT, MAX_NUM_SEQS, NUM_BLOCKS, Crash, SimRunner, guessing, make_core
from tests.simulation.network import Context, Host
from tests.simulation.programs import SETTINGS, Program, Surroundings, Thread

LEASE_S = 5.0
_BEAT_S = 1.0
_IDLE_S = 2.5
"""How often a thread looks that has nothing to do; the real ones do so four times a second."""
_SPIN_S = 0.001
_STOP_S = 10.0
_STALL_S = 0.1
ItemT = TypeVar("ItemT")


def _ignore(number: int) -> None:
    """Nobody waits for this socket."""


class SimMailbox(Generic[ItemT]):
    """As `Mailbox`, without sockets."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.wakeup = None
        self.wake = wake
        self._items: deque[ItemT] = deque()

    def put(self, item: ItemT) -> None:
        """See `Mailbox`."""
        self._items.append(item)
        self.wake()

    def take(self) -> list[ItemT]:
        """See `Mailbox`."""
        found = list(self._items)
        self._items.clear()
        return found

    def close(self) -> None:
        """See `Mailbox`."""


class SimTransferThread:
    """As `TransferThread`, on a virtual thread. `side` has to be set before its first turn."""

    def __init__(self, clock: VirtualClock, host: Host) -> None:
        self.failure: Exception | None = None
        self.side: Any = None
        self.thread = Thread(clock, host, self._turn)
        self._clock = clock
        self._commands: SimMailbox[Any] = SimMailbox(self.thread.wake)

    def post(self, command: Any) -> None:
        """See `TransferThread`."""
        self._commands.put(command)

    def wake(self) -> None:
        """See `TransferThread`."""
        self.thread.wake()

    def require_alive(self) -> None:
        """See `TransferThread`."""
        if self.failure is not None:
            raise RequestFailed(f"the transfer thread has failed: {self.failure}") from self.failure

    def close(self) -> None:
        """See `TransferThread`."""

    def _turn(self) -> float | None:
        for command in self._commands.take():
            self.side.do(command, self._clock.now_s)
        wait_s: float = self.side.round(self._clock.now_s)
        return max(_SPIN_S, min(wait_s, MAX_IDLE_S)) if self.side.handoffs else _IDLE_S


class SimStopper:
    """As `Stopper`, without signals."""

    wakeup = None

    def __init__(self) -> None:
        self.is_asked = False
        self._deadline_s = 0.0

    def ask(self, now_s: float, *, starts_again: bool) -> None:
        """See `Stopper`."""
        if not self.is_asked:
            self.is_asked, self._deadline_s = True, now_s + _STOP_S

    def is_overdue(self, now_s: float) -> bool:
        """See `Stopper`."""
        return self.is_asked and now_s >= self._deadline_s

    def drain(self) -> None:
        """See `Stopper`."""


class SimHeartbeat:
    """As `HeartbeatThread`, on a virtual thread."""

    def __init__(self, around: Surroundings, host: Host, epoch: int, status: NodeStatus) -> None:
        self.thread = Thread(around.clock, host, self._turn)
        self._sockets = [self._dial(around, host, address) for address in around.routers]
        self._epoch = epoch
        self._status = status
        self.thread.wake_at(around.clock.now_s + _BEAT_S)

    def publish(self, now_s: float, status: NodeStatus) -> None:
        """See `HeartbeatThread`."""
        self._status = status

    @staticmethod
    def _dial(around: Surroundings, host: Host, address: str) -> Any:
        socket = links.open_socket(cast(Any, Context(around.network, host, _ignore)), zmq.DEALER, SETTINGS)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        links.connect(socket, address, SETTINGS)
        return socket

    def _turn(self) -> float:
        for socket in self._sockets:
            with suppress(zmq.Again):
                socket.send(NODE_TO_ROUTER.encode(Heartbeat(self._epoch, self._status)), zmq.NOBLOCK)
        return _BEAT_S


@dataclass(slots=True)
class _Opener(LoopbackOpener):
    """Remembers the senders it has opened: with their process ends what they write."""

    senders: list[LoopbackSender] = field(default_factory=list)

    def open(self, hello: PeerHello) -> tuple[str, LoopbackSender]:
        """See `SenderOpener`."""
        name, sender = LoopbackOpener.open(self, hello)
        self.senders.append(sender)
        return name, sender

    def fail_all(self) -> None:
        """What all senders need has ended, and none is opened before it is there again."""
        self.is_starting = True
        for sender in self.senders:
            sender.failure = "what carries the blocks has ended"
        _lose_all(self.network, self)


class NodeProgram(Program):
    """One life of a prefill or decode node, or of a mixed one that `prefers` something. `refusal`: what the router said
    when it did not take it. `has_crashed`: it died of a request."""

    def __init__(self, around: Surroundings, role: str, node_id: str, prefers: str = "") -> None:
        super().__init__(around, node_id)
        self.role = role
        self.prefers = prefers
        self.epoch = around.chance.getrandbits(63)
        self.process = ProcessIdentity("host:1:1", around.network.next_number(), 1)
        self.refusal = ""
        self.has_crashed = False
        self.stopper = SimStopper()
        blocks = np.zeros((NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
        self.runner = SimRunner(blocks, is_asynchronous=around.overlaps)
        proposer = guessing(random.Random(self.epoch)) if around.drafts and self.epoch % 2 else None
        self.core = make_core(self.runner, around.clock, proposer)
        self.first_steps = FirstSteps(self._now_us)
        self._engine = Thread(around.clock, self.host, self._turn)
        self._transfers: list[SimTransferThread] = []
        self._end_data: list[Callable[[], None]] = []
        end, address = self._open_sending(blocks)
        lender, borrower = PrefixLender(self.core, end), PrefixBorrower(self.core, self._open_receiving(blocks))
        self.leg = SharingLeg(self._make_leg(lender.rest, borrower.rest), lender, borrower)
        self._join_routers(address)

    def _make_leg(self, sent: SendingEnd, received: ReceivingEnd) -> Leg:
        if self.role == PREFILL:
            return PrefillLeg(self.core, sent, LAYOUT.layer_ends, self.first_steps)
        if not self.prefers:
            return DecodeLeg(self.core, received, self.first_steps, Source(self.core, sent))
        prefill = PrefillLeg(self.core, sent, LAYOUT.layer_ends, FirstSteps(self._now_us), StepCounters())
        source = Source(self.core, sent, prefill.take_notice)
        return MixedLeg(prefill, DecodeLeg(self.core, received, self.first_steps, source, prefill.keys))

    @property
    def sides(self) -> list[SendingSide | ReceivingSide]:
        """Its ends of handoffs: both, since it lends prefixes and takes them."""
        return [each.side for each in self._transfers]

    def _now_us(self) -> int:
        return int(self.around.clock.now_s * 1e6)

    def _open_sending(self, blocks: Blocks) -> tuple[SendingEnd, str]:
        around = self.around
        thread = self._transfer_thread()
        context = cast(Any, Context(around.network, self.host, thread.thread.wake))
        socket, address = open_listener(context, "127.0.0.1", 0, SETTINGS)
        facts = SendingFacts(self.name, self.epoch, FINGERPRINT, LAYOUT, self.process, LEASE_S)
        notices: SimMailbox[SendingNotice] = SimMailbox(self._engine.wake)
        opener = self._opener = _Opener(around.blocks, blocks)
        side = SendingSide(facts, socket, opener, Pusher(HostPool(blocks)), notices, around.clock)
        thread.side = side
        self._end_data.append(lambda: _lose_all(around.blocks, opener))
        return SendingEnd(side, cast(Any, thread), cast(Any, notices)), address

    def _open_receiving(self, blocks: Blocks) -> ReceivingEnd:
        around = self.around
        thread = self._transfer_thread()
        context = cast(Any, Context(around.network, self.host, thread.thread.wake))
        facts = ReceivingFacts(self.name, self.epoch, FINGERPRINT, LAYOUT, NUM_BLOCKS, self.process, LEASE_S)
        notices: SimMailbox[ReceivingNotice] = SimMailbox(self._engine.wake)
        name = f"{self.name}-{self.epoch}"
        receiver = LoopbackReceiver(around.blocks, name, blocks, peers_write=around.peers_write)
        connections = ReceiverConnections(facts, context, SETTINGS, [receiver])
        side = ReceivingSide(facts, connections, HostPool(blocks), notices, around.clock)
        thread.side = side
        self._end_data.append(receiver.close)
        return ReceivingEnd(side, cast(Any, thread), cast(Any, notices))

    def _transfer_thread(self) -> SimTransferThread:
        self._transfers.append(SimTransferThread(self.around.clock, self.host))
        return self._transfers[-1]

    def _join_routers(self, peer_address: str) -> None:
        around, clock = self.around, self.around.clock
        hello = Hello(
            role=self.role,
            prefers=self.prefers,
            node_id=self.name,
            epoch=self.epoch,
            fingerprint=FINGERPRINT,
            layout=LAYOUT,
            peer_address=peer_address,
            http_address="",
            num_blocks=NUM_BLOCKS,
            max_request_tokens=self.core.limits.max_request_tokens,
            max_num_seqs=MAX_NUM_SEQS,
            status=self.core.status(),
            clock="",
            can_pull=self.leg.can_pull,
        )
        context = cast(Any, Context(around.network, self.host, self._engine.wake))
        dialled = [RouterLink(context, each, SETTINGS, hello, self.core.status, clock.now_s) for each in around.routers]
        heartbeat = SimHeartbeat(around, self.host, self.epoch, self.core.status())
        stopper = cast(Any, self.stopper)
        self.engine_loop = EngineLoop(self.core, self.leg, RouterLinks(dialled), cast(Any, heartbeat), stopper, clock)
        self.threads = [self._engine, *(each.thread for each in self._transfers), heartbeat.thread]
        for thread in self.threads[:-1]:
            thread.wake()

    @property
    def is_idle(self) -> bool:
        """Whether nothing of any request is left here."""
        held = self.leg.num_live or len(self.first_steps) or any(len(side.leases) for side in self.sides)
        return not held and not any(side.handoffs for side in self.sides) and not self.core.status().num_held_blocks

    @property
    def is_stalled(self) -> bool:
        """Whether a step of it takes so long that it reads no message now."""
        return self._engine.busy_until_s > self.around.clock.now_s + _STALL_S

    def leave(self) -> None:
        """As SIGTERM."""
        self.stopper.ask(self.around.clock.now_s, starts_again=True)
        self._engine.wake()

    def stall(self, for_s: float) -> None:
        """A step of its engine takes very long; its other threads go on."""
        self._engine.busy_until_s = self.around.clock.now_s + for_s

    def lose_transport(self, for_s: float) -> None:
        """What carries its blocks ends, as an agent of nixl does, and starts again."""
        self._opener.fail_all()

        def is_there() -> None:
            self._opener.is_starting = False
            self._transfers[0].wake()

        self._transfers[0].wake()
        self.around.clock.after(for_s, is_there)

    def kill(self) -> None:
        """See `Program`."""
        super().kill()
        for end in self._end_data:
            end()

    def _turn(self) -> float | None:
        try:
            is_serving = self.engine_loop.turn()
        except Refused as error:
            is_serving, self.refusal = False, str(error)
        except Crash:
            is_serving, self.has_crashed = False, True
        if not is_serving:
            self.kill()
            return None
        clock = self.around.clock
        if not self.engine_loop.wait_s:
            self._engine.busy_until_s = clock.now_s + self.around.step_s()
            return self._engine.busy_until_s - clock.now_s
        return self.engine_loop.wait_s if self.leg.num_live else _IDLE_S


def _lose_all(network: LoopbackNetwork, opener: _Opener) -> None:
    for sender in opener.senders:
        network.lose(sender)
