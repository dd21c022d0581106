"""A prefill node's and a decode node's side of the transfer, with pools instead of engines, for written-out scenarios.

One thread, simulated connections (`wire`) and a virtual clock: messages arrive at once, leases end when a test says so,
and `Link` loses what a test wants lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import zmq

from baton.kvtransfer.commands import (
    BeginHandoff,
    CancelReceiving,
    CancelSending,
    FinishHandoff,
    GrantBlocks,
    PushComputed,
    WaitForRoom,
)
from baton.kvtransfer.facts import ReceivingFacts, SendingFacts
from baton.kvtransfer.messages import RECEIVER_TO_SENDER, SENDER_TO_RECEIVER, ProcessIdentity
from baton.kvtransfer.pools.host import HostPool
from baton.kvtransfer.process_identity import this_process
from baton.kvtransfer.pusher import Pusher
from baton.kvtransfer.receiver_connections import ReceiverConnections
from baton.kvtransfer.receiving import ReceivingSide
from baton.kvtransfer.sender_connections import SenderOpener
from baton.kvtransfer.sending import SendingSide
from baton.kvtransfer.transports.base import Blocks, Receiver
from baton.kvtransfer.transports.registry import PoolMemory, SenderFactory, TransportSettings
from baton.kvtransfer.transports.shm.direct import ShmReceiver
from baton.kvtransfer.transports.shm.segment import Segment
from baton.wire.links import LinkSettings
from baton.wire.messages.legs import PrefillPeer
from baton.wire.request_key import RequestKey
from tests.kvtransfer.loopback import FaultPlan, LoopbackNetwork, LoopbackOpener, LoopbackReceiver, without_faults
from tests.kvtransfer.pools import BLOCK_BYTES, LAYOUT, LEASE_S, DecodePool, PrefillPool, digest_of, first_token
from tests.kvtransfer.wire import FakeContext, FakeRouter, Wire, at_once

SETTINGS = LinkSettings()
MAILBOX, MEMORY, SHM = "loopback mailbox", "loopback memory", "shm"
TRANSPORTS = (MAILBOX, MEMORY, SHM)
ADDRESS = "tcp://prefill:1"
NUM_BLOCKS = 16
SENDER_EPOCH, RECEIVER_EPOCH = 71, 72
_MAX_ROUNDS = 20_000


class Link:
    """The control messages of a pair: which of them are lost (`is_lost`), and which were `seen`."""

    def __init__(self, wire: Wire) -> None:
        self.is_lost: Callable[[object], bool] = lambda message: False
        self._wire = wire
        wire.fate = self._fate

    @property
    def seen(self) -> list[object]:
        """Every message that was not lost."""
        return self._wire.seen

    def lose(self, *kinds: type[Any]) -> None:
        """Lose every message of these types from now on."""
        self.is_lost = lambda message: isinstance(message, kinds)

    def num_seen(self, kind: type[Any]) -> int:
        return sum(isinstance(message, kind) for message in self.seen)

    def _fate(self, message: object) -> Sequence[float]:
        return () if self.is_lost(message) else (0.0,)


@dataclass(slots=True)
class PrefillNode:
    """The sending side of a node that listens at `address`."""

    side: SendingSide
    pool: PrefillPool
    link: Link
    router: FakeRouter
    pusher: Pusher
    opener: SenderOpener
    address: str
    epoch: int
    now_s: float = 0.0

    @property
    def peer(self) -> PrefillPeer:
        return PrefillPeer("P", self.epoch, self.address)

    def begin(self, key: RequestKey, num_tokens: int, *, decode_epoch: int = RECEIVER_EPOCH) -> None:
        """`Prefill` arrives."""
        self.pool.start(key, num_tokens)
        self.side.do(BeginHandoff(key, "D", decode_epoch, num_tokens, digest_of(key)), self.now_s)

    def advance(self, key: RequestKey, num_tokens: int) -> None:
        """A chunk is computed."""
        self.pool.compute(key, num_tokens)
        self.side.do(PushComputed(key, self.pool.tables[key], num_tokens), self.now_s)

    def finish(self, key: RequestKey, num_tokens: int, computed_s: float | None = None) -> None:
        """The last chunk is computed, now or earlier, and token 1 sampled."""
        self.pool.compute(key, num_tokens)
        at_s = self.now_s if computed_s is None else computed_s
        self.side.do(FinishHandoff(key, self.pool.tables[key], (first_token(key),), at_s), self.now_s)

    def prefill(self, key: RequestKey, num_tokens: int) -> None:
        """Begin and finish a prompt."""
        self.begin(key, num_tokens)
        self.finish(key, num_tokens)

    def cancel(self, key: RequestKey, reason: str = "cancelled", *, request_ended: bool = False) -> None:
        """The request is cancelled, or it failed, or token 1 ended it."""
        self.side.do(CancelSending(key, reason, request_ended), self.now_s)

    def poll(self, now_s: float) -> None:
        """One round of the node's loop."""
        self.now_s = now_s
        self.side.round(now_s)

    def say(self, message: object) -> None:
        """Have the node's only connection carry a message that the side did not send."""
        self.say_bytes(SENDER_TO_RECEIVER.encode(message))

    def say_bytes(self, frame: bytes) -> None:
        """Have the connection carry bytes that are no message."""
        (peer_id,) = [dealer.identity for dealer in self.router.dealers.values() if not dealer.closed]
        self.router.send_multipart([peer_id, frame], 0)

    def set_starting(self, is_starting: bool) -> None:
        """Its transport is starting, or is there."""
        assert isinstance(self.opener, LoopbackOpener)
        self.opener.is_starting = is_starting

    def close(self) -> None:
        self.side.close()


