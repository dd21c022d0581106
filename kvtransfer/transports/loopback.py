"""In memory, for two sides in one process; also the fault injector of the transfer tests.

Owns a `LoopbackNetwork`: its receivers by name, and what becomes of every block on its way (a `FaultPlan`). A receiver
is of one of the two kinds that a real transport can be: `peers_write` (a push lands in the pool, as with shared memory
or RDMA) or not (a push waits in a mailbox until `poll`, which writes only what a grant announced, as with sockets).

Time is counted in blocks: a delayed block arrives after that many later blocks or polls of its network, so that a
schedule of faults is repeatable.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import zmq

from engine.api.errors import Refused, TransferFailed
from kvtransfer.messages import Endpoint, HandoffKey, PeerHello
from kvtransfer.transports.announced import AnnouncedBlocks
from kvtransfer.transports.base import Blocks, Move

NAME = "loopback"


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


FaultPlan: TypeAlias = Callable[[int, HandoffKey, Move], Fault]
"""What happens to block number n (from 0, over all senders of a network) of this handoff."""


def without_faults(number: int, key: HandoffKey, move: Move) -> Fault:
    """The plan of a network that works."""
    return Fault()


@dataclass(frozen=True, slots=True)
class _Parcel:
    receiver: LoopbackReceiver
    key: HandoffKey
    move: Move
    payload: bytes


class LoopbackNetwork:
    """Receivers by name, and the blocks under way to them. Used by pushing and polling threads at once."""

    def __init__(self, plan: FaultPlan = without_faults) -> None:
        self._plan = plan
        self._receivers: dict[str, LoopbackReceiver] = {}
        self._delayed: list[tuple[int, _Parcel]] = []
        self._num_blocks = 0
        self._clock = 0
        self._lock = threading.Lock()

    def attach(self, name: str, receiver: LoopbackReceiver) -> None:
        """Make a receiver reachable under this name."""
        self._receivers[name] = receiver

    def detach(self, name: str) -> None:
        """Make it unreachable; what is under way to it is lost."""
        receiver = self._receivers.pop(name, None)
        with self._lock:
            self._delayed = [(due, parcel) for due, parcel in self._delayed if parcel.receiver is not receiver]

    def find(self, name: str) -> LoopbackReceiver:
        """The receiver of that name. Raises `TransferFailed`."""
        if name not in self._receivers:
            raise TransferFailed(f"there is no receiver {name!r} in this process")
        return self._receivers[name]

    def carry(self, receiver: LoopbackReceiver, key: HandoffKey, move: Move, payload: bytes) -> None:
        """Take one block on its way. Raises `TransferFailed` when the plan says so."""
        with self._lock:
            fault = self._plan(self._num_blocks, key, move)
            self._num_blocks += 1
            if fault.refusal:
                raise TransferFailed(fault.refusal)
            parcel = _Parcel(receiver, key, move, _damaged(payload, fault))
            # in front: what is due at the same moment was sent before and comes after it
            self._delayed[:0] = [(self._clock + fault.delay, parcel)] * fault.num_copies
            self._advance()

    def advance(self) -> None:
        """One unit of time passes."""
        with self._lock:
            self._advance()

    def _advance(self) -> None:
        due = [parcel for due, parcel in self._delayed if due <= self._clock]
        self._delayed = [entry for entry in self._delayed if entry[0] > self._clock]
        self._clock += 1
        for parcel in due:
            parcel.receiver.arrive(parcel.key, parcel.move, parcel.payload)


class LoopbackReceiver:
    """Receives into `blocks` under `name`. `num_refused` counts blocks that no grant announced."""

    socket: zmq.Socket[bytes] | None = None

    def __init__(self, network: LoopbackNetwork, name: str, blocks: Blocks, *, peers_write: bool) -> None:
        self.peers_write = peers_write
        self.num_refused = 0
        self._network = network
        self._name = name
        self._blocks = blocks
        self._announced = AnnouncedBlocks()
        self._mailbox: deque[tuple[HandoffKey, Move, bytes]] = deque()
        network.attach(name, self)

    @property
    def endpoint(self) -> Endpoint:
        """The receiver's name."""
        return Endpoint(NAME, self._name)

    def expect(self, key: HandoffKey, block_ids: Sequence[int], generations: Sequence[int]) -> None:
        """See `Receiver.expect`."""
        self._announced.expect(key, block_ids, generations)

    def forget(self, key: HandoffKey) -> None:
        """See `Receiver.forget`."""
        self._announced.forget(key)

    def num_missing(self, key: HandoffKey) -> int:
        """See `Receiver.num_missing`."""
        return 0 if self.peers_write else self._announced.num_missing(key)

    def poll(self) -> None:
        """See `Receiver.poll`."""
        self._network.advance()
        while self._mailbox:
            key, move, payload = self._mailbox.popleft()
            is_announced = self._announced.may_write(key, move.index, (move.target,), (move.generation,))
            if is_announced and len(payload) == self._blocks.shape[1]:
                self._write(move, payload)
                self._announced.arrived(key, move.index, 1)
            else:
                self.num_refused += 1

    def arrive(self, key: HandoffKey, move: Move, payload: bytes) -> None:
        """A block has come over the network."""
        if self.peers_write:
            self._write(move, payload)
        else:
            self._mailbox.append((key, move, payload))

    def close(self) -> None:
        """Leave the network."""
        self._network.detach(self._name)

    def _write(self, move: Move, payload: bytes) -> None:
        self._blocks[move.target, : len(payload)] = np.frombuffer(payload, dtype=np.uint8)


class LoopbackSender:
    """Pushes blocks of `blocks` to a receiver of the same network. Raises `TransferFailed` when it is not there."""

    def __init__(self, network: LoopbackNetwork, endpoint: Endpoint, blocks: Blocks) -> None:
        self._network = network
        self._receiver = network.find(endpoint.address)
        self._blocks = blocks

    def push(self, key: HandoffKey, moves: Sequence[Move]) -> None:
        """See `Sender.push`."""
        for move in moves:
            self._network.carry(self._receiver, key, move, self._blocks[move.source].tobytes())

    def close(self) -> None:
        """Nothing to give up."""


@dataclass(frozen=True, slots=True)
class LoopbackOpener:
    """Opens senders over `blocks` for a sending side in the same process (see `kvtransfer.sending.SenderOpener`)."""

    network: LoopbackNetwork
    blocks: Blocks

    def open(self, hello: PeerHello) -> tuple[str, LoopbackSender]:
        """A sender to the first loopback endpoint of `hello`. Raises `Refused` when there is none."""
        for endpoint in hello.endpoints:
            if endpoint.transport == NAME:
                return NAME, LoopbackSender(self.network, endpoint, self.blocks)
        raise Refused(f"{hello.node_id} offers no loopback receiver")


def _damaged(payload: bytes, fault: Fault) -> bytes:
    damaged = bytearray(payload[: len(payload) - fault.num_cut_bytes])
    for bit in fault.flipped_bits:
        damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)
