"""A prefill node's and a decode node's side of the transfer, joined by real sockets, with pools instead of engines.

The clock is virtual: leases end when a test says so. `LossyLink` sits at the prefill node's socket, which every control
message of the pair crosses, and loses what a test wants lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import zmq

from kvtransfer.messages import RECEIVER_TO_SENDER, SENDER_TO_RECEIVER, ProcessIdentity
from kvtransfer.pools.host import HostPool
from kvtransfer.process_identity import this_process
from kvtransfer.pusher import Pusher
from kvtransfer.receiving import ReceivingFacts, ReceivingSide
from kvtransfer.sending import SenderOpener, SendingFacts, SendingSide, open_listener
from kvtransfer.transports.base import Blocks, Receiver
from kvtransfer.transports.registry import PoolMemory, SenderFactory, TransportSettings
from kvtransfer.transports.shm.direct import ShmReceiver
from kvtransfer.transports.shm.segment import Segment
from kvtransfer.transports.tcp_zmq import ZmqReceiver
from tests.kvtransfer.loopback import (
    FaultPlan,
    LoopbackNetwork,
    LoopbackOpener,
    LoopbackReceiver,
    without_faults,
)
from tests.kvtransfer.pools import BLOCK_BYTES, LAYOUT, LEASE_S, DecodePool, PrefillPool, digest_of, first_token
from wire.errors import BatonError
from wire.links import LinkSettings
from wire.messages import PrefillPeer
from wire.request_key import RequestKey

SETTINGS = LinkSettings()
MAILBOX, MEMORY, SHM, ZMQ = "loopback mailbox", "loopback memory", "shm", "zmq"
TRANSPORTS = (MAILBOX, MEMORY, SHM, ZMQ)
NUM_BLOCKS = 16
SENDER_EPOCH, RECEIVER_EPOCH = 71, 72
_DEADLINE_S = 10.0


class LossyLink:
    """A ROUTER socket that loses the messages for which `is_lost` says so. `seen` names all that were not lost."""

    def __init__(self, link: zmq.Socket[bytes]) -> None:
        self.link = link
        self.is_lost: Callable[[object], bool] = lambda message: False
        self.seen: list[object] = []

    def send_multipart(self, frames: Sequence[bytes], flags: int) -> None:
        if not self._loses(SENDER_TO_RECEIVER.decode(frames[-1])):
            self.link.send_multipart(frames, flags)

    def recv_multipart(self, flags: int) -> list[bytes]:
        while True:
            frames = self.link.recv_multipart(flags)
            try:
                message = RECEIVER_TO_SENDER.decode(frames[-1])
            except BatonError:
                return frames  # for the side to find out
            if not self._loses(message):
                return frames

    def lose(self, *kinds: type[Any]) -> None:
        """Lose every message of these types from now on."""
        self.is_lost = lambda message: isinstance(message, kinds)

    def num_seen(self, kind: type[Any]) -> int:
        return sum(isinstance(message, kind) for message in self.seen)

    def close(self) -> None:
        self.link.close()

    def _loses(self, message: object) -> bool:
        if self.is_lost(message):
            return True
        self.seen.append(message)
        return False


class Echo:
    """A round trip through a context's own I/O thread: what was sent before it has had its chance to arrive."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._near, self._far = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        port = self._near.bind_to_random_port("tcp://127.0.0.1")
        self._far.connect(f"tcp://127.0.0.1:{port}")

    def wait(self) -> None:
        self._near.send(b"")
        self._far.recv()
        self._far.send(b"")
        self._near.recv()

    def close(self) -> None:
        self._near.close(linger=0)
        self._far.close(linger=0)


