"""A prefill node and a decode node on a simulated network and a virtual clock, in one thread.

Owns both sides, their pools, and everything in flight between them. Nothing happens by itself: a test says what
happens next, and what happens to messages (`Fate`) and to blocks (`FaultPlan`) in flight.

Four promises are checked when it matters: delivered KV is the prompt's KV; a block is written only while it is held for
the handoff and generation it is written for; a block that is read is held for that handoff; a granted handoff ends
once. `check` verifies the invariants at any moment, `quiesce` and `check_over` those at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
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
    PushLayers,
    WaitForRoom,
)
from baton.kvtransfer.layers import LayerProgress
from baton.kvtransfer.messages import PeerHello, PeerRefusal, PeerWelcome, ProcessIdentity
from baton.kvtransfer.pools.host import HostPool
from baton.kvtransfer.process_identity import this_process
from baton.kvtransfer.pusher import Pusher
from baton.kvtransfer.receiver_connections import ReceiverConnections
from baton.kvtransfer.receiving import ReceivingSide
from baton.kvtransfer.sending import SendingSide
from baton.kvtransfer.states import ReceivingState, SendingState
from baton.kvtransfer.transports.base import Blocks, Move
from baton.wire.links import LinkSettings
from baton.wire.messages.legs import PrefillPeer
from baton.wire.messages.output import HandoffFigures, TokenEvent
from baton.wire.request_key import RequestKey
from tests.kvtransfer.loopback import (
    NAME,
    Fault,
    FaultPlan,
    LoopbackNetwork,
    LoopbackReceiver,
    LoopbackSender,
    without_faults,
)
from tests.kvtransfer.pair import (
    ADDRESS,
    NUM_BLOCKS,
    RECEIVER_EPOCH,
    SENDER_EPOCH,
    empty_blocks,
    receiving_facts,
    sending_facts,
)
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
from tests.kvtransfer.wire import FakeContext, Fate, Wire, arrives

NUM_LAYERS = 4
LAYER_ENDS = (16, 24, 96, BLOCK_BYTES)
"""Layers of a block need not be of one size."""
HANDSHAKE = (PeerHello, PeerWelcome, PeerRefusal)
_LONG_S = 3600.0


class Kind(Enum):
    """The kinds of receivers."""

    MEMORY = "memory that peers write before push returns, and that cannot be fenced"
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


class CheckedReceiver(LoopbackReceiver):
    """Checks every block when it is written. As `Kind.RDMA` it is told what has arrived."""

    def __init__(self, network: LoopbackNetwork, pool: CheckedDecodePool, kind: Kind, violations: list[str]) -> None:
        super().__init__(
            network, "D", pool.blocks, peers_write=kind is not Kind.MAILBOX, can_fence=kind is not Kind.MEMORY
        )
        self._pool, self._violations = pool, violations
        self.is_silent = kind is Kind.MEMORY

    def arrive(self, key: RequestKey, move: Move, payload: bytes) -> None:
        super().arrive(key, move, payload)
        if self.peers_write and not self.is_silent:
            if self._announced.may_write(key, move.index, (move.target,), (move.generation,)):
                self._announced.arrived(key, move.index, 1)
            else:
                self.num_refused += 1

    def write(self, move: Move, begin_byte: int, payload: bytes) -> None:
        if not self._pool.is_held_for_a_handoff(move.target, move.generation):
            self._violations.append(f"block {move.target} is written by {move}, and was not held for it")
        super().write(move, begin_byte, payload)


class CheckedSender(LoopbackSender):
    """Checks every block when it is read."""

    def __init__(self, network: LoopbackNetwork, name: str, pool: PrefillPool, violations: list[str]) -> None:
        receiver = network.find(name)
        super().__init__(network, receiver.endpoint, pool.blocks)
        self._pool, self._violations = pool, violations
        self.is_silent = self.pushes_parts = receiver.is_silent
        self.is_closed = False

    def is_reading(self, key: RequestKey) -> bool:
        return not self.is_closed and super().is_reading(key)

    def close(self) -> None:
        """Close it. Blocks in flight on a network still arrive; only a fence would end them."""
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
        self._violations.extend(f"{move} is read, but was released" for move in moves if move.source not in held)


@dataclass(slots=True)
class CheckedOpener:
    """Opens the senders of one life of the prefill node."""

    network: LoopbackNetwork
    pool: PrefillPool
    violations: list[str]
    senders: list[CheckedSender] = field(default_factory=list)

    def poll(self) -> None:
        """Do nothing: senders share no resources here."""

    def wait_on(self) -> Sequence[Any]:
        return ()

    def open(self, hello: PeerHello) -> tuple[str, CheckedSender]:
        self.senders.append(CheckedSender(self.network, hello.endpoints[0].address, self.pool, self.violations))
        return NAME, self.senders[-1]


class SteppedPusher(Pusher):
    """Pushes only as many pieces as it is allowed to, so that a write can come long after its job was submitted."""

    num_allowed = 0

    @property
    def has_readers(self) -> bool:
        """Whether it still remembers a handoff that it pushed."""
        return bool(self._readers)

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
    """Checks every delivery and every end when it happens. Delivered blocks stay held until `retire`."""

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

    def failed(self, key: RequestKey, reason: str) -> None:
        super().failed(key, reason)
        self.num_told[key] += 1
        assert self.num_told[key] == 1, "a failure was reported twice"
        assert not self.num_ends[key], "a handoff that has ended failed"

    def released(self, key: RequestKey) -> None:
        super().released(key)
        self.num_ends[key] += 1
        assert self.num_ends[key] == 1, "a handoff ended twice"

    def retire(self, key: RequestKey) -> None:
        """The request that goes on from the delivered KV is over."""
        self.held[key] = self.running.pop(key)
        self._free(key)

    def is_held_for_a_handoff(self, block_id: int, generation: int) -> bool:
        """Whether this use of the block is that of a handoff which is not over."""
        return self.pool.generation(block_id) == generation and any(
            block_id in block_ids for block_ids in self.held.values()
        )


class World:
    """Both nodes, the network between them, and methods for all that can happen to them. While a world is in use,
    `baton.kvtransfer.incoming.is_gone` is replaced by the world's `is_gone` (see `patches`).
    """

    def __init__(self, kind: Kind, *, fate: Fate = arrives, plan: FaultPlan = without_faults) -> None:
        self.kind = kind
        self.wire = Wire(fate)
        self.context = FakeContext(self.wire)
        self.dead: set[ProcessIdentity] = set()
        self.violations: list[str] = []  # recorded, not raised: the sides survive whatever a transport raises
        self.network = LoopbackNetwork(plan)
        self.decode_pool = CheckedDecodePool(empty_blocks())
        self.receiver = CheckedReceiver(self.network, self.decode_pool, kind, self.violations)
        facts, context = receiving_facts(), cast("zmq.Context[zmq.Socket[bytes]]", self.context)
        connections = ReceiverConnections(facts, context, LinkSettings(), [self.receiver])
        self.decode = ReceivingSide(facts, connections, HostPool(self.decode_pool.blocks), self.decode_pool)
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
        router = self.wire.listen()
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
        life.side.do(BeginHandoff(key, "D", decode_epoch, num_tokens, digest_of(key)), self.wire.now_s)

    def compute(self, key: RequestKey, num_tokens: int) -> None:
        """A chunk ends at this token."""
        prompt = self.life.prompts[key]
        if prompt.layers is None and num_tokens > prompt.num_computed_tokens:
            prompt.num_computed_tokens = num_tokens
            self.life.pool.compute(key, num_tokens)
            self.life.side.do(PushComputed(key, tuple(self.life.pool.tables[key]), num_tokens), self.wire.now_s)

    def begin_last_step(self, key: RequestKey) -> None:
        """The step that computes the rest begins; it may be pushed layer by layer."""
        prompt = self.life.prompts[key]
        if prompt.layers is None:
            prompt.layers = LayerProgress(LAYER_ENDS, lambda: None)
            self.life.side.do(PushLayers(key, tuple(self.life.pool.tables[key]), prompt.layers), self.wire.now_s)

    def store_layer(self, key: RequestKey) -> None:
        """The KV of one more layer is in the blocks of the last step. The last layer finishes the prompt."""
        prompt, pool = self.life.prompts[key], self.life.pool
        if prompt.layers is None:
            return
        done = prompt.layers.num_done
        part = slice(prompt.layers.end_of(done), prompt.layers.end_of(done + 1))
        table = pool.tables[key]
        for index in range(prompt.num_computed_tokens // BLOCK_SIZE, len(table)):
            pool.blocks[table[index], part] = np.frombuffer(kv(digest_of(key), index)[part], dtype=np.uint8)
        prompt.layers.count()
        if prompt.layers.num_done == NUM_LAYERS:
            self.finish(key)

    def finish(self, key: RequestKey) -> None:
        """The whole prompt is computed and token 1 sampled."""
        prompt = self.life.prompts.pop(key)
        if prompt.layers is None:
            self.life.pool.compute(key, prompt.num_tokens)
        now_s, table = self.wire.now_s, tuple(self.life.pool.tables[key])
        self.life.side.do(FinishHandoff(key, table, (first_token(key),), now_s), now_s)

    def fail_step(self, key: RequestKey) -> None:
        """A step cannot be computed."""
        self.cancel_prefill(key, "the step failed")

    def cancel_prefill(self, key: RequestKey, reason: str, *, request_ended: bool = False) -> None:
        """The prefill node ends a handoff: it was cancelled, it failed, or token 1 ended the request."""
        prompt = self.life.prompts.pop(key, None)
        if prompt is not None and prompt.layers is not None:
            prompt.layers.abandon()
        self.life.side.do(CancelSending(key, reason, request_ended), self.wire.now_s)

    # what the decode node's engine and router do

    def grant(
        self, key: RequestKey, num_tokens: int, num_cached_tokens: int = 0, peer: PrefillPeer | None = None
    ) -> None:
        """`Decode` arrives and there is room. Raises `NoFreeBlocks`."""
        blocks = self.decode_pool.reserve(key, num_tokens, num_cached_tokens)
        self.granted.append(key)
        self.decode.do(GrantBlocks(blocks, peer or self.life.peer), self.wire.now_s)

    def wait_for_room(self, key: RequestKey) -> None:
        """`Decode` arrives and there is none."""
        self.decode.do(WaitForRoom(key, self.life.peer), self.wire.now_s)

    def cancel_decode(self, key: RequestKey) -> None:
        """The decode node cancels a handoff."""
        self.cancelled.add(key)
        self.decode.do(CancelReceiving(key), self.wire.now_s)

    # what happens to the nodes and between them

    def break_connections(self) -> None:
        """Every connection is lost with all messages in flight, and is opened again."""
        self.wire.break_connections()

    def restart_prefill_node(self) -> None:
        """The prefill node is killed and begins another life at the same address. Blocks in flight may still arrive."""
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
        """Allow so many more pieces to be pushed."""
        self.life.pusher.num_allowed = num_pieces

    def run_prefill_node(self) -> None:
        """One round of its transfer thread, unless it is frozen."""
        if not self.is_prefill_frozen:
            self.life.side.round(self.wire.now_s)

    def run_decode_node(self) -> None:
        """One round of its transfer thread."""
        self.decode.round(self.wire.now_s)

    def turn(self, duration_s: float) -> None:
        """Time passes, and both nodes run one round."""
        self.wire.now_s += duration_s
        self.run_prefill_node()
        self.run_decode_node()

    # what must hold

    def check(self) -> None:
        """Check the invariants that hold at any moment. Raises `AssertionError` or, from the pools, `RuntimeError`."""
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
            read = {key for key in self.granted if any(sender.is_reading(key) for sender in reading)}
            assert read <= prefill.tables.keys(), "a block was released while it is read"
        self._check_leases()

    def _check_owners(self, tables: Sequence[Sequence[int]], num_held: int) -> None:
        owned = [block_id for table in tables for block_id in table]
        assert len(set(owned)) == len(owned) == num_held, "blocks have no owner, or two"

    def _check_leases(self) -> None:
        states = (ReceivingState.RESERVED, ReceivingState.GRANTED, ReceivingState.COMMITTED)
        held = [handoff.key for handoff in self.decode.handoffs if handoff.state in states]
        assert all(key in self.decode.leases for key in held), "blocks are held without a deadline"
        assert len(self.decode.leases) == len(held), "a lease leaked"
        sent = {handoff.key: handoff.state for handoff in self.life.side.handoffs}
        leased = {key for key in sent if key in self.life.side.leases}
        computed = {key for key, state in sent.items() if state in (SendingState.PUSHING, SendingState.COMMITTED)}
        assert computed <= leased, "blocks are held without a deadline"
        assert len(self.life.side.leases) == len(leased), "a lease leaked"
        quarantined = sum(handoff.num_blocks for handoff in self.decode.handoffs if handoff.is_quarantined)
        assert quarantined == self.decode.num_quarantined_blocks

    def quiesce(self) -> None:
        """End all requests and faults, and run until everything has ended."""
        self.wire.fate = arrives
        self.network.plan = without_faults
        self.is_prefill_frozen = False
        self.mend_data()
        for key in self.life.computing:
            self.cancel_prefill(key, "cancelled")
        for handoff in self.decode.handoffs:
            if handoff.state is ReceivingState.WAITING:
                self.cancel_decode(handoff.key)
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
        return not self.decode.handoffs and not self.life.side.handoffs and all(p.num_free == NUM_BLOCKS for p in pools)

    def check_over(self) -> None:
        """After `quiesce`: everything is free, nothing is left, and every granted handoff has ended once."""
        assert self.violations == []
        assert not self.decode.handoffs
        assert not self.life.side.handoffs
        for pool in (self.decode_pool.pool, self.life.pool.pool):
            assert pool.num_free == NUM_BLOCKS
        assert len(self.decode.leases) == len(self.life.side.leases) == 0
        assert self.decode.num_quarantined_blocks == 0
        assert not self.life.pusher.has_readers
        # nothing was written into a free block of the decode node
        assert (self.decode_pool.blocks == FREE_BYTE).all()
        for key in self.granted:
            assert self.decode_pool.num_ends[key] == 1, "a granted handoff has not ended"
            is_known = key in self.cancelled or key in self.decode_pool.delivered_kv or self.decode_pool.num_told[key]
            assert is_known, "a handoff failed without a notice"


def patches(world: World) -> dict[str, object]:
    """The functions and constants that a simulated world replaces: process checks, and the real time of a round."""
    return {
        "baton.kvtransfer.incoming.is_gone": world.is_gone,
        "baton.kvtransfer.receiving._SLICE_S": _LONG_S,
        "baton.kvtransfer.pusher._SLICE_S": _LONG_S,
    }


def flipped(bit: int) -> Fault:
    """A fault that changes one bit."""
    return Fault(flipped_bits=(bit,))
