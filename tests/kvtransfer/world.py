"""A prefill node and a decode node on a simulated network and a virtual clock, in one thread.

Owns both sides, their pools, the connections between them and whatever is under way. Nothing happens by itself: a test
says what happens next, and what becomes of messages (`Fate`) and of blocks (`FaultPlan`) on their way.

Checked the moment it happens: what is delivered is the prompt's KV; a block is written only while it is set aside for
the handoff and generation it is written for; a block that is read is held for that handoff; a granted handoff ends
once. `check` looks at what must hold between any two moments, `quiesce` and `check_over` at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, TypeAlias, cast

import numpy as np
import zmq

from kvtransfer.layers import LayerProgress
from kvtransfer.messages import (
    RECEIVER_TO_SENDER,
    SENDER_TO_RECEIVER,
    PeerHello,
    PeerRefusal,
    PeerWelcome,
    ProcessIdentity,
)
from kvtransfer.pools.host import HostPool
from kvtransfer.process_identity import this_process
from kvtransfer.pusher import Pusher
from kvtransfer.receiving import ReceivingSide
from kvtransfer.sending import SendingSide
from kvtransfer.states import ReceivingState, SendingState
from kvtransfer.transports.base import Blocks, Move
from tests.kvtransfer.loopback import (
    NAME,
    Fault,
    FaultPlan,
    LoopbackNetwork,
    LoopbackReceiver,
    LoopbackSender,
    without_faults,
)
from tests.kvtransfer.pair import NUM_BLOCKS, RECEIVER_EPOCH, SENDER_EPOCH, empty_blocks, receiving_facts, sending_facts
from tests.kvtransfer.pools import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    FREE_BYTE,
    DecodePool,
    PrefillPool,
    digest_of,
    first_token,
    kv,
)
from wire.links import LinkSettings
from wire.messages import HandoffFigures, PrefillPeer, TokenEvent
from wire.request_key import RequestKey

ADDRESS = "tcp://prefill:1"
NUM_LAYERS = 4
TRANSIT_S = 0.01
HANDSHAKE = (PeerHello, PeerWelcome, PeerRefusal)
_LAYER_BYTES = BLOCK_BYTES // NUM_LAYERS
_LONG_S = 3600.0

Fate: TypeAlias = Callable[[object], Sequence[float]]
"""After how many seconds each copy of a message arrives; () loses it."""

Inbox: TypeAlias = list[tuple[float, int, bytes, bytes]]
"""(when it arrives, number, identity of its connection, frame)."""


class Kind(Enum):
    """The kinds of receivers there are."""

    MEMORY = "memory that peers write before push returns, and nobody can fence"
    RDMA = "memory that a network writes, later, and after its peer's end too; it tells arrivals, and can be fenced"
    MAILBOX = "its owner writes what has arrived"

    @property
    def can_be_late(self) -> bool:
        """Whether a block can arrive after its push has returned."""
        return self is not Kind.MEMORY

    @property
    def can_double(self) -> bool:
        """Whether a block can arrive twice."""
        return self is not Kind.RDMA


def arrives(message: object) -> Sequence[float]:
    """The fate of messages on a network that works."""
    return (TRANSIT_S,)


class Wire:
    """All connections: frames under way, each with the moment it arrives."""

    def __init__(self, fate: Fate) -> None:
        self.now_s = 0.0
        self.fate = fate
        self.listener: FakeRouter | None = None
        self._num_sent = 0
        self._num_connections = 0

    def connect(self, dealer: FakeDealer) -> None:
        """A connection, new or again: ZMQ gives it a new identity at the listener."""
        self._num_connections += 1
        dealer.identity = f"connection {self._num_connections}".encode()
        if self.listener is not None:
            self.listener.dealers[dealer.identity] = dealer

    def carry(self, inbox: Inbox, identity: bytes, frame: bytes, message: object) -> None:
        """Have each copy of a frame arrive in its time. Nothing comes after a hello that was said before it: the
        sides may count on that much of the order of a connection.
        """
        delays_s = self.fate(message)
        if isinstance(message, PeerHello) and delays_s:
            latest_s = self.now_s + min(delays_s)
            inbox[:] = [(min(at_s, latest_s) if of == identity else at_s, n, of, f) for at_s, n, of, f in inbox]
        for delay_s in delays_s:
            self._num_sent += 1
            inbox.append((self.now_s + delay_s, self._num_sent, identity, frame))

    def take(self, inbox: Inbox) -> tuple[bytes, bytes]:
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
        self.inbox: Inbox = []
        self._wire = wire

    def recv_multipart(self, flags: int) -> list[bytes]:
        return [*self._wire.take(self.inbox)]

    def send_multipart(self, frames: Sequence[bytes], flags: int) -> None:
        dealer = self.dealers.get(frames[0])
        if dealer is None or dealer.closed or dealer.identity != frames[0]:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        self._wire.carry(dealer.inbox, b"", frames[1], SENDER_TO_RECEIVER.decode(frames[1]))


class FakeDealer:
    """The decode node's end of a connection."""

    def __init__(self, wire: Wire) -> None:
        self.identity = b""
        self.inbox: Inbox = []
        self.closed = False
        self._wire = wire

    def setsockopt(self, option: int, value: object) -> None:
        """All options are the same to the simulation."""

    def connect(self, address: str) -> None:
        self._wire.connect(self)

    def recv(self, flags: int) -> bytes:
        return self._wire.take(self.inbox)[1]

    def send(self, frame: bytes, flags: int) -> None:
        listener = self._wire.listener
        if listener is not None and self.identity in listener.dealers:
            self._wire.carry(listener.inbox, self.identity, frame, RECEIVER_TO_SENDER.decode(frame))

    def close(self) -> None:
        self.closed = True