@dataclass(slots=True)
class DecodeNode:
    """The receiving side of a node."""

    side: ReceivingSide
    pool: DecodePool
    receivers: list[Receiver]
    now_s: float = 0.0

    def grant(self, key: RequestKey, num_tokens: int, peer: PrefillPeer, *, num_cached_tokens: int = 0) -> None:
        """`Decode` arrives and there is room."""
        self.side.do(GrantBlocks(self.pool.reserve(key, num_tokens, num_cached_tokens), peer), self.now_s)

    def wait_for_room(self, key: RequestKey, peer: PrefillPeer) -> None:
        """`Decode` arrives and there is none."""
        self.side.do(WaitForRoom(key, peer), self.now_s)

    def cancel(self, key: RequestKey) -> None:
        """The request is cancelled."""
        self.side.do(CancelReceiving(key), self.now_s)

    def say(self, message: object) -> None:
        """Have the node's only connection carry a message that the side did not send."""
        self.say_bytes(RECEIVER_TO_SENDER.encode(message))

    def say_bytes(self, frame: bytes) -> None:
        """Have the connection carry bytes that are no message."""
        (connection,) = self.side.connections
        connection.socket.send(frame, 0)

    def poll(self, now_s: float) -> None:
        """One round of the node's loop."""
        self.now_s = now_s
        self.side.round(now_s)

    def close(self) -> None:
        self.side.close()
        for receiver in self.receivers:
            receiver.close()


