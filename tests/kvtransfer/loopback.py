"""In memory, for two sides in one process; also the fault injector of the transfer tests.

Owns a `LoopbackNetwork`: its receivers by name, and what becomes of every block on its way (a `FaultPlan`). A receiver
is of one of the two kinds that a real transport can be: `peers_write` (memory: a push lands in the pool and nobody here
knows, as with shared memory) or not (a mailbox: a push waits until `poll`, which writes only what a grant announced, as
with sockets).

Time is counted in blocks: a delayed block arrives after that many later blocks or polls of its network, so that a
schedule of faults is repeatable. A link that is cut takes nothing, and loses what is on its way.

Pushed in parts, a block's earlier parts land in the memory at once. With its last part the plan is asked, and the block
goes its way as a whole, put together from the parts that were pushed: a part that was left out is missing there.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from baton.kvtransfer.messages import Endpoint, PeerHello, ProcessIdentity
from baton.kvtransfer.transports.announced import AnnouncedBlocks
from baton.kvtransfer.transports.base import Blocks, BlocksArrived, Move, Starting
from baton.kvtransfer.write_proof import WriteProof
from baton.wire.errors import Refused, TransferFailed
from baton.wire.request_key import RequestKey

NAME = "loopback"
_BLOCKS_PER_PIECE = 4


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one block on its way. The default: it arrives once, at once, as it was sent.

    `num_copies`: 0 loses it, 2 doubles it. `delay`: it arrives after so many later blocks or polls. `num_cut_bytes`:
    missing at its end. `flipped_bits`: positions of bits that arrive changed. `refusal`: the push raises
    `TransferFailed` with this message.
    """

    num_copies: int = 1
    delay: int = 0
    num_cut_bytes: int = 0
    flipped_bits: tuple[int, ...] = ()
    refusal: str = ""


FaultPlan: TypeAlias = Callable[[int, RequestKey, Move], Fault]
"""What happens to block number n (from 0, over all senders of a network) of this handoff."""


def without_faults(number: int, key: RequestKey, move: Move) -> Fault:
    """The plan of a network that works."""
    return Fault()


@dataclass(frozen=True, slots=True)
class _Parcel:
    sender: LoopbackSender
    receiver: LoopbackReceiver
    key: RequestKey
    move: Move
    payload: bytes


class LoopbackNetwork:
    """Receivers by name, and the blocks in flight to them. Used by the threads of both sides at once."""

    def __init__(self, plan: FaultPlan = without_faults) -> None:
        self.plan = plan
        self._receivers: dict[str, LoopbackReceiver] = {}
        self._cut: set[LoopbackReceiver] = set()
        self._delayed: list[tuple[int, _Parcel]] = []
        self._num_blocks = 0
        self._clock = 0
        self._lock = threading.Lock()

    def attach(self, name: str, receiver: LoopbackReceiver) -> None:
        """Make a receiver reachable under this name."""
        self._receivers[name] = receiver

    def detach(self, name: str) -> None:
        """Make it unreachable; what is in flight to it is lost."""
        receiver = self._receivers.pop(name, None)
        self._lose(lambda parcel: parcel.receiver is receiver)

    def find(self, name: str) -> LoopbackReceiver:
        """The receiver of that name. Raises `TransferFailed`."""
        receiver = self._receivers.get(name)
        if receiver is None:
            raise TransferFailed(f"there is no receiver {name!r} in this process")
        return receiver

    def cut(self, name: str) -> None:
        """Cut the link to this receiver: what is in flight to it is lost, and pushes stand still until `restore`."""
        receiver = self.find(name)
        self._cut.add(receiver)
        self._lose(lambda parcel: parcel.receiver is receiver)

    def restore(self, name: str) -> None:
        """Mend the link to this receiver."""
        self._cut.discard(self.find(name))

    def is_cut(self, receiver: LoopbackReceiver) -> bool:
        """Whether the link to this receiver is cut."""
        return receiver in self._cut

    def carry(
        self, sender: LoopbackSender, receiver: LoopbackReceiver, key: RequestKey, move: Move, payload: bytes
    ) -> None:
        """Take one block on its way. Raises `TransferFailed` when the plan says so."""
        with self._lock:
            fault = self.plan(self._num_blocks, key, move)
            self._num_blocks += 1
            if fault.refusal:
                raise TransferFailed(fault.refusal)
            parcel = _Parcel(sender, receiver, key, move, _damaged(payload, fault))
            # in front: what is due at the same moment was sent before and comes after it
            self._delayed[:0] = [(self._clock + fault.delay, parcel)] * fault.num_copies
            self._advance()

    def advance(self) -> None:
        """One unit of time passes."""
        with self._lock:
            self._advance()

    def is_in_flight(self, sender: LoopbackSender, key: RequestKey) -> bool:
        """Whether blocks of this handoff may still reach a receiver."""
        with self._lock:
            return any(parcel.sender is sender and parcel.key == key for _, parcel in self._delayed)

    def lose(self, sender: LoopbackSender) -> None:
        """Lose what this sender has in flight."""
        self._lose(lambda parcel: parcel.sender is sender)

    def _lose(self, is_lost: Callable[[_Parcel], bool]) -> None:
        with self._lock:
            self._delayed = [(due, parcel) for due, parcel in self._delayed if not is_lost(parcel)]

    def _advance(self) -> None:
        due = [parcel for due, parcel in self._delayed if due <= self._clock]
        self._delayed = [entry for entry in self._delayed if entry[0] > self._clock]
        self._clock += 1
        for parcel in due:
            parcel.receiver.arrive(parcel.key, parcel.move, parcel.payload)