class FakeContext:
    """Opens the decode node's sockets."""

    def __init__(self, wire: Wire) -> None:
        self.dealers: list[FakeDealer] = []
        self._wire = wire

    def socket(self, kind: int) -> FakeDealer:
        self.dealers = [dealer for dealer in self.dealers if not dealer.closed]
        self.dealers.append(FakeDealer(self._wire))
        return self.dealers[-1]


class CheckedReceiver(LoopbackReceiver):
    """Looks at every block the moment it is written. As `Kind.RDMA` it is told what has arrived."""

    def __init__(self, network: LoopbackNetwork, pool: CheckedDecodePool, kind: Kind, violations: list[str]) -> None:
        super().__init__(
            network, "D", pool.blocks, peers_write=kind is not Kind.MAILBOX, can_fence=kind is not Kind.MEMORY
        )
        self._pool, self._violations = pool, violations
        self.is_silent = self.ends_with_writer = kind is Kind.MEMORY
        self.ends_with_endpoint = True

    def arrive(self, key: RequestKey, move: Move, payload: bytes) -> None:
        super().arrive(key, move, payload)
        if self.peers_write and not self.is_silent:
            if self._announced.may_write(key, move.index, (move.target,), (move.generation,)):
                self._announced.arrived(key, move.index, 1)
            else:
                self.num_refused += 1

    def write(self, move: Move, begin_byte: int, payload: bytes) -> None:
        if not self._pool.is_set_aside(move.target, move.generation):
            self._violations.append(f"block {move.target} is written by {move}, and was not set aside for it")
        super().write(move, begin_byte, payload)


class CheckedSender(LoopbackSender):
    """Looks at every block the moment it is read."""

    def __init__(self, network: LoopbackNetwork, name: str, pool: PrefillPool, violations: list[str]) -> None:
        receiver = network.find(name)
        super().__init__(network, receiver.endpoint, pool.blocks)
        self._pool, self._violations = pool, violations
        self.is_silent = self.pushes_parts = receiver.is_silent
        self.is_closed = False

    def is_reading(self, key: RequestKey) -> bool:
        return not self.is_closed and super().is_reading(key)

    def close(self) -> None:
        """What a network carries goes on, and only a fence would end it."""
        self.is_closed = True
        if self.is_silent or not self._is_memory:
            super().close()
        else:
            self.needs_fence = any(parcel.sender is self for _, parcel in self._network._delayed)

    def push(self, key: RequestKey, moves: Sequence[Move]) -> bool:
        self._check(key, moves)
        return super().push(key, moves)

    def push_part(self, key: RequestKey, moves: Sequence[Move], begin_byte: int, end_byte: int) -> None:
        self._check(key, moves)
        super().push_part(key, moves, begin_byte, end_byte)

    def _check(self, key: RequestKey, moves: Sequence[Move]) -> None:
        held = self._pool.tables.get(key, [])
        self._violations.extend(
            f"{move} is read, and went back to its pool" for move in moves if move.source not in held
        )


