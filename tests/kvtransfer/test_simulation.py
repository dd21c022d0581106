"""Both sides on a simulated network and clock, thousands of steps under a seed.

Control messages are lost, doubled, delayed and reordered; KV is lost, cut, flipped and doubled; connections break;
nodes cancel, freeze and die. Checked at every step: what is delivered is the prompt's KV; a block is written by a peer
only while it is set aside for that very handoff; what a peer reads is still held for it. Checked at the end: every
block of every pool is free.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import zmq

from engine.api.links import LinkSettings
from engine.api.messages import HandoffFigures, PrefillPeer, TokenEvent
from engine.cache.block_pool import NoFreeBlocks
from kvtransfer.host import this_process
from kvtransfer.messages import HandoffKey, ProcessIdentity
from kvtransfer.pusher import Pusher
from kvtransfer.receiving import ReceivingSide
from kvtransfer.sending import SendingSide
from kvtransfer.transports.base import Blocks, Move
from kvtransfer.transports.loopback import Fault, LoopbackNetwork, LoopbackOpener, LoopbackReceiver
from tests.kvtransfer.pair import (
    NUM_BLOCKS,
    RECEIVER_EPOCH,
    SENDER_EPOCH,
    empty_blocks,
    receiving_facts,
    sending_facts,
)
from tests.kvtransfer.pools import (
    BLOCK_SIZE,
    FREE_BYTE,
    DecodePool,
    PrefillPool,
    digest_of,
    first_token,
    key_of,
)

_ADDRESS = "tcp://prefill:1"
_NUM_STEPS = 3000


class Wire:
    """All connections: frames under way, each with the moment it arrives."""

    def __init__(self, chance: random.Random) -> None:
        self.now_s = 0.0
        self.is_bad = True
        self.listener: FakeRouter | None = None
        self._chance = chance
        self._num_sent = 0
        self._num_connections = 0

    def connect(self, dealer: FakeDealer) -> None:
        """A connection, new or again: ZMQ gives it a new identity at the listener."""
        self._num_connections += 1
        dealer.identity = f"connection {self._num_connections}".encode()
        if self.listener is not None:
            self.listener.dealers[dealer.identity] = dealer

    def carry(self, inbox: list[tuple[float, int, bytes, bytes]], identity: bytes, frame: bytes) -> None:
        """Lose, double, delay or deliver a frame."""
        # a handshake is only lost with its connection: with most of them gone there would be nothing to see
        is_bad = self.is_bad and b"Peer" not in frame
        roll = self._chance.random() if is_bad else 1.0
        for _ in range(0 if roll < 0.04 else 2 if roll < 0.08 else 1):
            delay_s = self._chance.choice((0.01, 0.01, 0.01, 0.5, 4.0)) if is_bad else 0.01
            self._num_sent += 1
            inbox.append((self.now_s + delay_s, self._num_sent, identity, frame))

    def take(self, inbox: list[tuple[float, int, bytes, bytes]]) -> tuple[bytes, bytes]:
        """The next frame that has arrived. Raises `zmq.Again`."""
        arrived = min((entry for entry in inbox if entry[0] <= self.now_s), default=None)
        if arrived is None:
            raise zmq.Again
        inbox.remove(arrived)
        return arrived[2], arrived[3]


class FakeRouter:
    """The listening socket of one life of the prefill node."""

    def __init__(self, wire: Wire) -> None:
        self.dealers: dict[bytes, FakeDealer] = {}
        self.inbox: list[tuple[float, int, bytes, bytes]] = []
        self._wire = wire

    def recv_multipart(self, flags: int) -> list[bytes]:
        return [*self._wire.take(self.inbox)]

    def send_multipart(self, frames: Sequence[bytes], flags: int) -> None:
        dealer = self.dealers.get(frames[0])
        if dealer is None or dealer.closed or dealer.identity != frames[0]:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        self._wire.carry(dealer.inbox, b"", frames[1])


class FakeDealer:
    """The decode node's end of a connection."""

    def __init__(self, wire: Wire) -> None:
        self.identity = b""
        self.inbox: list[tuple[float, int, bytes, bytes]] = []
        self.closed = False
        self._wire = wire

    def setsockopt(self, option: int, value: object) -> None:
        """All options are the same to the simulation."""

    def connect(self, address: str) -> None:
        self._wire.connect(self)

    def recv(self, flags: int) -> bytes:
        return self._wire.take(self.inbox)[1]

    def send(self, frame: bytes, flags: int) -> None:
        if self._wire.listener is not None and self.identity in self._wire.listener.dealers:
            self._wire.carry(self._wire.listener.inbox, self.identity, frame)

    def close(self) -> None:
        self.closed = True


class FakeContext:
    """Opens the decode node's sockets."""

    def __init__(self, wire: Wire) -> None:
        self.dealers: list[FakeDealer] = []
        self._wire = wire

    def socket(self, kind: int) -> FakeDealer:
        self.dealers.append(FakeDealer(self._wire))
        return self.dealers[-1]