class LoopbackReceiver:
    """Receives into `blocks` under `name`. `num_refused` counts blocks that no grant announced.

    `can_fence` is for receivers with `peers_write`: whether `fence` works, and is needed for what a dead peer wrote, as
    with RDMA, or not, as with shared memory.
    """

    def __init__(
        self, network: LoopbackNetwork, name: str, blocks: Blocks, *, peers_write: bool, can_fence: bool = False
    ) -> None:
        self.peers_write = peers_write
        self.is_silent = peers_write
        self.write_proof = WriteProof.OWN_HANDS
        if peers_write:
            self.write_proof = WriteProof.ENDPOINT_ENDED if can_fence else WriteProof.WRITER_ENDED
        self.is_ready = True
        self.num_refused = 0
        self._network = network
        self._name = name
        self._can_fence = can_fence
        self._blocks = blocks
        self._announced = AnnouncedBlocks()
        self._mailbox: deque[tuple[RequestKey, Move, bytes]] = deque()
        network.attach(name, self)

    @property
    def endpoint(self) -> Endpoint:
        """The receiver's name."""
        return Endpoint(NAME, self._name)

    def wait_on(self) -> Sequence[Any]:
        """Nothing that the system could wait for: poll often."""
        return ()

    def expect(self, key: RequestKey, block_ids: Sequence[int], generations: Sequence[int]) -> None:
        """See `Receiver.expect`."""
        self._announced.expect(key, block_ids, generations)

    def is_writing(self, key: RequestKey) -> bool:
        """See `Receiver.is_writing`."""
        return False

    def forget(self, key: RequestKey) -> None:
        """See `Receiver.forget`."""
        self._announced.forget(key)

    def poll(self) -> None:
        """See `Receiver.poll`."""
        self._network.advance()
        while self._mailbox:
            key, move, payload = self._mailbox.popleft()
            is_announced = self._announced.may_write(key, move.index, (move.target,), (move.generation,))
            if is_announced and len(payload) == self._blocks.shape[1]:
                self.write(move, 0, payload)
                self._announced.arrived(key, move.index, 1)
            else:
                self.num_refused += 1

    def take_arrivals(self) -> Sequence[BlocksArrived]:
        """See `Receiver.take_arrivals`."""
        return self._announced.take_arrivals()

    def fence(self) -> bool:
        """See `Receiver.fence`. A mailbox writes nothing that was forgotten: nothing has to change."""
        if self.peers_write and self._can_fence:
            self.move_to(self._name + "+")
        return self._can_fence or not self.peers_write

    def move_to(self, name: str) -> None:
        """Have another endpoint from now on."""
        self._network.detach(self._name)
        self._name = name
        self._network.attach(self._name, self)

    def arrive(self, key: RequestKey, move: Move, payload: bytes) -> None:
        """A block has come over the network."""
        if self.peers_write:
            self.write(move, 0, payload)
        else:
            self._mailbox.append((key, move, payload))

    def write(self, move: Move, begin_byte: int, payload: bytes) -> None:
        """Bytes for the pool, from `begin_byte` of a block on."""
        self._blocks[move.target, begin_byte : begin_byte + len(payload)] = np.frombuffer(payload, dtype=np.uint8)

    def close(self) -> None:
        """Leave the network."""
        self._network.detach(self._name)


