"""P's side of the nixl transport: one agent for the node, and a sender for each receiver.

Owns the writes in flight, by number and by handoff, and the bounds of them and of the connections of one agent.

A connection between two agents leaves a socket at both when nixl closes it: UCX keeps the peer's half, and the peer is
not told. It goes when one of the two agents ends, so nodes that come and go leave nothing, and a peer that connects
again and again to the same life leaves one each time. Whoever connects after `_MAX_CONNECTS` has to ask again: the
agent begins no write then, ends when it has none in flight, and the next one begins without any connection.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton.kvtransfer.messages import Endpoint, HandoffName, ProcessIdentity
from baton.kvtransfer.transports.base import Move, Starting
from baton.kvtransfer.transports.nixl.lives import RunningAgent
from baton.kvtransfer.transports.nixl.wire import (
    DETAILS,
    NOTICES,
    Connect,
    Disconnect,
    Landed,
    PeerEnded,
    PoolDetails,
    Write,
    WriteEnded,
)
from baton.wire.errors import BatonError, TransferFailed
from baton.wire.kv_shard import KvShard
from baton.wire.request_key import RequestKey

_PIECE_BYTES = 2**24
_MAX_UNDER_WAY_BYTES = 2**28
_MAX_UNDER_WAY = 64
_MAX_BLOCKS_PER_WRITE = 1024
_CLOSE_S = 2.0
_MAX_CONNECTS = 256


@dataclass(frozen=True, slots=True)
class Part:
    """The part of each block that a sender writes: `block_bytes` of it, into blocks of `target_bytes`.

    `runs`: (offset here, offset there, number of bytes) of each; none: the block as it is. `source`: the rank whose
    bytes they are; None: whole blocks, or all that the receiver's rank stores of them.
    """

    block_bytes: int
    target_bytes: int
    runs: Sequence[tuple[int, int, int]] = ()
    source: KvShard | None = None


@dataclass(frozen=True, slots=True)
class _Pushed:
    sender: NixlSender
    key: RequestKey
    num_bytes: int


class NixlSenders:
    """The sending end of one node: one agent for all its receivers, over blocks of `block_bytes`, closed with it.

    With an agent on a thread, `poll` raises `TransferFailed` when that can no longer be ended. A write that cannot be
    stopped reads blocks that the node must not use again, so the node must not go on.
    """

    def __init__(self, agent: RunningAgent, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._agent = agent
        self._num_lives_ended = 0
        self._senders: dict[int, NixlSender] = {}
        self._in_flight: dict[int, _Pushed] = {}
        self._num_bytes = 0
        self._num_connects = 0
        self._is_worn = False
        self._next_peer_id = 0
        self._next_write_id = 0

    @property
    def num_crashes(self) -> int:
        """The number of agents that ended by themselves."""
        return self._agent.num_crashes

    @property
    def process(self) -> ProcessIdentity | None:
        """The agent process; none while it starts again."""
        return None if self._agent.ready is None else self._agent.ready.process

    def wait_on(self) -> Sequence[Any]:
        """The agent's socket, shared by all senders."""
        return self._agent.wait_on()

    def open(self, endpoint: Endpoint, num_target_blocks: int, part: Part | None = None) -> NixlSender:
        """A sender to the receiver at `endpoint`, of whole blocks or of a part of them.

        Raises `TransferFailed` when that is not the endpoint of such a pool, while the peer's agent starts again, or
        when the own one may not. Raises `Starting` while the own one does.
        """
        self._is_worn = self._num_connects >= _MAX_CONNECTS
        self.poll()
        if self._agent.ready is None or self._is_worn:
            reason = "this node's nixl agent is starting again"
            raise Starting(reason) if self._agent.may_start else TransferFailed(f"{reason}, but it crashes too often")
        if not endpoint.details:
            raise TransferFailed("the peer's nixl agent is starting again")
        try:
            details: PoolDetails = DETAILS.decode(endpoint.details)
        except BatonError as error:
            raise TransferFailed(f"the peer's endpoint does not decode: {error}") from None
        part = part or Part(self.block_bytes, self.block_bytes)
        if details.num_bytes != num_target_blocks * part.target_bytes:
            raise TransferFailed("the peer's endpoint does not have the size of its pool")
        self._num_connects += 1
        self._next_peer_id = (self._next_peer_id + 1) % 2**32
        sender = NixlSender(self, self._next_peer_id, part, self._agent.ready.process)
        self._senders[sender.peer_id] = sender
        runs = (tuple(column) for column in zip(*part.runs, strict=True)) if part.runs else ()
        self._agent.send(Connect(sender.peer_id, endpoint.address, details, num_target_blocks, *runs))
        return sender

    def poll(self) -> None:
        """Take what the agent reports; senders learn it from here. Never raises for what a peer did."""
        for report in self._agent.poll():
            if isinstance(report, WriteEnded):
                self._write_ended(report)
            elif isinstance(report, PeerEnded):
                self._peer_ended(report)
        is_drained = self._is_worn and not self._in_flight
        if is_drained or any(sender.is_overdue for sender in self._senders.values()):
            # a write that does not end can only be ended with its process: every sender begins anew
            self._agent.kill()
        if self._agent.num_lives_ended > self._num_lives_ended:
            self._num_lives_ended = self._agent.num_lives_ended
            self._num_connects, self._is_worn = 0, False
            self._fail_all("the nixl agent of this node ended")

    def close(self) -> None:
        """End the agent, and with it whatever is in flight."""
        self._agent.close()
        self._fail_all("closed")

    def has_room(self) -> bool:
        """Whether another piece may be begun."""
        return (
            len(self._in_flight) < _MAX_UNDER_WAY
            and self._num_bytes < _MAX_UNDER_WAY_BYTES
            and self._agent.num_waiting_bytes == 0
            and not self._is_worn
        )

    def write(self, sender: NixlSender, key: RequestKey, moves: Sequence[Move]) -> None:
        """Begin one write. `moves` follow each other in the grant."""
        landed = Landed(
            handoff=HandoffName(*key),
            first_index=moves[0].index,
            block_ids=tuple(move.target for move in moves),
            generations=tuple(move.generation for move in moves),
            source=sender.part.source,
        )
        self._next_write_id += 1
        pushed = _Pushed(sender, key, len(moves) * sender.part.block_bytes)
        self._in_flight[self._next_write_id] = pushed
        self._num_bytes += pushed.num_bytes
        sender.num_reading[key] += 1
        sources = tuple(move.source for move in moves)
        self._agent.send(Write(sender.peer_id, self._next_write_id, sources, landed.block_ids, NOTICES.encode(landed)))

    def disconnect(self, sender: NixlSender) -> None:
        """Have the agent forget this receiver."""
        self._agent.send(Disconnect(sender.peer_id))

    def _write_ended(self, ended: WriteEnded) -> None:
        pushed = self._in_flight.pop(ended.write_id, None)
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
        in_flight, self._in_flight, self._num_bytes = self._in_flight, {}, 0
        for pushed in in_flight.values():
            pushed.sender.fail(reason, needs_fence=True)
        senders, self._senders = self._senders, {}
        for sender in senders.values():
            sender.fail(reason, needs_fence=False)
            sender.num_reading.clear()


