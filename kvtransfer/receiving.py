"""The receiving side of handoffs: what a decode node does to get KV that a prefill node computes.

Owns all incoming handoffs (`incoming`) and decides what becomes of them; connections are `receiver_connections`. Does
not allocate or free blocks: the engine reserved them, and is told by a notice when they hold verified KV and when they
may be released.

Nothing arrives by assumption: a handoff is delivered only when its Commit names our epoch, the sender's epoch, the
token count, the prompt's digest and the generations we granted, every block has arrived, and the bytes in the pool
match the checksums. Anything else fails this one request. Blocks are verified as they arrive, a few milliseconds at a
time, or by the device that holds them; Commit finds most of the work done. Damage is answered by one Resend of the
damaged blocks; the second time it fails the handoff, and the prompt is computed again elsewhere.

Who decides what. The engine grants and cancels by commands, the sender pushes, commits and gives up by messages, time
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

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from kvtransfer.commands import (
    CancelReceiving,
    Delivered,
    Failed,
    GrantBlocks,
    NoticeSink,
    ReceivingCommand,
    ReceivingNotice,
    Released,
    WaitForRoom,
)
from kvtransfer.facts import ReceivingFacts
from kvtransfer.incoming import IncomingHandoff
from kvtransfer.leases import LeaseTable
from kvtransfer.messages import (
    SENDER_TO_RECEIVER,
    Commit,
    HandoffKey,
    HandoffName,
    PeerRefusal,
    PeerWelcome,
    Pushed,
    Release,
    Renew,
    Revoke,
    Revoked,
)
from kvtransfer.pool import Pool
from kvtransfer.receiver_connections import Connection, LifeKey, ReceiverConnections
from kvtransfer.states import ReceivingState
from kvtransfer.thread import MAX_IDLE_S
from kvtransfer.transports.base import Receiver
from kvtransfer.write_proof import PeerWord, Verdict
from program.clock import now_us
from wire import links
from wire.errors import BatonError
from wire.messages import PrefillPeer

_SLICE_S = 0.002
_LOOK_S = 0.001
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class ReceivingCounters:
    """What happened so far; read by metrics."""

    num_granted: int = 0
    num_delivered: int = 0
    num_failed: int = 0
    num_revoked: int = 0
    num_expired: int = 0
    num_blocks: int = 0
    num_bytes: int = 0
    num_damaged_blocks: int = 0
    num_resends: int = 0
    num_fences: int = 0
    num_rejected_messages: int = 0


class ReceivingSide:
    """All incoming handoffs of one node. Driven by one thread: commands, and `round` between them.

    `num_quarantined_blocks`: blocks that nobody wants but a peer may still write; read by metrics.
    """

    def __init__(
        self,
        facts: ReceivingFacts,
        context: zmq.Context[zmq.Socket[bytes]],
        settings: links.LinkSettings,
        receivers: Sequence[Receiver],
        pool: Pool,
        notices: NoticeSink[ReceivingNotice],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = ReceivingCounters()
        self.num_quarantined_blocks = 0
        self.connections = ReceiverConnections(facts, context, settings, receivers)
        self._facts = facts
        self._checksums = pool.checksums(facts.checksum)
        self._notices = notices
        self._clock = clock
        self._leases: LeaseTable[HandoffKey] = LeaseTable()
        self._handoffs: dict[HandoffKey, IncomingHandoff] = {}
        self._next_renewal_s = 0.0

    @property
    def handoffs(self) -> Sequence[IncomingHandoff]:
        """Those that have not ended."""
        return tuple(self._handoffs.values())

    def wait_on(self) -> Sequence[Any]:
        """See `Side`."""
        return self.connections.wait_on()

    def do(self, command: ReceivingCommand, now_s: float) -> None:
        """See `Side`."""
        match command:
            case WaitForRoom():
                self._wait_for_room(command, now_s)
            case GrantBlocks():
                self._grant(command, now_s)
            case CancelReceiving():
                handoff = self._handoffs.get(command.key)
                if handoff is not None and handoff.is_wanted:
                    self._revoke(handoff, now_s)

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
        self._look_at_endpoints(now_s)
        awaited = self._verify(now_s)
        for key in self._leases.overdue(now_s):
            self._expire(key, now_s)
        self._tick(now_s)
        # what a device computes is only worth spinning for when the client waits for it
        if any(handoff.is_urgent for handoff in awaited):
            return 0.0
        return MAX_IDLE_S if all(handoff.is_hashed for handoff in awaited) else _LOOK_S

    def close(self) -> None:
        """Close every connection. Receivers belong to whoever opened them."""
        self.connections.close()

    # commands

    def _wait_for_room(self, command: WaitForRoom, now_s: float) -> None:
        self._begin(command.key, command.peer, now_s)

    def _grant(self, command: GrantBlocks, now_s: float) -> None:
        blocks = command.blocks
        handoff = self._begin(blocks.key, command.peer, now_s)
        if handoff is None:
            self._notices.put(Released(blocks.key))
            return
        handoff.reserve(blocks, self.connections.to(command.peer, now_s), now_s)
        self.counters.num_granted += 1
        self._send_grant(handoff, now_s)

    def _begin(self, key: HandoffKey, peer: PrefillPeer, now_s: float) -> IncomingHandoff | None:
        """The handoff, known already or new; None when its peer cannot be dialled: then it has failed."""
        try:
            connection = self.connections.to(peer, now_s)
        except BatonError as error:
            self._handoffs.pop(key, None)
            self.counters.num_failed += 1
            self._notices.put(Failed(key, str(error)))
            return None
        if key not in self._handoffs:
            self._handoffs[key] = IncomingHandoff(key, connection, self._facts, self._leases, now_s)
        return self._handoffs[key]

    def _send_grant(self, handoff: IncomingHandoff, now_s: float) -> None:
        """Let the peer write, as soon as it has welcomed this node."""
        if handoff.connection.welcome is not None:
            self.connections.send(handoff.connection, handoff.grant(now_s))

    # messages

    def _read(self, connection: Connection, now_s: float) -> None:
        while (frame := self.connections.receive(connection)) is not None:
            try:
                self._dispatch(connection, SENDER_TO_RECEIVER.decode(frame), now_s)
            except BatonError as error:
                self.counters.num_rejected_messages += 1
                _log.warning("message from prefill node %s rejected: %s", connection.peer.node_id, error)
                self._drop(connection, str(error), now_s)

    def _dispatch(self, connection: Connection, message: object, now_s: float) -> None:
        if isinstance(message, PeerWelcome):
            self._on_welcome(connection, message, now_s)
        elif isinstance(message, PeerRefusal):
            self._drop(connection, f"refused by {connection.peer.node_id}: {message.message}", now_s)
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
                    self._fail(handoff, objection, now_s)
            case Revoked():
                self._on_revoked(handoff, message, now_s)

    def _on_welcome(self, connection: Connection, welcome: PeerWelcome, now_s: float) -> None:
        if self.connections.take_welcome(connection, welcome):
            for handoff in self._handoffs.values():
                if handoff.connection is connection and handoff.state is ReceivingState.RESERVED:
                    self._send_grant(handoff, now_s)

    def _on_renew(self, connection: Connection, renew: Renew, now_s: float) -> None:
        for name in renew.handoffs:
            handoff = self._of(connection, name.key)
            # after its Commit a sender that only renews would keep alive what it lost
            if handoff is not None and handoff.state is ReceivingState.GRANTED:
                handoff.renew(now_s)

    def _of(self, connection: Connection, key: HandoffKey) -> IncomingHandoff | None:
        """The handoff, when it is with the peer at the other end of this connection."""
        handoff = self._handoffs.get(key)
        return handoff if handoff is not None and handoff.connection.peer == connection.peer else None

    def _on_revoked(self, handoff: IncomingHandoff, revoked: Revoked, now_s: float) -> None:
        if handoff.is_wanted:
            reason = "" if revoked.request_ended else f"ended by the prefill node: {revoked.reason}"
            self.counters.num_failed += bool(reason)
            self._notices.put(Failed(handoff.key, reason))
        if handoff.receiver is None:
            self._end(handoff, now_s)
            return
        if handoff.is_awaited:
            self._quarantine(handoff, now_s)
        word = PeerWord.MAY_LAND if revoked.needs_fence else PeerWord.DONE
        self._act(handoff, handoff.judge(now_s, word=word), now_s)

    # verifying

    def _verify(self, now_s: float) -> Sequence[IncomingHandoff]:
        """Hash what has arrived, those first that somebody waits for, and deliver what is complete. Returns those that
        are still awaited.
        """
        end_s = time.monotonic() + _SLICE_S
        awaited = [handoff for handoff in self._handoffs.values() if handoff.is_awaited]
        for handoff in sorted(awaited, key=lambda handoff: handoff.commit is None):
            if not handoff.is_hashed and time.monotonic() < end_s:
                handoff.hash(self._checksums, end_s)
            damaged = handoff.damaged()
            if damaged is not None and handoff.commit is not None:
                self._conclude(handoff, handoff.commit, damaged, now_s)
        return [handoff for handoff in awaited if handoff.is_awaited]

    def _conclude(self, handoff: IncomingHandoff, commit: Commit, damaged: Sequence[int], now_s: float) -> None:
        """Everything is here: it is what was sent, or it is asked for once more, or the handoff has failed."""
        self.counters.num_damaged_blocks += len(damaged)
        if not damaged:
            self._deliver(handoff, commit, now_s)
        elif handoff.may_ask_again:
            _log.warning("handoff %s: %d blocks arrived damaged and are sent again", handoff.key[0].hex(), len(damaged))
            self.counters.num_resends += 1
            self.connections.send(handoff.connection, handoff.ask_again(damaged, now_s))
        else:
            self._fail(handoff, f"{len(damaged)} of {len(commit.checksums)} blocks arrived damaged, twice", now_s)

    def _deliver(self, handoff: IncomingHandoff, commit: Commit, now_s: float) -> None:
        figures = handoff.deliver(commit, now_s, self._clock())
        del self._handoffs[handoff.key]
        self.counters.num_delivered += 1
        self.counters.num_blocks += figures.num_blocks
        self.counters.num_bytes += figures.num_bytes
        # stamped here: the engine may be in a step and take the notice later
        self._notices.put(Delivered(handoff.key, commit.first, figures, now_us()))
        # last: somebody waits for the blocks, nobody for this
        self.connections.send(handoff.connection, Release(handoff.name))

    # ends

    def _expire(self, key: HandoffKey, now_s: float) -> None:
        """The lease of this handoff's blocks ran out."""
        handoff = self._handoffs.get(key)
        if handoff is None or not handoff.is_wanted:
            return  # another one, overdue as well, took it along with their connection
        self.counters.num_expired += 1
        if handoff.connection.welcome is None:
            # a handshake that got no answer: the next handoff begins with a new one
            self._drop(handoff.connection, f"no answer from prefill node {handoff.connection.peer.node_id}", now_s)
        else:
            self._fail(handoff, "the prefill node stopped renewing the handoff", now_s)

    def _drop(self, connection: Connection, reason: str, now_s: float) -> None:
        """Close a connection that is of no use; everything that relied on it has failed."""
        self.connections.drop(connection)
        for handoff in self.handoffs:
            if handoff.connection is connection and handoff.is_wanted:
                self._fail(handoff, reason, now_s)

    def _fail(self, handoff: IncomingHandoff, reason: str, now_s: float) -> None:
        self.counters.num_failed += 1
        _log.warning("handoff %s failed: %s", handoff.key[0].hex(), reason)
        self._notices.put(Failed(handoff.key, reason))
        self._revoke(handoff, now_s)

    def _revoke(self, handoff: IncomingHandoff, now_s: float) -> None:
        """Take the grant back. Blocks are released when no write can be under way."""
        if handoff.state is not ReceivingState.WAITING:
            self.counters.num_revoked += 1
            self.connections.send(handoff.connection, Revoke(handoff.name))
        if not handoff.is_awaited:
            self._end(handoff, now_s)  # nobody was ever allowed to write
            return
        self._quarantine(handoff, now_s)
        self._act(handoff, handoff.judge(now_s), now_s)

    def _quarantine(self, handoff: IncomingHandoff, now_s: float) -> None:
        handoff.revoke(now_s)
        self.num_quarantined_blocks += handoff.num_blocks

    def _act(self, handoff: IncomingHandoff, verdict: Verdict, now_s: float) -> None:
        """Do what follows for a revoked handoff; what comes later finds it here again."""
        if verdict is Verdict.RELEASE:
            self.num_quarantined_blocks -= handoff.num_blocks
            self._end(handoff, now_s)
        elif verdict is Verdict.FENCE and handoff.receiver is not None and handoff.receiver.fence():
            self.counters.num_fences += 1
            self._look_at_endpoints(now_s)

    def _end(self, handoff: IncomingHandoff, now_s: float) -> None:
        had_blocks = handoff.state is not ReceivingState.WAITING
        handoff.end(now_s)
        del self._handoffs[handoff.key]
        if had_blocks:
            self._notices.put(Released(handoff.key))

    def _look_at_endpoints(self, now_s: float) -> None:
        """A receiver with another endpoint is another receiver: what was granted for the old one fails, and what the
        old one's end proves is acted upon.
        """
        changed = self.connections.take_changes()
        for handoff in self.handoffs:
            if handoff.receiver not in changed:
                continue
            if handoff.is_awaited:
                self._fail(handoff, "the receiver of the blocks was fenced", now_s)
            if handoff.is_quarantined:
                self._act(handoff, handoff.judge(now_s, has_endpoint_ended=True), now_s)
        if changed:
            self.connections.greet_again()

    def _tick(self, now_s: float) -> None:
        """Ask after what was revoked and renew what is alive."""
        for handoff in self.handoffs:
            if handoff.is_quarantined:
                self._ask_after(handoff, now_s)
        if now_s >= self._next_renewal_s:
            self._next_renewal_s = now_s + self._facts.lease_s / 3
            by_life: dict[LifeKey, list[HandoffName]] = {}
            for handoff in self._handoffs.values():
                if handoff.is_wanted:
                    by_life.setdefault(handoff.connection.life, []).append(handoff.name)
            self.connections.renew(by_life, now_s)
            self.connections.close_idle({handoff.connection for handoff in self._handoffs.values()}, now_s)

    def _ask_after(self, handoff: IncomingHandoff, now_s: float) -> None:
        """Whether a revoked handoff can be ended now, or its peer is to be asked once more."""
        is_due = handoff.is_question_due(now_s)
        self._act(handoff, handoff.judge(now_s), now_s)
        if is_due and handoff.is_quarantined:
            # over a new connection if need be: the blocks must not wait for one lost message
            with contextlib.suppress(BatonError):
                self.connections.send(self.connections.to(handoff.connection.peer, now_s), Revoke(handoff.name))