@dataclass(slots=True)
class CheckedOpener:
    """Opens the senders of one life of the prefill node."""

    network: LoopbackNetwork
    pool: PrefillPool
    violations: list[str]
    senders: list[CheckedSender] = field(default_factory=list)

    def poll(self) -> None:
        """Senders look after themselves."""

    def wait_on(self) -> Sequence[Any]:
        return ()

    def open(self, hello: PeerHello) -> tuple[str, CheckedSender]:
        self.senders.append(CheckedSender(self.network, hello.endpoints[0].address, self.pool, self.violations))
        return NAME, self.senders[-1]


class SteppedPusher(Pusher):
    """Pushes as many pieces as it is allowed to: a write can come long after it was asked for."""

    num_allowed = 0

    def _is_ready(self, queue: Any) -> bool:
        return self.num_allowed > 0 and super()._is_ready(queue)

    def _advance(self, queue: Any, now_s: float) -> None:
        self.num_allowed -= 1
        super()._advance(queue, now_s)


@dataclass(slots=True)
class Prompt:
    """A prompt under computation. `layers`: its last step is running."""

    num_tokens: int
    num_computed_tokens: int = 0
    layers: LayerProgress | None = None


@dataclass(slots=True)
class PrefillLife:
    """One life of the prefill node."""

    epoch: int
    process: ProcessIdentity
    pool: PrefillPool
    opener: CheckedOpener
    pusher: SteppedPusher
    side: SendingSide
    prompts: dict[RequestKey, Prompt] = field(default_factory=dict)

    @property
    def computing(self) -> list[RequestKey]:
        """Prompts that are not finished and still hold their blocks."""
        return [key for key in self.prompts if key in self.pool.tables]

    @property
    def peer(self) -> PrefillPeer:
        return PrefillPeer("P", self.epoch, ADDRESS)


class CheckedDecodePool(DecodePool):
    """Looks at every delivery and every end the moment it happens. Delivered blocks stay held until `retire`."""

    def __init__(self, blocks: Blocks) -> None:
        super().__init__(blocks)
        self.running: dict[RequestKey, list[int]] = {}
        self.num_told: Counter[RequestKey] = Counter()
        self.num_ends: Counter[RequestKey] = Counter()

    def delivered(self, key: RequestKey, first: TokenEvent, figures: HandoffFigures) -> None:
        incoming = self.waiting[key]
        self.running[key] = self.held.pop(key)
        self.delivered_kv[key] = [self.blocks[block_id].tobytes() for block_id in incoming.block_ids]
        self.num_ends[key] += 1
        assert self.num_ends[key] == 1, "a handoff ended twice"
        assert self.has_exactly(key), "delivered KV differs from the prompt's"
        assert first == first_token(key)
        assert not self.num_told[key], "a handoff that failed was delivered"

    def spoiled(self, key: RequestKey, reason: str) -> None:
        super().spoiled(key, reason)
        self.num_told[key] += 1
        assert self.num_told[key] == 1, "a failure was reported twice"
        assert not self.num_ends[key], "a handoff that has ended failed"

    def returned(self, key: RequestKey) -> None:
        super().returned(key)
        self.num_ends[key] += 1
        assert self.num_ends[key] == 1, "a handoff ended twice"

    def retire(self, key: RequestKey) -> None:
        """The request that goes on from the delivered KV is over."""
        self.held[key] = self.running.pop(key)
        self._free(key)

    def is_set_aside(self, block_id: int, generation: int) -> bool:
        """Whether this use of the block is that of a handoff which is not over."""
        return self.pool.generation(block_id) == generation and any(
            block_id in block_ids for block_ids in self.held.values()
        )


