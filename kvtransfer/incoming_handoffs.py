"""All handoffs of a decode node, and what becomes of each: granted, delivered, failed, revoked, released.

Owns the handoffs by their key (the quarantined ones also apart: few, and looked at every round), their leases, and
every notice to the engine; sends Grant, Release and Revoke. What comes in is read by `ReceivingSide`.

Invariants: every handoff that was granted blocks ends with exactly one of `Delivered` and `Released`; `Failed` is said
once, and before `Released`; blocks are quarantined exactly while a handoff is revoked and not ended.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass

from kvtransfer.commands import Delivered, Failed, GrantBlocks, NoticeSink, ReceivingNotice, Released
from kvtransfer.facts import ReceivingFacts
from kvtransfer.incoming import IncomingHandoff
from kvtransfer.leases import LeaseTable
from kvtransfer.messages import Commit, HandoffName, Release, Revoke, Revoked
from kvtransfer.receiver_connections import Connection, LifeKey, ReceiverConnections
from kvtransfer.states import ReceivingState
from kvtransfer.write_proof import PeerWord, Verdict
from program.clock import now_us
from wire.errors import BatonError
from wire.messages import PrefillPeer
from wire.request_key import RequestKey

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


class IncomingHandoffs:
    """See the module. `num_quarantined_blocks`: those that nobody wants but a peer may still write; read by metrics."""

    def __init__(
        self, facts: ReceivingFacts, connections: ReceiverConnections, notices: NoticeSink[ReceivingNotice]
    ) -> None:
        self.counters = ReceivingCounters()
        self.num_quarantined_blocks = 0
        self._facts = facts
        self._connections = connections
        self._notices = notices
        self._leases: LeaseTable[RequestKey] = LeaseTable()
        self._handoffs: dict[RequestKey, IncomingHandoff] = {}
        self._quarantined: dict[RequestKey, IncomingHandoff] = {}

    def __iter__(self) -> Iterator[IncomingHandoff]:
        """Those that have not ended; they may end meanwhile."""
        return iter(tuple(self._handoffs.values()))

    def get(self, key: RequestKey) -> IncomingHandoff | None:
        """The handoff, while it has not ended."""
        return self._handoffs.get(key)

    def names_by_life(self) -> dict[LifeKey, list[HandoffName]]:
        """What is alive here, by the life of the peer."""
        by_life: dict[LifeKey, list[HandoffName]] = {}
        for handoff in self._handoffs.values():
            if handoff.is_wanted:
                by_life.setdefault(handoff.connection.life, []).append(handoff.name)
        return by_life

    # the beginning

    def begin(self, key: RequestKey, peer: PrefillPeer, now_s: float) -> IncomingHandoff | None:
        """The handoff, known already or new; None when its peer cannot be dialled: then it has failed."""
        try:
            connection = self._connections.to(peer, now_s)
        except BatonError as error:
            self._handoffs.pop(key, None)
            self.counters.num_failed += 1
            self._notices.put(Failed(key, str(error)))
            return None
        if key not in self._handoffs:
            self._handoffs[key] = IncomingHandoff(key, connection, self._facts, self._leases, now_s)
        return self._handoffs[key]

    def grant(self, command: GrantBlocks, now_s: float) -> None:
        """There are blocks for a handoff: let its peer write them, as soon as it has welcomed this node."""
        blocks = command.blocks
        handoff = self.begin(blocks.key, command.peer, now_s)
        if handoff is None:
            self._notices.put(Released(blocks.key))
            return
        handoff.reserve(blocks, self._connections.to(command.peer, now_s), now_s)
        self.counters.num_granted += 1
        if handoff.connection.welcome is not None:
            self._connections.send(handoff.connection, handoff.grant(now_s))

    def send_grants(self, connection: Connection, now_s: float) -> None:
        """The peer at the other end has welcomed this node."""
        for handoff in self._handoffs.values():
            if handoff.connection is connection and handoff.state is ReceivingState.RESERVED:
                self._connections.send(connection, handoff.grant(now_s))

    # ends

    def deliver(self, handoff: IncomingHandoff, commit: Commit, now_s: float, clock_s: float) -> None:
        """Its blocks are what was sent."""
        figures = handoff.deliver(commit, now_s, clock_s)
        del self._handoffs[handoff.key]
        self.counters.num_delivered += 1
        self.counters.num_blocks += figures.num_blocks
        self.counters.num_bytes += figures.num_bytes
        # stamped here: the engine may be in a step and take the notice later
        self._notices.put(Delivered(handoff.key, commit.first, figures, now_us()))
        # last: somebody waits for the blocks, nobody for this
        self._connections.send(handoff.connection, Release(handoff.name))

    def cancel(self, key: RequestKey, now_s: float) -> None:
        """Nobody wants it any more. Harmless when it is over."""
        handoff = self._handoffs.get(key)
        if handoff is not None and handoff.is_wanted:
            self._revoke(handoff, now_s)

    def fail(self, handoff: IncomingHandoff, reason: str, now_s: float) -> None:
        """It cannot be completed."""
        self.counters.num_failed += 1
        _log.warning("handoff %s failed: %s", handoff.key[0].hex(), reason)
        self._notices.put(Failed(handoff.key, reason))
        self._revoke(handoff, now_s)

    def take_revoked(self, handoff: IncomingHandoff, revoked: Revoked, now_s: float) -> None:
        """Its peer writes nothing any more, asked or not."""
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

    def expire(self, now_s: float) -> None:
        """End those whose lease ran out."""
        for key in self._leases.overdue(now_s):
            handoff = self._handoffs.get(key)
            if handoff is None or not handoff.is_wanted:
                continue  # another one, overdue as well, took it along with their connection
            self.counters.num_expired += 1
            if handoff.connection.welcome is None:
                # a handshake that got no answer: the next handoff begins with a new one
                self.drop(handoff.connection, f"no answer from prefill node {handoff.connection.peer.node_id}", now_s)
            else:
                self.fail(handoff, "the prefill node stopped renewing the handoff", now_s)

    def drop(self, connection: Connection, reason: str, now_s: float) -> None:
        """Close a connection that is of no use; everything that relied on it has failed."""
        self._connections.drop(connection)
        for handoff in self:
            if handoff.connection is connection and handoff.is_wanted:
                self.fail(handoff, reason, now_s)

    def look_at_endpoints(self, now_s: float) -> None:
        """A receiver with another endpoint is another receiver: what was granted for the old one fails, and what the
        old one's end proves is acted upon.
        """
        changed = self._connections.take_changes()
        if not changed:
            return
        for handoff in [handoff for handoff in self if handoff.receiver in changed]:
            if handoff.is_awaited:
                self.fail(handoff, "the receiver of the blocks was fenced", now_s)
            if handoff.is_quarantined:
                self._act(handoff, handoff.judge(now_s, has_endpoint_ended=True), now_s)
        self._connections.greet_again()

    def ask_after_revoked(self, now_s: float) -> None:
        """See to it that quarantined blocks are released: ask the peer again, look for its process, fence."""
        for handoff in tuple(self._quarantined.values()):
            if handoff.is_quarantined:
                self._ask_after(handoff, now_s)

    def _ask_after(self, handoff: IncomingHandoff, now_s: float) -> None:
        """Whether a revoked handoff can be ended now, or its peer is to be asked once more."""
        is_due = handoff.is_question_due(now_s)
        self._act(handoff, handoff.judge(now_s), now_s)
        if is_due and handoff.is_quarantined:
            # over a new connection if need be: the blocks must not wait for one lost message
            with contextlib.suppress(BatonError):
                self._connections.send(self._connections.to(handoff.connection.peer, now_s), Revoke(handoff.name))

    def _revoke(self, handoff: IncomingHandoff, now_s: float) -> None:
        """Take the grant back. Blocks are released when no write can be under way."""
        if handoff.state is not ReceivingState.WAITING:
            self.counters.num_revoked += 1
            self._connections.send(handoff.connection, Revoke(handoff.name))
        if not handoff.is_awaited:
            self._end(handoff, now_s)  # nobody was ever allowed to write
            return
        self._quarantine(handoff, now_s)
        self._act(handoff, handoff.judge(now_s), now_s)

    def _quarantine(self, handoff: IncomingHandoff, now_s: float) -> None:
        handoff.revoke(now_s)
        self._quarantined[handoff.key] = handoff
        self.num_quarantined_blocks += handoff.num_blocks

    def _act(self, handoff: IncomingHandoff, verdict: Verdict, now_s: float) -> None:
        """Do what follows for a revoked handoff; what comes later finds it here again."""
        if verdict is Verdict.RELEASE:
            self.num_quarantined_blocks -= handoff.num_blocks
            del self._quarantined[handoff.key]
            self._end(handoff, now_s)
        elif verdict is Verdict.FENCE and handoff.receiver is not None and handoff.receiver.fence():
            self.counters.num_fences += 1
            self.look_at_endpoints(now_s)

    def _end(self, handoff: IncomingHandoff, now_s: float) -> None:
        had_blocks = handoff.state is not ReceivingState.WAITING
        handoff.end(now_s)
        del self._handoffs[handoff.key]
        if had_blocks:
            self._notices.put(Released(handoff.key))
