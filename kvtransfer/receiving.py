"""The receiving side of handoffs: what a decode node does to get KV that a prefill node computes.

Owns the order of the work: commands, messages, arrivals, checksums, leases. `incoming_handoffs` decides what happens to
a handoff, and `receiver_connections` owns the connections. Does not allocate or release blocks: the engine reserved
them, and a notice tells it when they hold verified KV and when they may be released.

Nothing is assumed to have arrived: a handoff is delivered only when its Commit names our epoch, the sender's epoch, the
token count, the prompt's digest and the generations we granted, every block has arrived, and the bytes in the pool
match the checksums. Anything else fails this one request. Blocks are verified as they arrive, a few milliseconds at a
time, or by the device that holds them, so most of the work is done when Commit comes. Damaged blocks are requested
again once; if blocks are damaged a second time, the handoff fails and the prompt is computed again elsewhere.

The engine grants and cancels by commands, the sender pushes, commits and cancels by messages, and leases expire. The
receiver's table in `docs/protocol.md` gives the states and what is allowed in each. What happens if the sender is:

- slow: before Commit, every message about a handoff renews its lease by `lease_s`; after Commit, every block that
  arrives does. A Commit may come long before its last block, or after it.
- paused or dead: the lease expires, and the handoff is revoked. Its blocks are quarantined until nothing can be written
  any more (`write_proof`), and never released by a timer alone, because a paused sender may go on writing. Revoke is
  repeated every second; after `FENCE_AFTER_S` this node fences its own receiver, where that proves anything.
- restarted: the router names another epoch, which means another connection. An answer from another epoch than the one
  that was dialled is refused, and the grants to the earlier epoch fail.
- lying: a bad message costs the connection and everything granted over it. A peer can only affect its own handoffs.
  Bytes that it wrote are verified, and after it said "may land" its later "done" is not believed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from baton.kvtransfer.commands import (
    CancelReceiving,
    GrantBlocks,
    NoticeSink,
    ReceivingCommand,
    ReceivingNotice,
    WaitForRoom,
)
from baton.kvtransfer.facts import ReceivingFacts
from baton.kvtransfer.incoming import IncomingHandoff
from baton.kvtransfer.incoming_handoffs import IncomingHandoffs, ReceivingCounters
from baton.kvtransfer.leases import LeaseTable
from baton.kvtransfer.messages import SENDER_TO_RECEIVER, Commit, PeerRefusal, PeerWelcome, Pushed, Renew, Revoked
from baton.kvtransfer.pools.base import HashedPool
from baton.kvtransfer.receiver_connections import Connection, ReceiverConnections
from baton.kvtransfer.states import ReceivingState
from baton.kvtransfer.thread import MAX_IDLE_S
from baton.wire.errors import BatonError
from baton.wire.request_key import RequestKey

_SLICE_S = 0.002
_LOOK_S = 0.001
_MAX_MESSAGES = 256
_log = logging.getLogger(__name__)


class ReceivingSide:
    """All incoming handoffs of one node. Driven by one thread: commands, and `round` between them.

    `leases` says until when the blocks of which handoffs are held.
    """

    def __init__(
        self,
        facts: ReceivingFacts,
        connections: ReceiverConnections,
        pool: HashedPool,
        notices: NoticeSink[ReceivingNotice],
        clock: Callable[[], float] = time.monotonic,
        counters: ReceivingCounters | None = None,
    ) -> None:
        self.connections = connections
        self.leases: LeaseTable[RequestKey] = LeaseTable()
        self._handoffs = IncomingHandoffs(facts, connections, self.leases, notices, counters)
        self._checksums = pool.checksums(facts.checksum)
        self._renew_after_s = facts.lease_s / 3
        self._clock = clock
        self._next_renewal_s = 0.0

    @property
    def handoffs(self) -> Sequence[IncomingHandoff]:
        """Handoffs that have not ended."""
        return tuple(self._handoffs)

    @property
    def counters(self) -> ReceivingCounters:
        """Counts since the start of the node; read by metrics."""
        return self._handoffs.counters

    @property
    def num_quarantined_blocks(self) -> int:
        """Blocks that are held only because a peer may still write them; read by metrics."""
        return self._handoffs.num_quarantined_blocks

    def wait_on(self) -> Sequence[Any]:
        """The sockets of connections and receivers that are readable when `round` has something to do."""
        return self.connections.wait_on()

    def do(self, command: ReceivingCommand, now_s: float) -> None:
        """Begin a handoff, grant it blocks, or cancel it."""
        match command:
            case WaitForRoom():
                self._handoffs.begin(command.key, command.peer, now_s)
            case GrantBlocks():
                self._handoffs.grant(command, now_s)
            case CancelReceiving():
                self._handoffs.cancel(command.key, now_s)

    def round(self, now_s: float) -> float:
        """Read messages, take arrivals, verify blocks, and end what is overdue. Returns in how many seconds it is due
        again."""
        self.connections.dial_broken_again(now_s)
        for connection in self.connections:
            self._read(connection, now_s)
        for receiver in self.connections.receivers:
            receiver.poll()
            for arrived in receiver.take_arrivals():
                handoff = self._handoffs.get(arrived.key)
                if handoff is not None and handoff.receiver is receiver:
                    handoff.take_blocks(range(arrived.first_index, arrived.first_index + arrived.count), now_s)
        self._handoffs.check_endpoints(now_s)
        awaited = self._verify(now_s)
        self._handoffs.expire(now_s)
        self._handoffs.recheck_quarantined(now_s)
        self._renew(now_s)
        # it is only worth spinning for a device's checksums when the client waits for them
        unhashed = [handoff for handoff in awaited if not handoff.arrived.is_hashed]
        if any(handoff.commit is not None or not handoff.arrived.is_waiting for handoff in unhashed):
            return 0.0
        return _LOOK_S if unhashed else MAX_IDLE_S

    def close(self) -> None:
        """Close every connection. Receivers are closed by the code that opened them."""
        self.connections.close()

    def _read(self, connection: Connection, now_s: float) -> None:
        for _ in range(_MAX_MESSAGES):  # a peer that floods leaves time for the rest of the round
            frame = self.connections.receive(connection)
            if frame is None:
                return
            try:
                self._dispatch(connection, SENDER_TO_RECEIVER.decode(frame), now_s)
            except BatonError as error:
                self.counters.num_rejected_messages += 1
                _log.warning("message from prefill node %s rejected: %s", connection.peer.node_id, error)
                self._handoffs.drop(connection, str(error), now_s)

    def _dispatch(self, connection: Connection, message: object, now_s: float) -> None:
        if isinstance(message, PeerWelcome):
            if self.connections.take_welcome(connection, message):
                self._handoffs.fail_granted(connection, now_s)
                self._handoffs.send_grants(connection, now_s)
        elif isinstance(message, PeerRefusal):
            self._handoffs.drop(connection, f"refused by {connection.peer.node_id}: {message.message}", now_s)
        elif isinstance(message, Renew):
            self._on_renew(connection, message, now_s)
        elif isinstance(message, Pushed | Commit | Revoked):
            handoff = self._of(connection, message.handoff.key)
            if handoff is not None:
                self._on_handoff_message(handoff, message, now_s)

    def _on_handoff_message(self, handoff: IncomingHandoff, message: Pushed | Commit | Revoked, now_s: float) -> None:
        """Process a message about one handoff."""
        match message:
            case Pushed():
                handoff.take_pushed(message, now_s)
            case Commit():
                if objection := handoff.take_commit(message, self._clock()):
                    self._handoffs.fail(handoff, objection, now_s)
            case Revoked():
                self._handoffs.take_revoked(handoff, message, now_s)

    def _on_renew(self, connection: Connection, renew: Renew, now_s: float) -> None:
        for name in renew.handoffs:
            handoff = self._of(connection, name.key)
            # only before Commit: later, renewals alone would keep a handoff alive whose blocks were lost
            if handoff is not None and handoff.state is ReceivingState.GRANTED:
                handoff.renew(now_s)

    def _of(self, connection: Connection, key: RequestKey) -> IncomingHandoff | None:
        """The handoff, if it is with the peer of this connection."""
        handoff = self._handoffs.get(key)
        return handoff if handoff is not None and handoff.connection.peer == connection.peer else None

    def _verify(self, now_s: float) -> Sequence[IncomingHandoff]:
        """Hash blocks that have arrived and deliver complete handoffs; those that have their Commit come first. Returns
        the handoffs that were awaited before.
        """
        end_s = time.monotonic() + _SLICE_S
        awaited = [handoff for handoff in self._handoffs if handoff.is_awaited]
        for handoff in sorted(awaited, key=lambda handoff: handoff.commit is None):
            if not handoff.arrived.is_hashed and time.monotonic() < end_s:
                handoff.hash(self._checksums, end_s)
            self._handoffs.tell_verified(handoff)
            if handoff.commit is not None and not handoff.arrived.num_missing and handoff.arrived.is_hashed:
                self._conclude(handoff, handoff.commit, now_s)
        return awaited

    def _conclude(self, handoff: IncomingHandoff, commit: Commit, now_s: float) -> None:
        """Deliver a handoff whose blocks are all hashed, or request its damaged blocks again, or fail it."""
        damaged = handoff.arrived.damaged(commit.checksums)
        self.counters.num_damaged_blocks += len(damaged)
        if not damaged:
            self._handoffs.deliver(handoff, commit, now_s, self._clock())
        elif handoff.may_resend:
            _log.warning(
                "handoff %s: %d blocks arrived damaged and are requested again", handoff.key[0].hex(), len(damaged)
            )
            self.counters.num_resends += 1
            self.connections.send(handoff.connection, handoff.request_resend(damaged, now_s))
        else:
            often = ", and others are in use" if handoff.num_verified_blocks else ", twice"
            self._handoffs.fail(
                handoff, f"{len(damaged)} of {len(commit.checksums)} blocks arrived damaged{often}", now_s
            )

    def _renew(self, now_s: float) -> None:
        """Renew the handoffs that are alive, and close idle connections."""
        if now_s >= self._next_renewal_s:
            self._next_renewal_s = now_s + self._renew_after_s
            self.connections.renew(self._handoffs.names_by_life(), now_s)
            self.connections.close_idle({handoff.connection for handoff in self._handoffs}, now_s)