@dataclass(slots=True)
class PrefillNode:
    """The sending side of a node that listens at `address`."""

    side: SendingSide
    pool: PrefillPool
    link: LossyLink
    pusher: Pusher
    address: str
    epoch: int
    now_s: float = 0.0

    @property
    def peer(self) -> PrefillPeer:
        return PrefillPeer("P", self.epoch, self.address)

    def begin(self, key: RequestKey, num_tokens: int, *, decode_epoch: int = RECEIVER_EPOCH) -> None:
        """`Prefill` arrives."""
        self.pool.start(key, num_tokens)
        self.side.begin(
            key,
            self.now_s,
            decode_node_id="D",
            decode_epoch=decode_epoch,
            num_tokens=num_tokens,
            prompt_digest=digest_of(key),
        )

    def advance(self, key: RequestKey, num_tokens: int) -> None:
        """A chunk is computed."""
        self.pool.compute(key, num_tokens)
        self.side.advance(key, self.pool.tables[key], num_tokens, self.now_s)

    def finish(self, key: RequestKey, num_tokens: int) -> None:
        """The last chunk is computed and token 1 drawn."""
        self.pool.compute(key, num_tokens)
        self.side.finish(key, self.pool.tables[key], first_token(key), self.now_s, self.now_s)

    def prefill(self, key: RequestKey, num_tokens: int) -> None:
        """All of it."""
        self.begin(key, num_tokens)
        self.finish(key, num_tokens)

    def poll(self, now_s: float) -> None:
        """One round of the node's loop."""
        self.now_s = now_s
        self.side.round(now_s)

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
        self.side.grant(self.pool.reserve(key, num_tokens, num_cached_tokens), peer, self.now_s)

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

    context: zmq.Context[zmq.Socket[bytes]]
    network: LoopbackNetwork
    transport: str
    prefill: PrefillNode
    decode: DecodeNode
    echo: Echo
    now_s: float = 0.0

    def poll(self) -> None:
        """One round of both."""
        self.prefill.poll(self.now_s)
        self.decode.poll(self.now_s)

    def until(self, is_done: Callable[[], bool]) -> None:
        """Rounds until something has happened; the virtual clock stands still."""
        deadline_s = time.monotonic() + _DEADLINE_S
        while not is_done():
            if time.monotonic() > deadline_s:
                raise TimeoutError("what the test waits for did not happen")
            self.poll()
            time.sleep(0.0005)

    def settle(self) -> None:
        """Rounds enough for every message under way to arrive and be answered."""
        for _ in range(30):
            self.poll()
            self.echo.wait()

    def settle_prefill(self) -> None:
        """The same, when there is no decode node any more."""
        for _ in range(10):
            self.prefill.poll(self.now_s)
            self.echo.wait()

    def pass_time(self, duration_s: float) -> None:
        """Let the virtual clock run, second by second."""
        for _ in range(round(duration_s)):
            self.now_s += 1.0
            for _ in range(6):
                self.poll()
                self.echo.wait()

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is alive and every block of both pools is free."""
        pools = (self.prefill.pool, self.decode.pool)
        return (
            not self.prefill.side.num_live
            and not self.decode.side.num_live
            and all(pool.pool.num_free == pool.pool.num_blocks for pool in pools)
        )


def empty_blocks(num_blocks: int = NUM_BLOCKS) -> Blocks:
    return np.zeros((num_blocks, BLOCK_BYTES), dtype=np.uint8)


def sending_facts() -> SendingFacts:
    return SendingFacts("P", SENDER_EPOCH, "model-a", LAYOUT, this_process(), LEASE_S)


def receiving_facts() -> ReceivingFacts:
    return ReceivingFacts("D", RECEIVER_EPOCH, "model-a", LAYOUT, NUM_BLOCKS, this_process(), LEASE_S)


def make_prefill_node(
    context: zmq.Context[zmq.Socket[bytes]],
    network: LoopbackNetwork,
    transport: str,
    *,
    facts: SendingFacts | None = None,
    port: int = 0,
    num_blocks: int = NUM_BLOCKS,
) -> PrefillNode:
    facts = facts or sending_facts()
    blocks = empty_blocks(num_blocks)
    opener: SenderOpener = LoopbackOpener(network, blocks)
    if transport in (SHM, ZMQ):
        settings = TransportSettings(transport, context, "127.0.0.1", SETTINGS, facts.process)
        opener = SenderFactory(settings, PoolMemory(settings, "sender"), HostPool(blocks))
    socket, address = open_listener(context, "127.0.0.1", port, SETTINGS)
    link, pusher, pool = LossyLink(socket), Pusher(HostPool(blocks)), PrefillPool(blocks)
    side = SendingSide(facts, cast("zmq.Socket[bytes]", link), opener, pusher, pool)
    return PrefillNode(side, pool, link, pusher, address, facts.epoch)


def make_decode_node(
    context: zmq.Context[zmq.Socket[bytes]],
    network: LoopbackNetwork,
    transport: str,
    *,
    facts: ReceivingFacts | None = None,
) -> DecodeNode:
    facts = facts or receiving_facts()
    name = f"{facts.node_id}-{facts.epoch}"
    receiver, blocks = open_receiver(context, network, transport, name, facts.num_blocks)
    pool = DecodePool(blocks)
    side = ReceivingSide(facts, context, SETTINGS, [receiver], HostPool(blocks), pool)
    return DecodeNode(side, pool, [receiver])


def open_receiver(
    context: zmq.Context[zmq.Socket[bytes]], network: LoopbackNetwork, transport: str, name: str, num_blocks: int
) -> tuple[Receiver, Blocks]:
    """A receiver of that transport and the pool it receives into."""
    if transport == SHM:
        segment = Segment(num_blocks * BLOCK_BYTES)
        return ShmReceiver(segment), segment.array.reshape(num_blocks, BLOCK_BYTES)
    blocks = empty_blocks(num_blocks)
    if transport == ZMQ:
        return ZmqReceiver(context, "127.0.0.1", HostPool(blocks), SETTINGS), blocks
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
    network = LoopbackNetwork(plan)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        prefill = make_prefill_node(context, network, transport, facts=sender, num_blocks=num_blocks)
        decode = make_decode_node(context, network, transport, facts=receiver)
        echo = Echo(context)
        pair = Pair(context, network, transport, prefill, decode, echo)
        try:
            yield pair
        finally:
            pair.prefill.close()
            pair.decode.close()
            echo.close()
    finally:
        context.destroy(linger=0)


def dead_process() -> ProcessIdentity:
    """The identity of a process of this host that has ended."""
    return replace(this_process(), start_ticks=1)
