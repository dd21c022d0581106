"""The receiving side of handoffs: what a decode node does to get KV that a prefill node computes.

Owns what is done in which order: commands, messages, what has arrived, checksums, leases. What becomes of a handoff is
`incoming_handoffs`, connections are `receiver_connections`. Does not allocate or free blocks: the engine reserved them,
and is told by a notice when they hold verified KV and when they may be released.

Nothing arrives by assumption: a handoff is delivered only when its Commit names our epoch, the sender's epoch, the
token count, the prompt's digest and the generations we granted, every block has arrived, and the bytes in the pool
match the checksums. Anything else fails this one request. Blocks are verified as they arrive, a few milliseconds at a
time, or by the device that holds them; Commit finds most of the work done. Damage is answered by one Resend of the
damaged blocks; the second time it fails the handoff, and the prompt is computed again elsewhere.

Who decides what. The engine grants and cancels by commands, the sender pushes, commits and cancels by messages, time
ends leases; the states and what each may do in them are the receiver's table in `docs/protocol.md`. Whatever the sender
is:

- slow: what it says about a handoff before its Commit renews the lease by `lease_s`, and after it every block that
  arrives. A Commit may come long before its last block, or after it.
- paused or dead: the lease ends, and the handoff is revoked. Its blocks are quarantined until nothing can be written
  any more (`write_proof`), never on a timer alone: a paused one may go on writing. Revoke is repeated every second;
  after `FENCE_AFTER_S` the own receiver is fenced, where that proves anything.
- restarted: the router names another epoch, and that is another connection. Whoever answers for an earlier life is
  refused, and what was granted to it fails.
- lying: a bad message costs the connection and everything granted over it. A peer is heard about its own handoffs only.
  Bytes that it wrote are verified, and a peer that says "may land" is not believed "done" later.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from kvtransfer.commands import CancelReceiving, GrantBlocks, NoticeSink, ReceivingCommand, ReceivingNotice, WaitForRoom
from kvtransfer.facts import ReceivingFacts
from kvtransfer.incoming import IncomingHandoff
from kvtransfer.incoming_handoffs import IncomingHandoffs, ReceivingCounters
from kvtransfer.messages import (
    SENDER_TO_RECEIVER,
    Commit,
    PeerRefusal,
    PeerWelcome,
    Pushed,
    Renew,
    Revoked,
)
from kvtransfer.pools.base import KvPool
from kvtransfer.receiver_connections import Connection, ReceiverConnections
from kvtransfer.states import ReceivingState
from kvtransfer.thread import MAX_IDLE_S
from kvtransfer.transports.base import Receiver
from wire import links
from wire.errors import BatonError
from wire.request_key import RequestKey

_SLICE_S = 0.002
_LOOK_S = 0.001
_log = logging.getLogger(__name__)


class ReceivingSide:
    """All incoming handoffs of one node. Driven by one thread: commands, and `round` between them."""

    def __init__(
        self,
        facts: ReceivingFacts,
        context: zmq.Context[zmq.Socket[bytes]],
        settings: links.LinkSettings,
        receivers: Sequence[Receiver],
        pool: KvPool,
        notices: NoticeSink[ReceivingNotice],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.connections = ReceiverConnections(facts, context, settings, receivers)
        self._handoffs = IncomingHandoffs(facts, self.connections, notices)
        self._checksums = pool.checksums(facts.checksum)
        self._renew_after_s = facts.lease_s / 3
        self._clock = clock
        self._next_renewal_s = 0.0

    @property
    def handoffs(self) -> Sequence[IncomingHandoff]:
        """Those that have not ended."""
        return tuple(self._handoffs)

    @property
    def counters(self) -> ReceivingCounters:
        """What happened so far; read by metrics."""
        return self._handoffs.counters

    @property
    def num_quarantined_blocks(self) -> int:
        """Blocks that nobody wants but a peer may still write; read by metrics."""
        return self._handoffs.num_quarantined_blocks

    def wait_on(self) -> Sequence[Any]:
        """See `Side`."""
        return self.connections.wait_on()

    def do(self, command: ReceivingCommand, now_s: float) -> None:
        """See `Side`."""
        match command:
            case WaitForRoom():
                self._handoffs.begin(command.key, command.peer, now_s)
            case GrantBlocks():
                self._handoffs.grant(command, now_s)
            case CancelReceiving():
                self._handoffs.cancel(command.key, now_s)

    def round(self, now_s: float) -> float:
        """See `Side`."""
        for connection in self.connections:
            self._read(connection, now_s)
        for receiver in self.connections.receivers:
            receiver.poll()
            for arrived in receiver.take_arrivals():
                handoff = self._handoffs.get(arrived.key)
                if handoff is not None and handoff.receiver is receiver:
                    handoff.take_blocks(range(arrived.first_index, arrived.first_index + arrived.count), now_s)
        self._handoffs.look_at_endpoints(now_s)
        awaited = self._verify(now_s)
        self._handoffs.expire(now_s)
        self._handoffs.ask_after_revoked(now_s)
        self._renew(now_s)
        # what a device computes is only worth spinning for when the client waits for it
        unhashed = [handoff for handoff in awaited if not handoff.arrived.is_hashed]
        if any(handoff.commit is not None or not handoff.arrived.is_waiting for handoff in unhashed):
            return 0.0
        return _LOOK_S if unhashed else MAX_IDLE_S

    def close(self) -> None:
        """Close every connection. Receivers belong to whoever opened them."""
        self.connections.close()

    def _read(self, connection: Connection, now_s: float) -> None:
        while (frame := self.connections.receive(connection)) is not None:
            try:
                self._dispatch(connection, SENDER_TO_RECEIVER.decode(frame), now_s)
            except BatonError as error:
                self.counters.num_rejected_messages += 1
                _log.warning("message from prefill node %s rejected: %s", connection.peer.node_id, error)
                self._handoffs.drop(connection, str(error), now_s)

    def _dispatch(self, connection: Connection, message: object, now_s: float) -> None:
        if isinstance(message, PeerWelcome):
            if self.connections.take_welcome(connection, message):
                self._handoffs.send_grants(connection, now_s)
        elif isinstance(message, PeerRefusal):
            self._handoffs.drop(connection, f"refused by {connection.peer.node_id}: {message.message}", now_s)
        elif isinstance(message, Renew):
            self._on_renew(connection, message, now_s)
        elif isinstance(message, Pushed | Commit | Revoked):
            handoff = self._of(connection, message.handoff.key)
            if handoff is not None:
                self._tell(handoff, message, now_s)

    def _tell(self, handoff: IncomingHandoff, message: Pushed | Commit | Revoked, now_s: float) -> None:
        """The sender says something about one handoff."""
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
            # after its Commit a sender that only renews would keep alive what it lost
            if handoff is not None and handoff.state is ReceivingState.GRANTED:
                handoff.renew(now_s)

    def _of(self, connection: Connection, key: RequestKey) -> IncomingHandoff | None:
        """The handoff, when it is with the peer at the other end of this connection."""
        handoff = self._handoffs.get(key)
        return handoff if handoff is not None and handoff.connection.peer == connection.peer else None

    def _verify(self, now_s: float) -> Sequence[IncomingHandoff]:
        """Hash what has arrived, those first that somebody waits for, and deliver what is complete. Returns those that
        were awaited.
        """
        end_s = time.monotonic() + _SLICE_S
        awaited = [handoff for handoff in self._handoffs if handoff.is_awaited]
        for handoff in sorted(awaited, key=lambda handoff: handoff.commit is None):
            if not handoff.arrived.is_hashed and time.monotonic() < end_s:
                handoff.hash(self._checksums, end_s)
            if handoff.commit is not None and not handoff.arrived.num_missing and handoff.arrived.is_hashed:
                self._conclude(handoff, handoff.commit, now_s)
        return awaited

    def _conclude(self, handoff: IncomingHandoff, commit: Commit, now_s: float) -> None:
        """Everything is here: it is what was sent, or it is asked for once more, or the handoff has failed."""
        damaged = handoff.arrived.damaged(commit.checksums)
        self.counters.num_damaged_blocks += len(damaged)
        if not damaged:
            self._handoffs.deliver(handoff, commit, now_s, self._clock())
        elif handoff.may_ask_again:
            _log.warning("handoff %s: %d blocks arrived damaged and are sent again", handoff.key[0].hex(), len(damaged))
            self.counters.num_resends += 1
            self.connections.send(handoff.connection, handoff.ask_again(damaged, now_s))
        else:
            self._handoffs.fail(
                handoff, f"{len(damaged)} of {len(commit.checksums)} blocks arrived damaged, twice", now_s
            )

    def _renew(self, now_s: float) -> None:
        """Say what is alive, and close what nobody needs."""
        if now_s >= self._next_renewal_s:
            self._next_renewal_s = now_s + self._renew_after_s
            self.connections.renew(self._handoffs.names_by_life(), now_s)
            self.connections.close_idle({handoff.connection for handoff in self._handoffs}, now_s)