class LoopbackSender:
    """Pushes blocks of `blocks` to a receiver of the same network. Raises `TransferFailed` when it is not there, or
    this has a `failure`.

    Pieces are small, so that small tests have several.
    """

    writers: Sequence[ProcessIdentity] = ()
    needs_fence = False

    def __init__(self, network: LoopbackNetwork, endpoint: Endpoint, blocks: Blocks) -> None:
        self._network = network
        self._name = endpoint.address
        self._blocks = blocks
        self._receiver = network.find(self._name)
        self._is_memory = self._receiver.peers_write
        self.failure = ""
        self._in_parts: dict[tuple[RequestKey, int], bytearray] = {}
        self.is_silent = self._is_memory
        self.pushes_parts = self._is_memory
        self.piece_bytes = _BLOCKS_PER_PIECE * blocks.shape[1]

    def push(self, key: RequestKey, moves: Sequence[Move]) -> bool:
        """See `Sender.push`."""
        self.poll()
        if self._network.is_cut(self._receiver):
            return False
        for move in moves:
            self._network.carry(self, self._receiver, key, move, self._blocks[move.source].tobytes())
        return True

    def push_part(self, key: RequestKey, moves: Sequence[Move], begin_byte: int, end_byte: int) -> None:
        """See `Sender.push_part`. Raises `TransferFailed` when the link is cut: nobody could try again later."""
        self.poll()
        if self._network.is_cut(self._receiver):
            raise TransferFailed("the link is cut")
        for move in moves:
            part = self._blocks[move.source, begin_byte:end_byte].tobytes()
            block = self._in_parts.setdefault((key, move.index), bytearray(self._blocks.shape[1]))
            block[begin_byte:end_byte] = part
            if end_byte < len(block):
                self._receiver.write(move, begin_byte, part)
            else:
                del self._in_parts[(key, move.index)]
                self._network.carry(self, self._receiver, key, move, bytes(block))

    def poll(self) -> None:
        """See `Sender.poll`."""
        if self.failure:
            raise TransferFailed(self.failure)
        if self._network.find(self._name) is not self._receiver:
            raise TransferFailed(f"there is another receiver {self._name!r} now")

    def wait_on(self) -> Sequence[Any]:
        """Nothing that the system could wait for: try often."""
        return ()

    def is_reading(self, key: RequestKey) -> bool:
        """Never: the network took copies. But blocks in flight to memory are still to be written there."""
        return self._is_memory and self._network.is_in_flight(self, key)

    def close(self) -> None:
        """What is on its way to memory is dropped. What is on its way to a mailbox may come late, as with sockets."""
        self._in_parts.clear()
        if self._is_memory:
            self._network.lose(self)


@dataclass(slots=True)
class LoopbackOpener:
    """Opens senders over `blocks` for a sending side in the same process (see `SenderOpener`), unless it
    `is_starting`."""

    network: LoopbackNetwork
    blocks: Blocks
    is_starting: bool = False

    def poll(self) -> None:
        """Senders look after themselves."""

    def wait_on(self) -> Sequence[Any]:
        """Nothing to wait for."""
        return ()

    def open(self, hello: PeerHello) -> tuple[str, LoopbackSender]:
        """A sender to the first loopback endpoint of `hello`. Raises `Refused` when there is none."""
        if self.is_starting:
            raise Starting("the network is starting")
        for endpoint in hello.endpoints:
            if endpoint.transport == NAME:
                return NAME, LoopbackSender(self.network, endpoint, self.blocks)
        raise Refused(f"{hello.node_id} offers no loopback receiver")


def _damaged(payload: bytes, fault: Fault) -> bytes:
    damaged = bytearray(payload[: len(payload) - fault.num_cut_bytes])
    for bit in fault.flipped_bits:
        damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)
