"""Registered pools and one-sided writes through NIXL and UCX: RDMA, TCP, or a copy between two processes of one host.

Owns the receiving and sending ends as the transfer thread sees them. For pools in host memory nothing native runs in
this process: one agent process per node and direction does (`agent`), so that a crash or a stale peer costs an
agent and never the node. For pools on a GPU (`for_device`) the agent is a thread of the node (`thread` says why).

An endpoint's address is the name of the receiver's agent, random in every life, so an old life is never taken for a
new one. While no agent is up its details are empty; the endpoint changes once more when the next one is. It changes
only when the life that it named has ended.

What ends a write. UCX cannot take back a write that has begun, and over TCP (or for what it sends through a queue) the
*receiver's* agent puts the bytes in place, even after the writer is gone. So:
- a write that ended without an error has landed: nothing of it is under way anywhere;
- after any other end (`NixlSender.needs_fence`) this side no longer reads its blocks, but the receiver's may still be
  written: only the end of the receiver's agent (`NixlReceiver.fence`) puts a stop to that. The end of the writing
  process is no proof here.

Pools on a GPU add one way: with CUDA IPC the *writing* process copies, through a mapping of the receiver's pool of its
own. Nothing that the receiver does takes that mapping away. A receiver whose UCX may choose it
(`WriteProof.BOTH_ENDED`: a node on a loopback address) therefore needs two proofs before
blocks of a broken handoff are used again:
- its own agent's life has ended: nothing is carried on by it (TCP) or through its registration (RDMA);
- and the writer has done with the blocks: it says so (`Revoked`, whatever it says about a fence, is sent only after
  its agent has waited for the copies on its GPU), or its process does not exist any more. A peer that cannot see this
  process (another machine, another table of processes) cannot have mapped it: CUDA IPC needs the same one.
A receiver whose UCX is told to keep to the network needs the first only, like one in host memory.

Are bytes on a GPU visible when the notice comes? A notice is sent when UCX has flushed the write: after the copy's
event on the writer's GPU (CUDA IPC), after the receiver's agent has copied them from host memory (TCP), or after the
receiver's network card has acknowledged them (RDMA). Kernels that are launched after that read them: the first two are
complete in the receiver's memory then; with RDMA the device's attribute GPU_DIRECT_RDMA_WRITES_ORDERING has to be
"owner" or better, as it is on data-centre GPUs of this decade. Checksums are computed on the device by such a kernel.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvtransfer.messages import Endpoint, HandoffKey, HandoffName, ProcessIdentity
from kvtransfer.transports.announced import AnnouncedBlocks
from kvtransfer.transports.base import BlocksArrived, Move
from kvtransfer.transports.nixl.lives import RunningAgent
from kvtransfer.transports.nixl.process import AgentProcess
from kvtransfer.transports.nixl.thread import AgentThread
from kvtransfer.transports.nixl.ucx import may_use_cuda_ipc
from kvtransfer.transports.nixl.wire import (
    DETAILS,
    NOTICES,
    Connect,
    Disconnect,
    Landed,
    Notices,
    PeerEnded,
    PoolDetails,
    Ready,
    Watch,
    Write,
    WriteEnded,
)
from kvtransfer.transports.segment import Segment
from kvtransfer.write_proof import WriteProof
from wire.errors import BatonError, TransferFailed

NAME = "nixl"
_PIECE_BYTES = 2**24
_MAX_UNDER_WAY_BYTES = 2**28
_MAX_UNDER_WAY = 64
_MAX_BLOCKS_PER_WRITE = 1024
_CLOSE_S = 2.0


class NixlReceiver:
    """Offers a segment of `num_blocks` blocks that peers write into.

    Blocks until the agent is up (2 to 30 s). Raises `InvalidSetting`. `num_refused` counts notices of blocks that no
    grant announced, `num_crashes` agents that ended by themselves.
    """

    write_proof = WriteProof.ENDPOINT_ENDED
    is_silent = False

    def __init__(self, segment: Segment, num_blocks: int, block_bytes: int, host: str) -> None:
        self._begin(AgentProcess(segment, num_blocks, block_bytes, host))

    @classmethod
    def for_device(cls, pool: Any, host: str) -> NixlReceiver:
        """A receiver into `pool`, a contiguous [num_blocks, block_bytes] uint8 CUDA tensor. Raises `InvalidSetting`."""
        return NixlDeviceReceiver(pool, host)

    def _begin(self, agent: RunningAgent) -> None:
        self.num_refused = 0
        self._announced = AnnouncedBlocks()
        self._expected: set[HandoffKey] = set()
        self._agent = agent
        self._endpoint = _endpoint(agent.ready)

    @property
    def is_ready(self) -> bool:
        """Whether there is an agent."""
        return self._agent.ready is not None

    @property
    def endpoint(self) -> Endpoint:
        """The agent's name and what others need to reach it; without details while there is none."""
        return self._endpoint

    @property
    def num_crashes(self) -> int:
        """Agents that ended by themselves."""
        return self._agent.num_crashes

    @property
    def process(self) -> ProcessIdentity | None:
        """The agent process; none while it starts again."""
        return None if self._agent.ready is None else self._agent.ready.process

    def wait_on(self) -> Sequence[Any]:
        """The agent's socket."""
        return self._agent.wait_on()

    def expect(self, key: HandoffKey, block_ids: Sequence[int], generations: Sequence[int]) -> None:
        """See `Receiver.expect`."""
        if not self._expected:
            self._agent.send(Watch(True))
        self._expected.add(key)
        self._announced.expect(key, block_ids, generations)

    def forget(self, key: HandoffKey) -> None:
        """See `Receiver.forget`."""
        self._announced.forget(key)
        self._expected.discard(key)
        if not self._expected:
            self._agent.send(Watch(False))

    def poll(self) -> None:
        """See `Receiver.poll`. A dead agent is noticed and replaced here."""
        for report in self._agent.poll():
            if isinstance(report, Ready):
                self._agent.send(Watch(bool(self._expected)))
            elif isinstance(report, Notices):
                for notice in report.notices:
                    self._take(notice)
        self._look_at_endpoint()

    def take_arrivals(self) -> Sequence[BlocksArrived]:
        """See `Receiver.take_arrivals`."""
        return self._announced.take_arrivals()

    def fence(self) -> bool:
        """End the agent. True once it has ended: the next one is up, and the endpoint complete, some seconds later.

        The proof, by the way the bytes take. RDMA: its registration is gone with the process, the device refuses the
        key. Copies between processes: the process they name is gone. TCP and queues: it was this process that put the
        bytes in place. The new agent has a new name and knows no old connection.
        """
        if not self._agent.is_starting:  # nobody has been told about one that is
            self._agent.kill()
        self._look_at_endpoint()
        return self._agent.is_starting or not self._agent.is_alive

    def close(self) -> None:
        """End the agent."""
        self._agent.close()
        self._endpoint = _endpoint(None)

    def _look_at_endpoint(self) -> None:
        """Another endpoint says that the life behind the old one has ended: one that is ending keeps its own."""
        is_ending = self._agent.is_alive and self._agent.ready is None and not self._agent.is_starting
        if not is_ending:
            self._endpoint = _endpoint(self._agent.ready)

    def _take(self, notice: bytes) -> None:
        try:
            landed: Landed = NOTICES.decode(notice)
        except BatonError:
            self.num_refused += 1
            return
        key, first_index = landed.handoff.key, landed.first_index
        if self._announced.may_write(key, first_index, landed.block_ids, landed.generations):
            self._announced.arrived(key, first_index, len(landed.block_ids))
        else:
            self.num_refused += 1