class SteppedPusher(Pusher):
    """Pushes one block per call of `push_one`: a write can come long after it was asked for."""

    def __init__(self, world: World, blocks: Blocks) -> None:
        super().__init__(blocks)
        self._world = world

    def work(self, now_s: float) -> float:
        """Nothing by itself."""
        return 0.0

    def push_one(self, now_s: float) -> None:
        """Push one block of the first job of some sender."""
        for queue in list(self._queues.values()):
            if queue.jobs:
                entry = queue.jobs[0]
                self._world.check_push(entry.job.key, entry.job.moves[len(entry.checksums)])
                self._advance(queue, now_s)
                return


@dataclass(slots=True)
class PrefillLife:
    """One life of the prefill node."""

    epoch: int
    process: ProcessIdentity
    pool: PrefillPool
    pusher: SteppedPusher
    side: SendingSide


class CheckedDecodePool(DecodePool):
    """Looks at every delivery the moment it happens."""

    def delivered(self, key: HandoffKey, first: TokenEvent, figures: HandoffFigures) -> None:
        super().delivered(key, first, figures)
        assert self.has_exactly(key), "delivered KV differs from the prompt's"
        assert first == first_token(key)
        assert not self.failures_of(key)

    def spoiled(self, key: HandoffKey, reason: str) -> None:
        super().spoiled(key, reason)
        assert len(self.failures_of(key)) == bool(reason), "a failure was reported twice"
        assert key not in self.delivered_kv


