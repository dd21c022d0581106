"""All handoffs of a decode node: this module grants, delivers, fails, revokes and ends them.

Owns the handoffs by their key, their leases, and every notice to the engine; sends Grant, Release and Revoke. The few
quarantined handoffs are also in a table of their own, because they are checked every round. `ReceivingSide` reads what
comes in.

Invariants: every handoff that was granted blocks ends with exactly one of `Delivered` and `Released`; `Failed` comes at
most once, and before `Released`; blocks are quarantined exactly while a handoff is revoked and not ended.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass

from baton.kvtransfer.commands import Delivered, Failed, GrantBlocks, NoticeSink, ReceivingNotice, Released, Verified
from baton.kvtransfer.facts import ReceivingFacts
from baton.kvtransfer.incoming import IncomingHandoff
from baton.kvtransfer.leases import LeaseTable
from baton.kvtransfer.messages import Commit, HandoffName, Release, Revoke, Revoked
from baton.kvtransfer.receiver_connections import Connection, LifeKey, ReceiverConnections
from baton.kvtransfer.states import ReceivingState
from baton.kvtransfer.write_proof import PeerWord, Verdict
from baton.runtime.clock import now_us
from baton.wire.errors import BatonError
from baton.wire.messages.legs import PrefillPeer
from baton.wire.request_key import RequestKey

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class ReceivingCounters:
    """Counts since the start of the node; read by metrics. `num_part_bytes`: what ranks with pools of their own have
    received, each for itself."""

    num_granted: int = 0
    num_delivered: int = 0
    num_failed: int = 0
    num_revoked: int = 0
    num_expired: int = 0
    num_blocks: int = 0
    num_bytes: int = 0
    num_part_bytes: int = 0
    num_damaged_blocks: int = 0
    num_resends: int = 0
    num_fences: int = 0
    num_rejected_messages: int = 0


class IncomingHandoffs:
    """All handoffs to this node. `num_quarantined_blocks` is read by metrics."""

    def __init__(
        self,
        facts: ReceivingFacts,
        connections: ReceiverConnections,
        leases: LeaseTable[RequestKey],
        notices: NoticeSink[ReceivingNotice],
        counters: ReceivingCounters | None = None,
    ) -> None:
        self.counters = counters or ReceivingCounters()
        self.num_quarantined_blocks = 0
        self._facts = facts
        self._connections = connections
        self._notices = notices
        self._leases = leases
        self._handoffs: dict[RequestKey, IncomingHandoff] = {}
        self._quarantined: dict[RequestKey, IncomingHandoff] = {}

    def __iter__(self) -> Iterator[IncomingHandoff]:
        """Handoffs that have not ended. They may end during the iteration."""
        return iter(tuple(self._handoffs.values()))

    def get(self, key: RequestKey) -> IncomingHandoff | None:
        """The handoff, while it has not ended."""
        return self._handoffs.get(key)

    def names_by_life(self) -> dict[LifeKey, list[HandoffName]]:
        """Names of the handoffs that may still be delivered, by peer and its epoch."""
        by_life: dict[LifeKey, list[HandoffName]] = {}
        for handoff in self._handoffs.values():
            if handoff.is_wanted:
                by_life.setdefault(handoff.connection.life, []).append(handoff.name)
        return by_life

    # begin and grant

    def begin(self, key: RequestKey, peer: PrefillPeer, now_s: float) -> IncomingHandoff | None:
        """The handoff with this key, made if it is new. None when its peer cannot be dialled; the handoff has then
        failed.
        """
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
        """Grant blocks to the peer of a handoff, now or as soon as the peer has welcomed this node."""
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
        """Send the grants that waited until the peer of this connection welcomed this node."""
        for handoff in self._handoffs.values():
            if handoff.connection is connection and handoff.state is ReceivingState.RESERVED:
                self._connections.send(connection, handoff.grant(now_s))

    # ends

    def fail_granted(self, connection: Connection, now_s: float) -> None:
        """Fail what was granted before the peer of this connection welcomed this node again: such grants are void."""
        for handoff in self:
            if handoff.connection is connection and handoff.state is ReceivingState.GRANTED:
                self.fail(handoff, f"the connection to prefill node {connection.peer.node_id} broke", now_s)

    def tell_verified(self, handoff: IncomingHandoff) -> None:
        """Say how much of a prefix is there, if that is more than before."""
        if handoff.verify_more():
            self._notices.put(Verified(handoff.key, handoff.num_verified_blocks))

    def deliver(self, handoff: IncomingHandoff, commit: Commit, now_s: float, clock_s: float) -> None:
        """Deliver a handoff whose blocks are all verified."""
        figures = handoff.deliver(commit, now_s, clock_s)
        del self._handoffs[handoff.key]
        self.counters.num_delivered += 1
        self.counters.num_blocks += figures.num_blocks
        self.counters.num_bytes += figures.num_bytes
        # stamped here: the engine may be in a step, and then it takes the notice later
        self._notices.put(Delivered(handoff.key, commit.firsts, figures, now_us(), commit.num_drafted))
        # last: the client waits for the notice above, while this message is not urgent
        self._connections.send(handoff.connection, Release(handoff.name))

    def cancel(self, key: RequestKey, now_s: float) -> None:
        """Cancel a handoff. Harmless when it is over."""
        handoff = self._handoffs.get(key)
        if handoff is not None and handoff.is_wanted:
            self._revoke(handoff, now_s)

    def fail(self, handoff: IncomingHandoff, reason: str, now_s: float) -> None:
        """Fail a handoff that cannot be completed."""
        self.counters.num_failed += 1
        _log.warning("handoff %s failed: %s", handoff.key[0].hex(), reason)
        self._notices.put(Failed(handoff.key, reason))
        self._revoke(handoff, now_s)

    def take_revoked(self, handoff: IncomingHandoff, revoked: Revoked, now_s: float) -> None:
        """Take the word of the peer that it writes nothing any more; it comes as an answer to Revoke, or unasked."""
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
        """Fail every handoff whose lease has expired."""
        for key in self._leases.overdue(now_s):
            handoff = self._handoffs.get(key)
            if handoff is None or not handoff.is_wanted:
                continue  # it failed together with another one, when their connection was dropped
            self.counters.num_expired += 1
            if handoff.connection.welcome is None:
                # a handshake that got no answer: the next handoff begins with a new one
                self.drop(handoff.connection, f"no answer from prefill node {handoff.connection.peer.node_id}", now_s)
            else:
                self.fail(handoff, "the prefill node stopped renewing the handoff", now_s)

    def drop(self, connection: Connection, reason: str, now_s: float) -> None:
        """Close a connection that is of no use, and fail every handoff that relied on it."""
        self._connections.drop(connection)
        for handoff in self:
            if handoff.connection is connection and handoff.is_wanted:
                self.fail(handoff, reason, now_s)

    def check_endpoints(self, now_s: float) -> None:
        """React to receivers whose endpoint has changed. Grants for the old endpoint fail; its end may also prove that
        quarantined blocks can be released.
        """
        changed = self._connections.take_changes()
        if not changed:
            return
        for handoff in [handoff for handoff in self if handoff.receiver in changed]:
            if handoff.is_awaited:
                self.fail(handoff, "the receiver of the blocks was fenced", now_s)
            if handoff.is_quarantined:
                self._act(handoff, handoff.judge(now_s, has_endpoint_ended=True), now_s)
        self._connections.send_hellos_again()

    def recheck_quarantined(self, now_s: float) -> None:
        """Release quarantined blocks where possible: ask the peer again, check its process, or fence the receiver."""
        for handoff in tuple(self._quarantined.values()):
            if handoff.is_quarantined:
                self._recheck(handoff, now_s)

    def _recheck(self, handoff: IncomingHandoff, now_s: float) -> None:
        """End a revoked handoff if that is possible now; otherwise ask its peer once more."""
        is_due = handoff.is_recheck_due(now_s)
        self._act(handoff, handoff.judge(now_s), now_s)
        if is_due and handoff.is_quarantined:
            # over a new connection if need be: the blocks must not wait for one lost message
            with contextlib.suppress(BatonError):
                self._connections.send(self._connections.to(handoff.connection.peer, now_s), Revoke(handoff.name))

    def _revoke(self, handoff: IncomingHandoff, now_s: float) -> None:
        """Revoke the grant. Blocks are released when no write can be in flight any more."""
        if handoff.state is not ReceivingState.WAITING:
            self.counters.num_revoked += 1
            self._connections.send(handoff.connection, Revoke(handoff.name))
        if not handoff.is_awaited:
            self._end(handoff, now_s)  # no peer was ever allowed to write
            return
        self._quarantine(handoff, now_s)
        self._act(handoff, handoff.judge(now_s), now_s)

    def _quarantine(self, handoff: IncomingHandoff, now_s: float) -> None:
        handoff.revoke(now_s)
        self._quarantined[handoff.key] = handoff
        self.num_quarantined_blocks += handoff.num_blocks

    def _act(self, handoff: IncomingHandoff, verdict: Verdict, now_s: float) -> None:
        """Carry out the verdict about a revoked handoff."""
        if verdict is Verdict.RELEASE:
            self.num_quarantined_blocks -= handoff.num_blocks
            del self._quarantined[handoff.key]
            self._end(handoff, now_s)
        elif verdict is Verdict.FENCE and handoff.receiver is not None and handoff.receiver.fence():
            self.counters.num_fences += 1
            self.check_endpoints(now_s)

    def _end(self, handoff: IncomingHandoff, now_s: float) -> None:
        had_blocks = handoff.state is not ReceivingState.WAITING
        handoff.end(now_s)
        del self._handoffs[handoff.key]
        if had_blocks:
            self._notices.put(Released(handoff.key))