class NixlDeviceReceiver(NixlReceiver):
    """See `NixlReceiver.for_device`, and above for what ends a write into a GPU's memory.

    `poll` raises `TransferFailed` when the agent can no longer be ended: the node must not go on.
    """

    def __init__(self, pool: Any, host: str) -> None:
        self._begin(AgentThread(pool, host))
        is_mapped = may_use_cuda_ipc(os.environ)
        self.write_proof = WriteProof.BOTH_ENDED if is_mapped else WriteProof.ENDPOINT_ENDED

    def fence(self) -> bool:
        """End the agent, and its registration with it. True when that stops every peer; where a peer may hold a
        mapping of its own it does not, and this returns False although the agent has ended and the endpoint changes.
        """
        return super().fence() and self.write_proof is WriteProof.ENDPOINT_ENDED


@dataclass(frozen=True, slots=True)
class _Pushed:
    sender: NixlSender
    key: HandoffKey
    num_bytes: int


class NixlSenders:
    """The sending end of one node: one agent process for all its receivers.

    Blocks until the agent is up (2 to 30 s). Raises `InvalidSetting`.
    """

    def __init__(self, segment: Segment, num_blocks: int, block_bytes: int, host: str) -> None:
        self._begin(AgentProcess(segment, num_blocks, block_bytes, host), block_bytes)

    @classmethod
    def for_device(cls, pool: Any, host: str) -> NixlSenders:
        """Senders of `pool`, a contiguous [num_blocks, block_bytes] uint8 CUDA tensor. Raises `InvalidSetting`."""
        return NixlDeviceSenders(pool, host)

    def _begin(self, agent: RunningAgent, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._agent = agent
        self._num_lives_ended = 0
        self._senders: dict[int, NixlSender] = {}
        self._under_way: dict[int, _Pushed] = {}
        self._num_bytes = 0
        self._next_peer_id = 0
        self._next_write_id = 0

    @property
    def num_crashes(self) -> int:
        """Agents that ended by themselves."""
        return self._agent.num_crashes

    @property
    def process(self) -> ProcessIdentity | None:
        """The agent process; none while it starts again."""
        return None if self._agent.ready is None else self._agent.ready.process

    def wait_on(self) -> Sequence[Any]:
        """The agent's socket, shared by all senders."""
        return self._agent.wait_on()

    def open(self, endpoint: Endpoint, num_target_blocks: int) -> NixlSender:
        """A sender to the receiver at `endpoint`.

        Raises `TransferFailed` when that is not the endpoint of such a pool, or while one of the agents starts again.
        """
        self.poll()
        if self._agent.ready is None:
            raise TransferFailed("this node's nixl agent is starting again")
        if not endpoint.details:
            raise TransferFailed("the peer's nixl agent is starting again")
        try:
            details: PoolDetails = DETAILS.decode(endpoint.details)
        except BatonError as error:
            raise TransferFailed(f"the peer's endpoint does not decode: {error}") from None
        if details.num_bytes != num_target_blocks * self.block_bytes:
            raise TransferFailed("the peer's endpoint does not have the size of its pool")
        self._next_peer_id = (self._next_peer_id + 1) % 2**32
        sender = NixlSender(self, self._next_peer_id, num_target_blocks, self._agent.ready.process)
        self._senders[sender.peer_id] = sender
        self._agent.send(Connect(sender.peer_id, endpoint.address, details, num_target_blocks))
        return sender

    def poll(self) -> None:
        """Take what the agent reports; senders learn it from here. Never raises for what a peer did."""
        for report in self._agent.poll():
            if isinstance(report, WriteEnded):
                self._write_ended(report)
            elif isinstance(report, PeerEnded):
                self._peer_ended(report)
        if any(sender.is_overdue for sender in self._senders.values()):
            # a write that does not end can only be ended with its process: every sender begins anew
            self._agent.kill()
        if self._agent.num_lives_ended > self._num_lives_ended:
            self._num_lives_ended = self._agent.num_lives_ended
            self._fail_all("the nixl agent of this node ended")

    def close(self) -> None:
        """End the agent, and with it whatever is under way."""
        self._agent.close()
        self._fail_all("closed")

    def has_room(self) -> bool:
        """Whether another piece may be begun."""
        return (
            len(self._under_way) < _MAX_UNDER_WAY
            and self._num_bytes < _MAX_UNDER_WAY_BYTES
            and self._agent.num_waiting_bytes == 0
        )

    def write(self, sender: NixlSender, key: HandoffKey, moves: Sequence[Move]) -> None:
        """Begin one write. `moves` follow each other in the grant."""
        landed = Landed(
            handoff=HandoffName(*key),
            first_index=moves[0].index,
            block_ids=tuple(move.target for move in moves),
            generations=tuple(move.generation for move in moves),
        )
        self._next_write_id += 1
        pushed = _Pushed(sender, key, len(moves) * self.block_bytes)
        self._under_way[self._next_write_id] = pushed
        self._num_bytes += pushed.num_bytes
        sender.num_reading[key] += 1
        sources = tuple(move.source for move in moves)
        self._agent.send(Write(sender.peer_id, self._next_write_id, sources, landed.block_ids, NOTICES.encode(landed)))

    def disconnect(self, sender: NixlSender) -> None:
        """Have the agent forget this receiver."""
        self._agent.send(Disconnect(sender.peer_id))

    def _write_ended(self, ended: WriteEnded) -> None:
        pushed = self._under_way.pop(ended.write_id, None)
        if pushed is None:
            return
        self._num_bytes -= pushed.num_bytes
        reading = pushed.sender.num_reading
        reading[pushed.key] -= 1
        if not reading[pushed.key]:
            del reading[pushed.key]
        if ended.error:
            pushed.sender.fail(ended.error, needs_fence=ended.has_begun)

    def _peer_ended(self, ended: PeerEnded) -> None:
        sender = self._senders.pop(ended.peer_id, None)
        if sender is not None and ended.error:
            sender.fail(ended.error, needs_fence=False)

    def _fail_all(self, reason: str) -> None:
        under_way, self._under_way, self._num_bytes = self._under_way, {}, 0
        for pushed in under_way.values():
            pushed.sender.fail(reason, needs_fence=True)
        senders, self._senders = self._senders, {}
        for sender in senders.values():
            sender.fail(reason, needs_fence=False)
            sender.num_reading.clear()


class NixlDeviceSenders(NixlSenders):
    """See `NixlSenders.for_device`. `poll` raises `TransferFailed` when the agent can no longer be ended: a write that
    cannot be stopped reads blocks that the node must not use again, so the node must not go on.
    """

    def __init__(self, pool: Any, host: str) -> None:
        self._begin(AgentThread(pool, host), int(pool.shape[1]))


class NixlSender:
    """Pushes into one receiver's pool. See `NixlSenders.open`.

    `needs_fence`: a write of this sender ended otherwise than by landing. `is_reading` then speaks for the own pool
    only; the receiver has to fence before it uses those blocks again.
    """

    is_silent = False
    pushes_parts = False
    piece_bytes = _PIECE_BYTES

    def __init__(self, senders: NixlSenders, peer_id: int, num_target_blocks: int, writer: ProcessIdentity) -> None:
        self.writer: ProcessIdentity | None = writer
        self.peer_id = peer_id
        self.needs_fence = False
        self.num_reading: Counter[HandoffKey] = Counter()
        self._senders = senders
        self._num_target_blocks = num_target_blocks
        self._failure = ""
        self._close_deadline_s: float | None = None

    @property
    def is_overdue(self) -> bool:
        """Whether its writes should have ended by now."""
        deadline_s = self._close_deadline_s
        return deadline_s is not None and bool(self.num_reading) and time.monotonic() > deadline_s

    def push(self, key: HandoffKey, moves: Sequence[Move]) -> bool:
        """See `Sender.push`."""
        self.poll()
        if not self._senders.has_room():
            return False
        for first in range(0, len(moves), _MAX_BLOCKS_PER_WRITE):
            self._senders.write(self, key, moves[first : first + _MAX_BLOCKS_PER_WRITE])
        return True

    def push_part(self, key: HandoffKey, moves: Sequence[Move], begin_byte: int, end_byte: int) -> None:
        """Not here: every write has its fixed cost. Raises `TransferFailed`."""
        raise TransferFailed("nixl moves whole blocks")

    def poll(self) -> None:
        """See `Sender.poll`."""
        self._senders.poll()
        if self._failure:
            raise TransferFailed(self._failure)

    def wait_on(self) -> Sequence[Any]:
        """The agent's socket."""
        return self._senders.wait_on()

    def is_reading(self, key: HandoffKey) -> bool:
        """See `Sender.is_reading`, and `needs_fence`. Moves a `close` along, so asking is enough."""
        self._senders.poll()
        return self.num_reading[key] > 0

    def close(self) -> None:
        """No more pushes. What is under way may land for 2 s; then the agent process is ended, for all its senders."""
        if self._close_deadline_s is None:
            self._close_deadline_s = time.monotonic() + _CLOSE_S
            self._failure = self._failure or "closed"
            self._senders.disconnect(self)

    def fail(self, reason: str, *, needs_fence: bool) -> None:
        """The connection is of no use any more."""
        self._failure = self._failure or reason
        self.needs_fence = self.needs_fence or needs_fence


def _endpoint(ready: Ready | None) -> Endpoint:
    if ready is None:
        return Endpoint(NAME, "starting")
    return Endpoint(NAME, ready.agent_name, DETAILS.encode(ready.details))