class World:
    """Everything there is, and what can happen to it."""

    def __init__(self, seed: int, *, peers_write: bool) -> None:
        self.chance = random.Random(seed)
        self.wire = Wire(self.chance)
        self.context = FakeContext(self.wire)
        self.dead: set[ProcessIdentity] = set()
        self.network = LoopbackNetwork(self._fault)
        self.peers_write = peers_write
        blocks = empty_blocks()
        self.decode_pool = CheckedDecodePool(blocks)
        receiver = LoopbackReceiver(self.network, "D", blocks, peers_write=peers_write)
        self.decode = ReceivingSide(
            receiving_facts(),
            cast("zmq.Context[zmq.Socket[bytes]]", self.context),
            LinkSettings(),
            [receiver],
            blocks,
            self.decode_pool,
        )
        self.num_lives = 0
        self.life = self._start_prefill_node()
        self.computing: dict[HandoffKey, int] = {}
        self.num_requests = 0
        self.is_prefill_frozen = False

    def _start_prefill_node(self) -> PrefillLife:
        self.num_lives += 1
        epoch = SENDER_EPOCH + self.num_lives
        process = replace(this_process(), start_ticks=self.num_lives)
        self.wire.listener = router = FakeRouter(self.wire)
        for dealer in self.context.dealers:
            if not dealer.closed:
                self.wire.connect(dealer)
        blocks = empty_blocks()
        pool, pusher = PrefillPool(blocks), SteppedPusher(self, blocks)
        side = SendingSide(
            replace(sending_facts(), epoch=epoch, process=process),
            cast("zmq.Socket[bytes]", router),
            LoopbackOpener(self.network, blocks),
            pusher,
            pool,
        )
        return PrefillLife(epoch, process, pool, pusher, side)

    def _fault(self, number: int, key: HandoffKey, move: Move) -> Fault:
        roll = self.chance.random() if self.wire.is_bad else 1.0
        if roll < 0.01:
            return Fault(flipped_bits=(self.chance.randrange(8),))
        if roll < 0.02:
            return Fault(num_cut_bytes=self.chance.randrange(1, 100))
        if roll < 0.03:
            return Fault(num_copies=0)
        # memory that a peer writes by itself is written when push returns; only a wire can be late
        late = 0 if self.peers_write else self.chance.choice((0, 0, 0, 1, 5))
        return Fault(num_copies=1 + (roll < 0.05), delay=late)

    def check_push(self, key: HandoffKey, move: Move) -> None:
        """I3: what is read is held for this handoff, and so is what is written."""
        assert move.source in self.life.pool.tables.get(key, ()), "a block is read that went back to its pool"
        if self.peers_write:
            held = self.decode_pool.held.get(key)
            assert held is not None, "a block is written that went back to its pool"
            assert move.target in held
            assert self.decode_pool.pool.generation(move.target) == move.generation

    # what happens

    def arrive(self) -> None:
        """A request: its two legs may come to the nodes at different times, or one not at all."""
        self.num_requests += 1
        key, num_tokens = key_of(self.num_requests), self.chance.randrange(1, 24)
        peer = PrefillPeer("P", self.life.epoch, _ADDRESS)
        num_cached = self.chance.choice((0, 0, BLOCK_SIZE, 2 * BLOCK_SIZE))
        if num_cached > num_tokens:
            num_cached = 0
        prefill_comes, decode_comes = self.chance.random() < 0.9, self.chance.random() < 0.9
        try:
            if prefill_comes:
                self.life.pool.start(key, num_tokens)
                self.life.side.begin(
                    key,
                    self.wire.now_s,
                    decode_node_id="D",
                    decode_epoch=RECEIVER_EPOCH if self.chance.random() < 0.95 else 1,
                    num_tokens=num_tokens,
                    prompt_digest=digest_of(key),
                )
                self.computing[key] = num_tokens
            if decode_comes:
                incoming = self.decode_pool.reserve(key, num_tokens, num_cached)
                self.decode.grant(incoming, peer, self.wire.now_s)
        except NoFreeBlocks:
            if prefill_comes and decode_comes:
                self.decode.wait_for_room(key, peer, self.wire.now_s)
                if self.chance.random() < 0.5:
                    self.decode.cancel(key, self.wire.now_s)

    def compute(self) -> None:
        """A chunk of some prompt, or its last."""
        live = [key for key in self.computing if key in self.life.pool.tables]
        if not live:
            return
        key = self.chance.choice(live)
        self.life.pool.compute(key, self.computing[key])
        if self.chance.random() < 0.5:
            num_computed = self.chance.randrange(self.computing[key] + 1)
            self.life.side.advance(key, self.life.pool.tables[key], num_computed, self.wire.now_s)
            return
        del self.computing[key]
        if self.chance.random() < 0.1:
            self.life.side.withdraw(key, "token 1 ended it", self.wire.now_s, request_ended=True)
        else:
            table = self.life.pool.tables[key]
            self.life.side.finish(key, table, first_token(key), self.wire.now_s, self.wire.now_s)

    def cancel(self) -> None:
        """The client is gone; either leg may hear of it first, or alone."""
        key = key_of(self.chance.randrange(max(1, self.num_requests - 8), self.num_requests + 1))
        if self.chance.random() < 0.7:
            self.decode.cancel(key, self.wire.now_s)
        if self.chance.random() < 0.7:
            self.life.side.withdraw(key, "cancelled", self.wire.now_s)

    def break_connections(self) -> None:
        """Every connection is lost with what is under way, and made again."""
        for dealer in self.context.dealers:
            dealer.inbox.clear()
            if not dealer.closed:
                self.wire.connect(dealer)
        if self.wire.listener is not None:
            self.wire.listener.inbox.clear()
            self.wire.listener.dealers = {d.identity: d for d in self.context.dealers if not d.closed}

    def restart_prefill_node(self) -> None:
        """Killed, and another life at the same address."""
        self.dead.add(self.life.process)
        self.life = self._start_prefill_node()
        self.computing.clear()
        self.is_prefill_frozen = False

    def run_prefill_node(self) -> None:
        """One round of its transfer thread."""
        self.life.side.round(self.wire.now_s)

    def run_decode_node(self) -> None:
        """One round of its transfer thread."""
        self.decode.round(self.wire.now_s)

    def step(self) -> None:
        """One thing happens; time goes on."""
        roll = self.chance.random()
        if roll < 0.12:
            self.arrive()
        elif roll < 0.15 and self.num_requests:
            self.cancel()
        elif roll < 0.152:
            self.restart_prefill_node()
        elif roll < 0.154:
            self.break_connections()
        elif roll < 0.155:
            self.is_prefill_frozen = True
        elif roll < 0.18:
            self.is_prefill_frozen = False
        elif roll < 0.58 and not self.is_prefill_frozen:
            self.life.pusher.push_one(self.wire.now_s)
        elif roll < 0.7 and not self.is_prefill_frozen:
            self.compute()
        self.wire.now_s += self.chance.choice((0.0, 0.01, 0.05, 0.3))
        if not self.is_prefill_frozen and self.chance.random() < 0.7:
            self.run_prefill_node()
        if self.chance.random() < 0.7:
            self.run_decode_node()
        self.decode_pool.pool.check()
        self.life.pool.pool.check()

    def quiesce(self) -> None:
        """No more requests, no more faults: let everything come to its end."""
        self.wire.is_bad = False
        self.is_prefill_frozen = False
        for key in list(self.computing):
            self.life.side.withdraw(key, "cancelled", self.wire.now_s)
        for key in list(self.decode._interests):
            self.decode.cancel(key, self.wire.now_s)
        for _ in range(400):
            for _ in range(5):
                self.life.pusher.push_one(self.wire.now_s)
            self.wire.now_s += 0.2
            self.run_prefill_node()
            self.run_decode_node()


@pytest.mark.parametrize("peers_write", [True, False], ids=["memory", "mailbox"])
@pytest.mark.parametrize("seed", range(6))
def test_no_schedule_delivers_wrong_kv_reuses_a_block_too_early_or_leaks(
    monkeypatch: pytest.MonkeyPatch, seed: int, peers_write: bool
) -> None:
    world = World(seed, peers_write=peers_write)
    monkeypatch.setattr("kvtransfer.receiving.is_gone", lambda process: process in world.dead)
    for _ in range(_NUM_STEPS):
        world.step()
    world.quiesce()
    assert len(world.decode_pool.delivered_kv) > 20
    assert len(world.decode_pool.failures) > 20
    assert world.decode.num_live == world.life.side.num_live == 0
    pools: tuple[Any, ...] = (world.decode_pool, world.life.pool)
    for pool in pools:
        assert pool.pool.num_free == NUM_BLOCKS
    # nothing was written into a free block of the decode node
    assert (world.decode_pool.blocks == FREE_BYTE).all()
