"""The sending side of handoffs: what a prefill node does to move KV to decode nodes.

Owns all outgoing handoffs (`outgoing`), the memory of others (`absent`), and the order push -> Commit -> Release.
`sender_connections` owns the connections, the pusher moves the bytes. Does not compute KV and does not hold blocks: the
engine does both, and a notice tells it when it may release them.

The engine moves a handoff by commands, the receiver by messages, and time by its lease. The sender's table in
`docs/protocol.md` gives the states and what is allowed in each. What happens if the receiver is:

- slow: every message about a handoff renews its lease by `lease_s`, also while the receiver waits for room. A Grant
  that comes before its Prefill waits one lease.
- paused or dead: the lease expires, and the handoff is cancelled. It ends when none of its blocks is queued or in
  flight any more, so blocks are never released while they are read. If blocks stay in flight for `STANDSTILL_S`, the
  transport to that receiver is closed. Renew does not name committed handoffs: the two nodes would otherwise keep each
  other alive when Commit or KV was lost.
- restarted: it has another epoch, and no handoff belongs to that. If the same epoch sends another hello, its earlier
  grants are void, because it holds no blocks for them.
- lying: a bad message costs its connection. Only the receiver that the router named can grant, revoke, renew or release
  a handoff, and only blocks within the pool that it declared can be granted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from baton.kvtransfer.absent import EarlyGrant, EarlyGrants, EndedHandoffs
from baton.kvtransfer.commands import (
    BeginHandoff,
    CancelSending,
    FinishHandoff,
    NoticeSink,
    PushComputed,
    PushLayers,
    Rejected,
    Released,
    SendingCommand,
    SendingNotice,
)
from baton.kvtransfer.facts import SendingFacts
from baton.kvtransfer.leases import LeaseTable
from baton.kvtransfer.messages import RECEIVER_TO_SENDER, Grant, HandoffName, PeerHello, Release, Renew, Resend, Revoke
from baton.kvtransfer.outgoing import OutgoingHandoff
from baton.kvtransfer.pusher import STANDSTILL_S, Pusher, PushReport
from baton.kvtransfer.sender_connections import Peer, SenderConnections, SenderOpener
from baton.kvtransfer.states import SendingState
from baton.wire.errors import BatonError, InvalidMessage
from baton.wire.request_key import RequestKey

_MAX_MESSAGES = 256
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class SendingCounters:
    """Counts since the start of the node; read by metrics. `num_part_bytes`: what ranks with pools of their own have
    sent, each for itself."""

    num_handoffs: int = 0
    num_released: int = 0
    num_cancelled: int = 0
    num_expired: int = 0
    num_resent_blocks: int = 0
    num_blocks: int = 0
    num_bytes: int = 0
    num_part_bytes: int = 0
    num_rejected_messages: int = 0


class SendingSide:
    """All outgoing handoffs of one node. Driven by one thread: commands, and `round` between them.

    `leases` says until when the blocks of which handoffs are held.
    """

    def __init__(
        self,
        facts: SendingFacts,
        link: zmq.Socket[bytes],
        opener: SenderOpener,
        pusher: Pusher,
        notices: NoticeSink[SendingNotice],
        clock: Callable[[], float] = time.monotonic,
        counters: SendingCounters | None = None,
    ) -> None:
        self.counters = counters or SendingCounters()
        self.connections = SenderConnections(facts, link, opener, pusher)
        self._facts = facts
        self._pusher = pusher
        self._notices = notices
        self._clock = clock
        self.leases: LeaseTable[RequestKey] = LeaseTable()
        self._handoffs: dict[RequestKey, OutgoingHandoff] = {}
        self._early = EarlyGrants()
        self._ended = EndedHandoffs()
        self._next_renewal_s = 0.0

    @property
    def handoffs(self) -> Sequence[OutgoingHandoff]:
        """Handoffs that have not ended."""
        return tuple(self._handoffs.values())

    def wait_on(self) -> Sequence[Any]:
        """The sockets of connections and transports that are readable when `round` has something to do."""
        return list(dict.fromkeys([*self.connections.wait_on(), *self._pusher.wait_on()]))

    def do(self, command: SendingCommand, now_s: float) -> None:
        """Begin, advance or end a handoff. Commands about handoffs that are over change nothing."""
        if isinstance(command, BeginHandoff):
            self._begin(command, now_s)
            return
        handoff = self._handoffs.get(command.key)
        if handoff is None:
            return
        match command:
            case PushComputed():
                handoff.chunk_computed(command, now_s)
            case PushLayers():
                handoff.last_step_begins(command, now_s)
            case FinishHandoff():
                handoff.finish(command, now_s)
                self._commit_if_pushed(handoff, now_s)
            case CancelSending():
                self._cancel(handoff, command, now_s)

    def round(self, now_s: float) -> float:
        """Read messages, push blocks, and end what is over. Returns in how many seconds it is due again."""
        self._handle(now_s)
        self.connections.poll()
        for peer in self.connections.greet_waiting(now_s):
            self._void_grants(peer, now_s)
        for key in self.leases.overdue(now_s):
            if not self._handoffs[key].is_ending:
                self.counters.num_expired += 1
                self._cancel(self._handoffs[key], CancelSending(key, "lease expired"), now_s)
        wait_s = self._pusher.work(now_s)
        self._collect(now_s)
        self._end_drained(now_s)
        self.connections.flush_refusals()
        self._tick(now_s)
        return wait_s

    def close(self) -> None:
        """Close the connections to all receivers."""
        self.connections.close()

    def _begin(self, prompt: BeginHandoff, now_s: float) -> None:
        if prompt.key in self._handoffs or prompt.key in self._ended:
            self._notices.put(Rejected(prompt.key, "this attempt of the handoff exists already, or has ended"))
            return
        self.counters.num_handoffs += 1
        self._handoffs[prompt.key] = OutgoingHandoff(prompt, self._facts, self.leases, self._pusher, now_s)
        early = self._early.take(prompt.key)
        if early is not None and early.peer.is_connected:
            self._on_grant(early.peer, early.grant, now_s)

    def _cancel(self, handoff: OutgoingHandoff, why: CancelSending, now_s: float) -> None:
        """Begin to end a handoff whose KV was not delivered. Harmless when it is ending already."""
        if handoff.cancel(why, now_s):
            self.counters.num_cancelled += 1
            _log.debug("handoff %s/%d cancelled: %s", why.key[0].hex(), why.key[1], why.reason)

    def _handle(self, now_s: float) -> None:
        """Process messages that have arrived, so many that a peer that floods does not keep the thread from the rest
        of its round. A bad message only costs the connection that it came by."""
        for _ in range(_MAX_MESSAGES):
            received = self.connections.receive()
            if received is None:
                return
            peer_id, frames = received
            try:
                self._dispatch(peer_id, frames, now_s)
            except BatonError as error:
                self.counters.num_rejected_messages += 1
                _log.warning("message from a decode node rejected: %s", error)
                self.connections.reject(peer_id, str(error))

    def _dispatch(self, peer_id: bytes, frames: Sequence[bytes], now_s: float) -> None:
        if len(frames) != 1:
            raise InvalidMessage("a message is one frame")
        message = RECEIVER_TO_SENDER.decode(frames[0])
        if isinstance(message, PeerHello):
            if (greeted := self.connections.greet(peer_id, message, now_s)) is not None:
                self._void_grants(greeted, now_s)
            return
        if self.connections.is_waiting(peer_id):
            return  # what it says before it is welcomed is about handoffs of which it has granted nothing
        peer = self.connections.peer(peer_id)
        if isinstance(message, Grant):
            self._on_grant(peer, message, now_s)
        elif isinstance(message, Revoke):
            self._on_revoke(peer, message, now_s)
        elif isinstance(message, Renew):
            self._on_renew(peer, message, now_s)
        elif isinstance(message, Resend | Release):
            handoff = self._of_peer(peer, message.handoff.key)
            if handoff is not None and isinstance(message, Resend):
                self.counters.num_resent_blocks += handoff.resend(message, now_s)
            elif handoff is not None:
                self.counters.num_released += handoff.release(now_s)

    def _void_grants(self, peer: Peer, now_s: float) -> None:
        """Cancel all handoffs that this receiver has granted: after another hello it holds no blocks for them."""
        for handoff in self._handoffs.values():
            if handoff.grant is not None and handoff.belongs_to(peer.hello):
                handoff.peer = peer  # the peer that gets the answer
                self._cancel(handoff, CancelSending(handoff.key, "the receiver said hello again"), now_s)
        for early in self._early.take_of(peer.hello.epoch):
            self._ended.remember(early.grant.handoff.key)

    def _on_grant(self, peer: Peer, grant: Grant, now_s: float) -> None:
        key = grant.handoff.key
        handoff = self._handoffs.get(key)
        if handoff is None:
            self._on_early_grant(peer, grant, now_s)
        elif grant == handoff.grant:
            pass  # a duplicate
        elif objection := handoff.objection_to(grant, peer.hello):
            self._send_revoked(peer.peer_id, grant.handoff, objection)
        else:
            handoff.accept(grant, peer, now_s)
            self._commit_if_pushed(handoff, now_s)

    def _on_early_grant(self, peer: Peer, grant: Grant, now_s: float) -> None:
        key = grant.handoff.key
        if key in self._ended:
            self._send_revoked(peer.peer_id, grant.handoff, "the handoff has ended")
        elif not self._early.put(EarlyGrant(peer, grant, now_s + self._facts.lease_s)):
            self._ended.remember(key)
            self._send_revoked(peer.peer_id, grant.handoff, "too many grants without a prompt")

    def _on_revoke(self, peer: Peer, revoke: Revoke, now_s: float) -> None:
        key = revoke.handoff.key
        self._early.take(key)
        handoff = self._of_peer(peer, key)
        if handoff is None:
            self._ended.remember(key)
            self._send_revoked(peer.peer_id, revoke.handoff, "no such handoff")
            return
        self._cancel(handoff, CancelSending(key, "revoked by the decode node"), now_s)
        if handoff.grant is None:
            self._send_revoked(peer.peer_id, revoke.handoff, "its grant has not arrived")

    def _on_renew(self, peer: Peer, renew: Renew, now_s: float) -> None:
        for name in renew.handoffs:
            handoff = self._handoffs.get(name.key)
            if handoff is None:
                if name.key in self._ended:
                    self._send_revoked(peer.peer_id, name, "the handoff has ended")
            elif handoff.belongs_to(peer.hello):
                handoff.renew(now_s)

    def _of_peer(self, peer: Peer, key: RequestKey) -> OutgoingHandoff | None:
        """The handoff, if it is meant for this receiver."""
        handoff = self._handoffs.get(key)
        return handoff if handoff is not None and handoff.belongs_to(peer.hello) else None

    def _collect(self, now_s: float) -> None:
        """Take the reports and failures of the pusher."""
        for report in self._pusher.reports():
            self._on_report(report, now_s)
        for sender, reason in self._pusher.failures():
            for peer in self.connections.peers_by(sender):
                self._close_transport(peer, reason, now_s)

    def _on_report(self, report: PushReport, now_s: float) -> None:
        handoff = self._handoffs.get(report.key)
        if handoff is None:
            return
        self.counters.num_blocks += len(report.checksums)
        self.counters.num_bytes += len(report.checksums) * self._facts.layout.block_bytes
        handoff.take_report(report)
        if not handoff.may_push:
            return
        if report.error:
            self._cancel(handoff, CancelSending(report.key, report.error), now_s)
        elif not self._commit_if_pushed(handoff, now_s):
            pushed = handoff.pushed(report)
            if pushed is not None and handoff.peer is not None and handoff.peer.is_connected:
                self.connections.send(handoff.peer.peer_id, pushed)

    def _commit_if_pushed(self, handoff: OutgoingHandoff, now_s: float) -> bool:
        commit = handoff.commit(now_s, self._clock())
        if commit is not None and handoff.peer is not None:
            self.connections.send(handoff.peer.peer_id, commit)
        return commit is not None

    def _close_transport(self, peer: Peer, reason: str, now_s: float) -> None:
        """Close a failed transport, and cancel every handoff that needs it."""
        self.connections.end_with_refusal(peer, reason)
        for handoff in self._handoffs.values():
            if handoff.peer is peer:
                self._cancel(handoff, CancelSending(handoff.key, reason), now_s)

    def _end_drained(self, now_s: float) -> None:
        """End every handoff that is releasing or cancelling, once none of its blocks is queued or read."""
        for handoff in [handoff for handoff in self._handoffs.values() if handoff.is_ending]:
            if handoff.is_drained:
                self._end(handoff, now_s)
            elif now_s - handoff.since_s > STANDSTILL_S and handoff.peer is not None and handoff.peer.is_connected:
                self._close_transport(handoff.peer, "blocks in flight could not be stopped", now_s)

    def _end(self, handoff: OutgoingHandoff, now_s: float) -> None:
        was_cancelled = handoff.state is SendingState.CANCELLING
        self._ended.remember(handoff.key, handoff.end(now_s))
        del self._handoffs[handoff.key]
        if was_cancelled and handoff.grant is not None and handoff.peer is not None:
            self._send_revoked(handoff.peer.peer_id, handoff.grant.handoff, handoff.reason)
        self._notices.put(Released(handoff.key))

    def _send_revoked(self, peer_id: bytes, name: HandoffName, reason: str) -> None:
        self.connections.send(peer_id, self._ended.revoked(name, reason))

    def _tick(self, now_s: float) -> None:
        """Answer grants whose prompt did not come in time with Revoked, and renew the handoffs that are alive."""
        for early in self._early.take_overdue(now_s):
            # its receiver may then use the blocks again, so neither a late prompt nor a duplicate grant may write them
            self._ended.remember(early.grant.handoff.key)
            self._send_revoked(early.peer.peer_id, early.grant.handoff, "no such handoff")
        if now_s >= self._next_renewal_s:
            self._next_renewal_s = now_s + self._facts.lease_s / 3
            by_peer: dict[bytes, list[HandoffName]] = {}
            for handoff in self._handoffs.values():
                if handoff.may_push and handoff.grant is not None and handoff.peer is not None:
                    by_peer.setdefault(handoff.peer.peer_id, []).append(handoff.grant.handoff)
            self.connections.renew(by_peer)