class NixlSender:
    """Pushes into one receiver's pool. See `NixlSenders.open`.

    `needs_fence`: a write of this sender ended otherwise than by landing. `is_reading` then speaks for the own pool
    only; the receiver has to fence before it uses those blocks again.
    """

    is_silent = False
    pushes_parts = False
    piece_bytes = _PIECE_BYTES

    def __init__(self, senders: NixlSenders, peer_id: int, part: Part, writer: ProcessIdentity) -> None:
        self.writers: Sequence[ProcessIdentity] = (writer,)
        self.peer_id, self.part = peer_id, part
        self.needs_fence = False
        self.num_reading: Counter[RequestKey] = Counter()
        self._senders = senders
        self._failure = ""
        self._close_deadline_s: float | None = None

    @property
    def is_overdue(self) -> bool:
        """Whether this sender's writes should have ended by now."""
        deadline_s = self._close_deadline_s
        return deadline_s is not None and bool(self.num_reading) and time.monotonic() > deadline_s

    def push(self, key: RequestKey, moves: Sequence[Move]) -> bool:
        """Give the moves to the agent as writes. False while it has as many in flight as it may."""
        self.poll()
        if not self._senders.has_room():
            return False
        for first in range(0, len(moves), _MAX_BLOCKS_PER_WRITE):
            self._senders.write(self, key, moves[first : first + _MAX_BLOCKS_PER_WRITE])
        return True

    def push_part(self, key: RequestKey, moves: Sequence[Move], begin_byte: int, end_byte: int) -> None:
        """Raise `TransferFailed`: every write has its fixed cost, so parts are not pushed."""
        raise TransferFailed("nixl moves whole blocks")

    def poll(self) -> None:
        """Take the agent's reports on all senders. Raises `TransferFailed` when this one has failed."""
        self._senders.poll()
        if self._failure:
            raise TransferFailed(self._failure)

    def wait_on(self) -> Sequence[Any]:
        """The socket of the agent."""
        return self._senders.wait_on()

    def is_reading(self, key: RequestKey) -> bool:
        """Whether the agent may still read blocks of this handoff. Also advances a `close`, so asking is enough."""
        self._senders.poll()
        return self.num_reading[key] > 0

    def close(self) -> None:
        """End pushes. Writes in flight may land for 2 s; then the agent process is ended, for all its senders."""
        if self._close_deadline_s is None:
            self._close_deadline_s = time.monotonic() + _CLOSE_S
            self._failure = self._failure or "closed"
            self._senders.disconnect(self)

    def fail(self, reason: str, *, needs_fence: bool) -> None:
        """Note that the connection is of no use any more."""
        self._failure = self._failure or reason
        self.needs_fence = self.needs_fence or needs_fence