class World:
    """Everything there is, and what can happen to it. Patches `kvtransfer.receiving.is_gone` while it is in use: ask
    `is_gone` here.
    """

    def __init__(self, kind: Kind, *, fate: Fate = arrives, plan: FaultPlan = without_faults) -> None:
        self.kind = kind
        self.wire = Wire(fate)
        self.context = FakeContext(self.wire)
        self.dead: set[ProcessIdentity] = set()
        self.violations: list[str] = []  # noted, not raised: the sides outlive whatever a transport raises
        self.network = LoopbackNetwork(plan)
        self.decode_pool = CheckedDecodePool(empty_blocks())
        self.receiver = CheckedReceiver(self.network, self.decode_pool, kind, self.violations)
        self.decode = ReceivingSide(
            receiving_facts(),
            cast("zmq.Context[zmq.Socket[bytes]]", self.context),
            LinkSettings(),
            [self.receiver],
            HostPool(self.decode_pool.blocks),
            self.decode_pool,
        )
        self.num_lives = 0
        self.life = self._start_prefill_node()
        self.is_prefill_frozen = False
        self.cancelled: set[RequestKey] = set()
        self.granted: list[RequestKey] = []
        self._is_cut = False

    def is_gone(self, process: ProcessIdentity) -> bool:
        """Whether that process has ended."""
        return process in self.dead

    def _start_prefill_node(self) -> PrefillLife:
        self.num_lives += 1
        epoch = SENDER_EPOCH + self.num_lives
        process = replace(this_process(), start_ticks=self.num_lives)
        self.wire.listener = router = FakeRouter(self.wire)
        for dealer in self.context.dealers:
            if not dealer.closed:
                self.wire.connect(dealer)
        blocks = empty_blocks()
        pool, pusher = PrefillPool(blocks), SteppedPusher(HostPool(blocks))
        opener = CheckedOpener(self.network, pool, self.violations)
        facts = replace(sending_facts(), epoch=epoch, process=process)
        side = SendingSide(facts, cast("zmq.Socket[bytes]", router), opener, pusher, pool)
        return PrefillLife(epoch, process, pool, opener, pusher, side)

    # what the prefill node's engine and router do

    def begin(self, key: RequestKey, num_tokens: int, *, decode_epoch: int = RECEIVER_EPOCH) -> None:
        """`Prefill` arrives. Raises `NoFreeBlocks`."""
        life = self.life
        life.pool.start(key, num_tokens)
        life.prompts[key] = Prompt(num_tokens)
        life.side.begin(
            key,
            self.wire.now_s,
            decode_node_id="D",
            decode_epoch=decode_epoch,
            num_tokens=num_tokens,
            prompt_digest=digest_of(key),
        )

    def compute(self, key: RequestKey, num_tokens: int) -> None:
        """A chunk ends at this token."""
        prompt = self.life.prompts[key]
        if prompt.layers is None and num_tokens > prompt.num_computed_tokens:
            prompt.num_computed_tokens = num_tokens
            self.life.pool.compute(key, num_tokens)
            self.life.side.advance(key, tuple(self.life.pool.tables[key]), num_tokens, self.wire.now_s)

    def begin_last_step(self, key: RequestKey) -> None:
        """The step that computes the rest begins; it may be pushed layer by layer."""
        prompt = self.life.prompts[key]
        if prompt.layers is None:
            prompt.layers = LayerProgress(NUM_LAYERS, lambda: None)
            self.life.side.follow(key, tuple(self.life.pool.tables[key]), prompt.layers, self.wire.now_s)

    def store_layer(self, key: RequestKey) -> None:
        """The KV of one more layer is in the blocks of the last step. The last layer finishes the prompt."""
        prompt, pool = self.life.prompts[key], self.life.pool
        if prompt.layers is None:
            return
        part = slice(prompt.layers.num_done * _LAYER_BYTES, (prompt.layers.num_done + 1) * _LAYER_BYTES)
        table = pool.tables[key]
        for index in range(prompt.num_computed_tokens // BLOCK_SIZE, len(table)):
            pool.blocks[table[index], part] = np.frombuffer(kv(digest_of(key), index)[part], dtype=np.uint8)
        prompt.layers.count()
        if prompt.layers.num_done == NUM_LAYERS:
            self.finish(key)

    def finish(self, key: RequestKey) -> None:
        """The whole prompt is computed and token 1 drawn."""
        prompt = self.life.prompts.pop(key)
        if prompt.layers is None:
            self.life.pool.compute(key, prompt.num_tokens)
        now_s, table = self.wire.now_s, tuple(self.life.pool.tables[key])
        self.life.side.finish(key, table, first_token(key), now_s, now_s)

    def fail_step(self, key: RequestKey) -> None:
        """A step cannot be computed."""
        self.give_up_prefill(key, "the step failed")

    def give_up_prefill(self, key: RequestKey, reason: str, *, request_ended: bool = False) -> None:
        """The prefill node does not want to go on: cancelled, failed, or ended by token 1."""
        prompt = self.life.prompts.pop(key, None)
        if prompt is not None and prompt.layers is not None:
            prompt.layers.abandon()
        self.life.side.withdraw(key, reason, self.wire.now_s, request_ended=request_ended)

    # what the decode node's engine and router do

    def grant(
        self, key: RequestKey, num_tokens: int, num_cached_tokens: int = 0, peer: PrefillPeer | None = None
    ) -> None:
        """`Decode` arrives and there is room. Raises `NoFreeBlocks`."""
        incoming = self.decode_pool.reserve(key, num_tokens, num_cached_tokens)
        self.granted.append(key)
        self.decode.grant(incoming, peer or self.life.peer, self.wire.now_s)

    def wait_for_room(self, key: RequestKey) -> None:
        """`Decode` arrives and there is none."""
        self.decode.wait_for_room(key, self.life.peer, self.wire.now_s)

    def cancel_decode(self, key: RequestKey) -> None:
        """The decode node does not want it any more."""
        self.cancelled.add(key)
        self.decode.cancel(key, self.wire.now_s)

    # what happens to the nodes and between them

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
        """Killed, and another life at the same address. What is under way may still arrive."""
        self.dead.add(self.life.process)
        self.life = self._start_prefill_node()
        self.is_prefill_frozen = False

    def cut_data(self) -> None:
        """No block passes any more."""
        if not self._is_cut:
            self._is_cut = True
            self.network.cut(self.receiver.endpoint.address)

    def mend_data(self) -> None:
        """Blocks pass again."""
        if self._is_cut:
            self._is_cut = False
            self.network.restore(self.receiver.endpoint.address)

    def fence(self) -> None:
        """The decode node's receiver changes its endpoint, as it does when a process of its own had died."""
        self.receiver.fence()

    def push(self, num_pieces: int) -> None:
        """So many pieces may be pushed."""
        self.life.pusher.num_allowed = num_pieces

    def run_prefill_node(self) -> None:
        """One round of its transfer thread, unless it is frozen."""
        if not self.is_prefill_frozen:
            self.life.side.round(self.wire.now_s)

    def run_decode_node(self) -> None:
        """One round of its transfer thread."""
        self.decode.round(self.wire.now_s)

    def turn(self, duration_s: float) -> None:
        """Time goes on, and both nodes look."""
        self.wire.now_s += duration_s
        self.run_prefill_node()
        self.run_decode_node()

    # what must hold

    def check(self) -> None:
        """Between any two moments. Raises `AssertionError` or, from the pools, `RuntimeError`."""
        assert self.violations == []
        decode, prefill = self.decode_pool, self.life.pool
        for pool in (decode.pool, prefill.pool):
            pool.check()
            assert pool.num_free + pool.num_cached + pool.num_held == NUM_BLOCKS
        self._check_owners([*decode.held.values(), *decode.running.values()], decode.pool.num_held)
        self._check_owners([*prefill.tables.values()], prefill.pool.num_held)
        owned = {block_id for held in (decode.held, decode.running) for table in held.values() for block_id in table}
        free = [block_id for block_id in range(NUM_BLOCKS) if block_id not in owned]
        assert (decode.blocks[free] == FREE_BYTE).all(), "a free block was written"
        for key, block_ids in decode.running.items():
            now = [decode.blocks[block_id].tobytes() for block_id in block_ids]
            assert now == decode.delivered_kv[key], "KV changed after it was delivered"
        if self.kind is Kind.RDMA:
            reading = [sender for sender in self.life.opener.senders if not sender.is_closed]
            read = {parcel.key for _, parcel in self.network._delayed if parcel.sender in reading}
            assert read <= prefill.tables.keys(), "a block went back while it is read"
        self._check_leases()

    def _check_owners(self, tables: Sequence[Sequence[int]], num_held: int) -> None:
        owned = [block_id for table in tables for block_id in table]
        assert len(set(owned)) == len(owned) == num_held, "blocks have no owner, or two"

    def _check_leases(self) -> None:
        received = self.decode._handoffs
        awaited = (ReceivingState.GRANTED, ReceivingState.COMMITTED)
        held = {key for key, handoff in received.items() if handoff.progress.state in awaited}
        assert held == set(self.decode._leases._deadlines_s), "blocks are held without a deadline, or a lease leaked"
        sent = self.life.side._outgoing
        computed = {k for k, h in sent.items() if h.progress.state in (SendingState.PUSHING, SendingState.COMMITTED)}
        assert computed <= set(self.life.side._leases._deadlines_s) <= set(sent)

    def quiesce(self) -> None:
        """No more requests and no more faults: let everything come to its end."""
        self.wire.fate = arrives
        self.network._plan = without_faults
        self.is_prefill_frozen = False
        self.mend_data()
        for key in self.life.computing:
            self.give_up_prefill(key, "cancelled")
        for key in list(self.decode._interests):
            self.cancel_decode(key)
        for key in list(self.decode_pool.running):
            self.decode_pool.retire(key)
        self.push(10**6)
        for _ in range(160):
            if self.is_quiet:
                return
            self.turn(0.5)
            for key in list(self.decode_pool.running):
                self.decode_pool.retire(key)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is alive."""
        pools = (self.decode_pool.pool, self.life.pool.pool)
        return not self.decode.num_live + self.life.side.num_live and all(p.num_free == NUM_BLOCKS for p in pools)

    def check_over(self) -> None:
        """After `quiesce`: everything is free, nothing is left, and every granted handoff has ended once."""
        assert self.violations == []
        assert self.decode.num_live == self.life.side.num_live == 0
        for pool in (self.decode_pool.pool, self.life.pool.pool):
            assert pool.num_free == NUM_BLOCKS
        assert len(self.decode._leases) == len(self.life.side._leases) == 0
        assert self.decode.num_quarantined_blocks == 0
        assert not self.life.side._draining
        assert not self.life.pusher._readers
        # nothing was written into a free block of the decode node
        assert (self.decode_pool.blocks == FREE_BYTE).all()
        for key in self.granted:
            assert self.decode_pool.num_ends[key] == 1, "a granted handoff has not ended"
            is_known = key in self.cancelled or key in self.decode_pool.delivered_kv or self.decode_pool.num_told[key]
            assert is_known, "a handoff failed and nobody was told"


def patches(world: World) -> dict[str, object]:
    """What a simulated world replaces: who is alive, and the real time that a round may take."""
    return {
        "kvtransfer.receiving.is_gone": world.is_gone,
        "kvtransfer.receiving._SLICE_S": _LONG_S,
        "kvtransfer.pusher._SLICE_S": _LONG_S,
    }


def flipped(bit: int) -> Fault:
    """One bit arrives changed."""
    return Fault(flipped_bits=(bit,))