@dataclass(slots=True)
class Pair:
    """The two nodes and their clock."""

    context: FakeContext
    wire: Wire
    network: LoopbackNetwork
    transport: str
    prefill: PrefillNode
    decode: DecodeNode

    @property
    def now_s(self) -> float:
        """The virtual clock."""
        return self.wire.now_s

    @now_s.setter
    def now_s(self, now_s: float) -> None:
        self.wire.now_s = now_s

    def poll(self) -> None:
        """Run one round of both nodes."""
        self.prefill.poll(self.now_s)
        self.decode.poll(self.now_s)

    def until(self, is_done: Callable[[], bool]) -> None:
        """Run rounds until `is_done`; the virtual clock stands still."""
        for _ in range(_MAX_ROUNDS):
            if is_done():
                return
            self.poll()
        raise TimeoutError("the condition of the test did not become true")

    def settle(self) -> None:
        """Run enough rounds for every message in flight to arrive and be answered."""
        for _ in range(12):
            self.poll()

    def settle_prefill(self) -> None:
        """Run the same for the prefill node, when there is no decode node any more."""
        for _ in range(4):
            self.prefill.poll(self.now_s)

    def pass_time(self, duration_s: float) -> None:
        """Let the virtual clock run, second by second."""
        for _ in range(round(duration_s)):
            self.now_s += 1.0
            for _ in range(6):
                self.poll()

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is alive and every block of both pools is free."""
        pools = (self.prefill.pool, self.decode.pool)
        return (
            not self.prefill.side.handoffs
            and not self.decode.side.handoffs
            and all(pool.pool.num_free == pool.pool.num_blocks for pool in pools)
        )


def empty_blocks(num_blocks: int = NUM_BLOCKS) -> Blocks:
    return np.zeros((num_blocks, BLOCK_BYTES), dtype=np.uint8)


def sending_facts() -> SendingFacts:
    return SendingFacts("P", SENDER_EPOCH, "model-a", LAYOUT, this_process(), LEASE_S)


def receiving_facts() -> ReceivingFacts:
    return ReceivingFacts("D", RECEIVER_EPOCH, "model-a", LAYOUT, NUM_BLOCKS, this_process(), LEASE_S)


def make_prefill_node(
    wire: Wire,
    network: LoopbackNetwork,
    transport: str,
    *,
    facts: SendingFacts | None = None,
    num_blocks: int = NUM_BLOCKS,
) -> PrefillNode:
    """A node that listens; a life after another one gets its connections."""
    facts = facts or sending_facts()
    blocks = empty_blocks(num_blocks)
    opener: SenderOpener = LoopbackOpener(network, blocks)
    if transport == SHM:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()  # shared memory needs no socket of it
        settings = TransportSettings(transport, context, "127.0.0.1", SETTINGS, facts.process)
        opener = SenderFactory(settings, PoolMemory(settings, "sender"), HostPool(blocks))
    router = wire.listen()
    pusher, pool = Pusher(HostPool(blocks)), PrefillPool(blocks)
    side = SendingSide(facts, cast("zmq.Socket[bytes]", router), opener, pusher, pool, wire.clock)
    return PrefillNode(side, pool, Link(wire), router, pusher, opener, ADDRESS, facts.epoch)


def make_decode_node(
    context: FakeContext, network: LoopbackNetwork, transport: str, *, facts: ReceivingFacts | None = None
) -> DecodeNode:
    facts = facts or receiving_facts()
    receiver, blocks = open_receiver(network, transport, f"{facts.node_id}-{facts.epoch}", facts.num_blocks)
    pool = DecodePool(blocks)
    dial = cast("zmq.Context[zmq.Socket[bytes]]", context)
    connections = ReceiverConnections(facts, dial, SETTINGS, [receiver])
    side = ReceivingSide(facts, connections, HostPool(blocks), pool, context.wire.clock)
    return DecodeNode(side, pool, [receiver])


def open_receiver(network: LoopbackNetwork, transport: str, name: str, num_blocks: int) -> tuple[Receiver, Blocks]:
    """A receiver of that transport and the pool it receives into."""
    if transport == SHM:
        segment = Segment(num_blocks * BLOCK_BYTES)
        return ShmReceiver(segment), segment.array.reshape(num_blocks, BLOCK_BYTES)
    blocks = empty_blocks(num_blocks)
    return LoopbackReceiver(network, name, blocks, peers_write=transport == MEMORY), blocks


@contextmanager
def open_pair(
    transport: str,
    *,
    plan: FaultPlan = without_faults,
    sender: SendingFacts | None = None,
    receiver: ReceivingFacts | None = None,
    num_blocks: int = NUM_BLOCKS,
) -> Iterator[Pair]:
    """Two nodes, closed at the end."""
    receiver = replace(receiver or receiving_facts(), num_blocks=num_blocks)
    network, wire = LoopbackNetwork(plan), Wire(at_once)
    context = FakeContext(wire)
    prefill = make_prefill_node(wire, network, transport, facts=sender, num_blocks=num_blocks)
    pair = Pair(
        context, wire, network, transport, prefill, make_decode_node(context, network, transport, facts=receiver)
    )
    try:
        yield pair
    finally:
        pair.prefill.close()
        pair.decode.close()


def dead_process() -> ProcessIdentity:
    """The identity of a process of this host that has ended."""
    return replace(this_process(), start_ticks=1)
