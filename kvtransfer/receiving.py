"""The receiving side of handoffs: what a decode node does to get KV that a prefill node computes.

Owns the state of every incoming handoff, the connections to senders, and the decision whether the KV can be trusted.
Does not allocate or free blocks: a `BlockOwner` (the engine) leased them, is told when they hold verified KV, and
when they may go back.

Nothing arrives by assumption: a handoff is delivered only when its Commit names our epoch, the sender's epoch, the
token count, the prompt's digest and the generations we granted, every block has arrived, and the bytes in the pool
match the checksums. Anything else spoils this one request.

Blocks that a peer can write by itself stay set aside after a spoiled or cancelled handoff until the peer says that no
write is under way, its writing process is gone, or the receiver was fenced: never on a timer alone.

Blocks are verified as they arrive, a few milliseconds at a time, or by the device that holds them; Commit finds most of
the work done. Damage is answered by one Resend of the damaged blocks; the second time it spoils the handoff, and the
prompt is computed again elsewhere.

Timeouts: granted blocks are leased to their handoff. Whatever the sender says about it before its Commit renews the
lease by `lease_s`, and after it every block that arrives; one that runs out is spoiled. A revoked handoff waits
`FENCE_AFTER_S` for its sender's word before its receiver is fenced, where that is possible.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import zmq

from kvtransfer.arrived import ArrivedBlocks
from kvtransfer.integrity import NONE, XXH3
from kvtransfer.leases import LeaseTable
from kvtransfer.messages import (
    RECEIVER_TO_SENDER,
    SENDER_TO_RECEIVER,
    Commit,
    Grant,
    HandoffName,
    PeerHello,
    PeerRefusal,
    PeerWelcome,
    ProcessIdentity,
    Pushed,
    Release,
    Renew,
    Resend,
    Revoke,
    Revoked,
)
from kvtransfer.pools.base import KvPool
from kvtransfer.process_identity import is_elsewhere, is_gone, shares_processes
from kvtransfer.states import RECEIVING_MOVES, Progress, ReceivingState
from kvtransfer.thread import MAX_IDLE_S
from kvtransfer.transports.base import Arrival, Receiver
from wire import links
from wire.errors import BatonError, InvalidMessage, Refused
from wire.layout import KvLayout
from wire.messages import HandoffFigures, PrefillPeer, TokenEvent
from wire.request_key import RequestKey

FENCE_AFTER_S = 5.0
_REVOKE_RETRY_S = 1.0
_MAX_RESENDS = 1
_SLICE_S = 0.002
_LOOK_S = 0.001
_IDLE_LINK_S = 60.0
_log = logging.getLogger(__name__)


class BlockOwner(Protocol):
    """Who holds the granted blocks: the engine behind a decode node. Called on the transfer thread.

    Every granted handoff ends with exactly one of `delivered` and `returned`; one that waits for room with neither.
    """

    def delivered(self, key: RequestKey, first: TokenEvent, figures: HandoffFigures) -> None:
        """The blocks hold verified KV of the prompt; `first` is the token drawn by the sender."""
        ...

    def spoiled(self, key: RequestKey, reason: str) -> None:
        """This handoff will not come. Its blocks, if it had any, are still set aside. `reason` is "" when nothing
        failed: the first token ended the request.
        """
        ...

    def returned(self, key: RequestKey) -> None:
        """The handoff is over and nobody writes the blocks any more: they may go back to the pool."""
        ...


@dataclass(frozen=True, slots=True)
class ReceivingFacts:
    """What this node is; sent in handshakes."""

    node_id: str
    epoch: int
    fingerprint: str
    layout: KvLayout
    num_blocks: int
    process: ProcessIdentity
    lease_s: float
    checksum: str = XXH3


@dataclass(slots=True)
class ReceivingCounters:
    """What happened so far; read by metrics."""

    num_granted: int = 0
    num_delivered: int = 0
    num_spoiled: int = 0
    num_revoked: int = 0
    num_expired: int = 0
    num_blocks: int = 0
    num_bytes: int = 0
    num_damaged_blocks: int = 0
    num_resends: int = 0
    num_fences: int = 0
    num_rejected_messages: int = 0


@dataclass(frozen=True, slots=True)
class Incoming:
    """What a grant is made of: blocks set aside for the tokens after the first `num_cached_tokens`."""

    key: RequestKey
    num_tokens: int
    num_cached_tokens: int
    prompt_digest: bytes
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]


@dataclass(slots=True)
class _Handoff:
    incoming: Incoming
    name: HandoffName
    link: _Link
    progress: Progress[ReceivingState]
    blocks: ArrivedBlocks
    receiver: Receiver | None = None
    writer: ProcessIdentity | None = None
    commit: Commit | None = None
    round: int = 0
    next_revoke_s: float = 0.0
    needs_fence: bool = False
    is_cut_off: bool = False

    @property
    def is_awaited(self) -> bool:
        """Whether blocks of it are still wanted."""
        return self.progress.state in (ReceivingState.GRANTED, ReceivingState.COMMITTED)


@dataclass(slots=True)
class _Link:
    """One connection to one life of a prefill node."""

    peer: PrefillPeer
    socket: zmq.Socket[bytes]
    used_s: float
    welcome: PeerWelcome | None = None
    receiver: Receiver | None = None


class ReceivingSide:
    """All incoming handoffs of one node. Driven by one thread: the verbs, and `round` between them."""

    def __init__(
        self,
        facts: ReceivingFacts,
        context: zmq.Context[zmq.Socket[bytes]],
        settings: links.LinkSettings,
        receivers: Sequence[Receiver],
        pool: KvPool,
        owner: BlockOwner,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = ReceivingCounters()
        self._facts = facts
        self._context = context
        self._settings = settings
        self._receivers = {receiver.endpoint.transport: receiver for receiver in receivers}
        self._checksums = pool.checksums(facts.checksum)
        self._owner = owner
        self._clock = clock
        self._endpoints = {name: receiver.endpoint for name, receiver in self._receivers.items()}
        self._leases: LeaseTable[RequestKey] = LeaseTable()
        self._links: dict[tuple[str, int], _Link] = {}
        self._handoffs: dict[RequestKey, _Handoff] = {}
        self._interests: dict[RequestKey, PrefillPeer] = {}
        self._next_renewal_s = 0.0

    @property
    def num_live(self) -> int:
        """Handoffs that have not ended."""
        return len(self._handoffs)

    @property
    def num_quarantined_blocks(self) -> int:
        """Blocks that nobody uses but a peer may still write."""
        revoking = (h for h in self._handoffs.values() if h.progress.state is ReceivingState.REVOKING)
        return sum(len(handoff.incoming.block_ids) for handoff in revoking)

    def wait_on(self) -> Sequence[Any]:
        """See `Side`."""
        data = [source for receiver in self._receivers.values() for source in receiver.wait_on()]
        return [*data, *(link.socket for link in self._links.values())]

    def wait_for_room(self, key: RequestKey, peer: PrefillPeer, now_s: float) -> None:
        """There are no blocks for this handoff yet: keep the sender's lease alive until `grant` or `forget`. A peer
        that cannot be dialled spoils it.
        """
        if self._link_or_spoil(key, peer, now_s) is not None:
            self._interests[key] = peer

    def forget(self, key: RequestKey) -> None:
        """No longer interested in a handoff that was never granted."""
        self._interests.pop(key, None)

    def grant(self, incoming: Incoming, peer: PrefillPeer, now_s: float) -> None:
        """Allow `peer` to write the blocks of `incoming`. A peer that cannot be dialled spoils it."""
        self._interests.pop(incoming.key, None)
        link = self._link_or_spoil(incoming.key, peer, now_s)
        if link is None:
            self._owner.returned(incoming.key)
            return
        handoff = _Handoff(
            incoming=incoming,
            name=HandoffName(*incoming.key),
            link=link,
            progress=Progress(ReceivingState.GRANTED, {ReceivingState.GRANTED: now_s}),
            blocks=ArrivedBlocks(len(incoming.block_ids), checksums=self._facts.checksum != NONE),
        )
        self._handoffs[incoming.key] = handoff
        self._leases.begin(incoming.key, now_s + self._facts.lease_s)
        self.counters.num_granted += 1
        if link.welcome is not None:
            self._send_grant(handoff)

    def cancel(self, key: RequestKey, now_s: float) -> None:
        """Nobody wants this handoff any more. Its blocks come back through `BlockOwner.returned`."""
        self.forget(key)
        handoff = self._handoffs.get(key)
        if handoff is not None and handoff.progress.state is not ReceivingState.REVOKING:
            self._revoke(handoff, now_s)

    def round(self, now_s: float) -> float:
        """See `Side`."""
        for link in list(self._links.values()):
            self._read(link, now_s)
        for receiver in self._receivers.values():
            receiver.poll()
            for arrival in receiver.take_arrivals():
                self._on_arrival(receiver, arrival, now_s)
        self._look_at_endpoints(now_s)
        self._verify(now_s)
        for key in self._leases.overdue(now_s):
            self._expire(key, now_s)
        self._tick(now_s)
        awaited = [handoff for handoff in self._handoffs.values() if handoff.is_awaited]
        unhashed = [handoff for handoff in awaited if not handoff.blocks.is_hashed]
        # what a device computes is only worth spinning for when the client waits for it
        if any(handoff.commit is not None or not handoff.blocks.is_waiting for handoff in unhashed):
            return 0.0
        return _LOOK_S if unhashed else MAX_IDLE_S

    def close(self) -> None:
        """Close every connection. Receivers belong to whoever opened them."""
        for link in self._links.values():
            link.socket.close()
        self._links.clear()

    def _expire(self, key: RequestKey, now_s: float) -> None:
        """The lease of this handoff's blocks ran out."""
        handoff = self._handoffs.get(key)
        if handoff is None:
            return  # another one, overdue as well, took it along with their connection
        self.counters.num_expired += 1
        if handoff.link.welcome is None:
            # a handshake that got no answer: the next handoff begins with a new one
            self._drop(handoff.link, f"no answer from prefill node {handoff.link.peer.node_id}", now_s)
        else:
            self._spoil(handoff, "the prefill node stopped renewing the handoff", now_s)

    def _tick(self, now_s: float) -> None:
        """Fence what was revoked and renew what is alive."""
        for handoff in list(self._handoffs.values()):
            if handoff.progress.state is ReceivingState.REVOKING:
                self._fence(handoff, now_s)
        if now_s >= self._next_renewal_s:
            self._next_renewal_s = now_s + self._facts.lease_s / 3
            self._renew(now_s)
            self._close_idle_links(now_s)

    def _link_or_spoil(self, key: RequestKey, peer: PrefillPeer, now_s: float) -> _Link | None:
        try:
            return self._link(peer, now_s)
        except BatonError as error:
            self.counters.num_spoiled += 1
            self._owner.spoiled(key, str(error))
            return None

    def _link(self, peer: PrefillPeer, now_s: float) -> _Link:
        """The connection to this life of the peer, made when it is first needed. Raises `InvalidSetting`, `Refused`."""
        link = self._links.get((peer.node_id, peer.epoch))
        if link is None:
            socket = self._dial(links.parse_address(peer.address, "peer address"))
            link = self._links[(peer.node_id, peer.epoch)] = _Link(peer, socket, now_s)
            self._say_hello(link)
        link.used_s = now_s
        return link

    def _dial(self, address: str) -> zmq.Socket[bytes]:
        try:
            socket = links.open_socket(self._context, zmq.DEALER, self._settings)
        except zmq.ZMQError as error:
            raise Refused(f"no socket for another prefill node: {error}") from None
        try:
            links.connect(socket, address, self._settings)
        except zmq.ZMQError as error:
            socket.close()
            raise Refused(f"a prefill node cannot be reached at {address}: {error}") from None
        return socket

    def _say_hello(self, link: _Link) -> None:
        """Offer what there is, or wait until everything can be offered."""
        link.welcome = link.receiver = None
        if all(receiver.is_ready for receiver in self._receivers.values()):
            hello = PeerHello(
                node_id=self._facts.node_id,
                epoch=self._facts.epoch,
                sender_epoch=link.peer.epoch,
                fingerprint=self._facts.fingerprint,
                layout=self._facts.layout,
                num_blocks=self._facts.num_blocks,
                checksum=self._facts.checksum,
                process=self._facts.process,
                endpoints=tuple(self._endpoints.values()),
            )
            self._send(link, hello)

    def _look_at_endpoints(self, now_s: float) -> None:
        """A receiver with another endpoint is another receiver: nobody writes by the old one any more, or only who has
        mapped the pool.
        """
        changed = [name for name, receiver in self._receivers.items() if receiver.endpoint != self._endpoints[name]]
        for name in changed:
            self._endpoints[name] = self._receivers[name].endpoint
            for handoff in list(self._handoffs.values()):
                if handoff.receiver is self._receivers[name]:
                    if self._may_be_mapped(handoff, handoff.receiver):
                        handoff.is_cut_off = True
                    else:
                        handoff.receiver = None
                    if handoff.progress.state is not ReceivingState.REVOKING:
                        self._spoil(handoff, "the receiver of the blocks was fenced", now_s)
        if changed:
            for link in self._links.values():
                self._say_hello(link)

    def _may_be_mapped(self, handoff: _Handoff, receiver: Receiver) -> bool:
        """Whether the writer may hold a mapping of the pool that outlives the endpoint."""
        writer = handoff.writer
        return not receiver.ends_with_endpoint and not (writer and is_elsewhere(self._facts.process, writer))

    def _read(self, link: _Link, now_s: float) -> None:
        while not link.socket.closed:
            try:
                frame = link.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._dispatch(link, SENDER_TO_RECEIVER.decode(frame), now_s)
            except BatonError as error:
                self.counters.num_rejected_messages += 1
                _log.warning("message from prefill node %s rejected: %s", link.peer.node_id, error)
                self._drop(link, str(error), now_s)

    def _dispatch(self, link: _Link, message: object, now_s: float) -> None:
        if isinstance(message, PeerWelcome):
            self._on_welcome(link, message)
        elif isinstance(message, PeerRefusal):
            self._drop(link, f"refused by {link.peer.node_id}: {message.message}", now_s)
        elif isinstance(message, Pushed):
            self._on_pushed(link, message, now_s)
        elif isinstance(message, Commit):
            self._on_commit(link, message, now_s)
        elif isinstance(message, Revoked):
            self._on_revoked(link, message, now_s)
        elif isinstance(message, Renew):
            for name in message.handoffs:
                handoff = self._of_link(link, name.key)
                if handoff is not None and handoff.progress.state is ReceivingState.GRANTED:
                    self._leases.renew(name.key, now_s + self._facts.lease_s)

    def _on_welcome(self, link: _Link, welcome: PeerWelcome) -> None:
        if (welcome.node_id, welcome.epoch) != (link.peer.node_id, link.peer.epoch):
            raise Refused(f"{link.peer.node_id} has restarted: epoch {welcome.epoch} instead of {link.peer.epoch}")
        if link.welcome is not None:
            return
        link.welcome = welcome
        link.receiver = self._receivers.get(welcome.transport)
        if link.receiver is None:
            raise Refused(f"{link.peer.node_id} chose the transport {welcome.transport!r:.40}, which was not offered")
        for handoff in self._handoffs.values():
            if handoff.link is link and handoff.progress.state is ReceivingState.GRANTED and handoff.receiver is None:
                self._send_grant(handoff)

    def _send_grant(self, handoff: _Handoff) -> None:
        incoming, link = handoff.incoming, handoff.link
        if link.receiver is None or link.welcome is None:
            raise RuntimeError("a grant is sent to a peer that has welcomed us")
        handoff.receiver, handoff.writer = link.receiver, link.welcome.writer
        link.receiver.expect(incoming.key, incoming.block_ids, incoming.generations)
        grant = Grant(
            handoff=handoff.name,
            receiver_epoch=self._facts.epoch,
            sender_epoch=link.peer.epoch,
            num_tokens=incoming.num_tokens,
            num_cached_tokens=incoming.num_cached_tokens,
            prompt_digest=incoming.prompt_digest,
            block_ids=incoming.block_ids,
            generations=incoming.generations,
        )
        self._send(link, grant)

    def _on_pushed(self, link: _Link, pushed: Pushed, now_s: float) -> None:
        handoff = self._of_link(link, pushed.handoff.key)
        if handoff is None or handoff.receiver is None or not handoff.receiver.is_silent:
            return
        if any(index >= len(handoff.incoming.block_ids) for index in pushed.indexes):
            raise InvalidMessage("blocks were pushed that the grant does not have")
        if handoff.progress.state is ReceivingState.GRANTED:
            handoff.blocks.note(pushed.indexes)
            self._leases.renew(handoff.incoming.key, now_s + self._facts.lease_s)

    def _on_arrival(self, receiver: Receiver, arrival: Arrival, now_s: float) -> None:
        handoff = self._handoffs.get(arrival.key)
        if handoff is not None and handoff.receiver is receiver and handoff.is_awaited:
            handoff.blocks.note(range(arrival.first_index, arrival.first_index + arrival.count))
            self._leases.renew(arrival.key, now_s + self._facts.lease_s)

    def _on_commit(self, link: _Link, commit: Commit, now_s: float) -> None:
        handoff = self._of_link(link, commit.handoff.key)
        if handoff is None or handoff.progress.state is not ReceivingState.GRANTED or commit.round != handoff.round:
            return
        objection = self._objection(handoff, commit)
        if objection:
            self._spoil(handoff, objection, now_s)
            return
        handoff.commit = commit
        if handoff.receiver is not None and handoff.receiver.is_silent:
            handoff.blocks.note_rest()
        handoff.progress.move(ReceivingState.COMMITTED, RECEIVING_MOVES, self._clock())

    def _objection(self, handoff: _Handoff, commit: Commit) -> str:
        """Why this Commit does not belong to the grant; "" if it does."""
        incoming = handoff.incoming
        if (commit.receiver_epoch, commit.sender_epoch) != (self._facts.epoch, handoff.link.peer.epoch):
            return "the commit names another epoch"
        if commit.num_tokens != incoming.num_tokens:
            return f"the commit covers {commit.num_tokens} tokens, the grant {incoming.num_tokens}"
        if commit.prompt_digest != incoming.prompt_digest:
            return "the commit is for another prompt"
        if commit.generations != incoming.generations or len(commit.checksums) != len(incoming.block_ids):
            return "the commit names other blocks than the grant"
        if (commit.first.handoff_id, commit.first.attempt) != incoming.key or len(commit.first.token_ids) != 1:
            return "the commit carries no first token of this request"
        return ""

    def _verify(self, now_s: float) -> None:
        """Hash what has arrived, those first that somebody waits for, and deliver what is complete."""
        end_s = time.monotonic() + _SLICE_S
        awaited = [handoff for handoff in self._handoffs.values() if handoff.is_awaited]
        for handoff in sorted(awaited, key=lambda handoff: handoff.commit is None):
            if not handoff.blocks.is_hashed and time.monotonic() < end_s:
                handoff.blocks.hash(self._checksums, handoff.incoming.block_ids, end_s)
            if handoff.commit is not None and not handoff.blocks.num_missing and handoff.blocks.is_hashed:
                self._conclude(handoff, handoff.commit, now_s)

    def _conclude(self, handoff: _Handoff, commit: Commit, now_s: float) -> None:
        """Everything is here: it is what was sent, or it is asked for once more, or the handoff has failed."""
        damaged = handoff.blocks.damaged(commit.checksums)
        self.counters.num_damaged_blocks += len(damaged)
        if not damaged:
            self._deliver(handoff, commit, now_s)
        elif handoff.round < _MAX_RESENDS:
            self._ask_again(handoff, damaged, now_s)
        else:
            self._spoil(handoff, f"{len(damaged)} of {len(commit.checksums)} blocks arrived damaged, twice", now_s)

    def _ask_again(self, handoff: _Handoff, damaged: Sequence[int], now_s: float) -> None:
        incoming, key = handoff.incoming, handoff.incoming.key
        _log.warning("handoff %s: %d blocks arrived damaged and are sent again", key[0].hex(), len(damaged))
        self.counters.num_resends += 1
        handoff.commit = None
        handoff.round += 1
        handoff.blocks.miss(damaged)
        handoff.progress.move(ReceivingState.GRANTED, RECEIVING_MOVES, now_s)
        if handoff.receiver is not None:
            handoff.receiver.expect(key, incoming.block_ids, incoming.generations)
        self._leases.renew(key, now_s + self._facts.lease_s)
        self._send(handoff.link, Resend(handoff.name, handoff.round, tuple(damaged)))

    def _deliver(self, handoff: _Handoff, commit: Commit, now_s: float) -> None:
        num_blocks = len(handoff.incoming.block_ids)
        num_bytes = num_blocks * self._facts.layout.block_bytes
        self.counters.num_delivered += 1
        self.counters.num_blocks += num_blocks
        self.counters.num_bytes += num_bytes
        done_s, stamps = self._clock(), handoff.progress.stamps
        # by two clocks, each for its own part: only the flight of Commit between them is in neither
        exposed_us = commit.exposed_us + round((done_s - stamps[ReceivingState.COMMITTED]) * 1e6)
        transfer_us = round((done_s - stamps[ReceivingState.GRANTED]) * 1e6)
        handoff.progress.move(ReceivingState.DELIVERED, RECEIVING_MOVES, now_s)
        self._end(handoff, now_s)
        figures = HandoffFigures(num_blocks, num_bytes, transfer_us, exposed_us)
        self._owner.delivered(handoff.incoming.key, commit.first, figures)
        self._send(handoff.link, Release(handoff.name))  # last: somebody waits for the blocks, nobody for this

    def _on_revoked(self, link: _Link, revoked: Revoked, now_s: float) -> None:
        key, handoff = revoked.handoff.key, self._of_link(link, revoked.handoff.key)
        reason = "" if revoked.request_ended else f"given up by the prefill node: {revoked.reason}"
        is_wanted = handoff.is_awaited if handoff is not None else self._interests.pop(key, None) is not None
        if is_wanted:
            self.counters.num_spoiled += bool(reason)
            self._owner.spoiled(key, reason)
        if handoff is None:
            return
        if revoked.needs_fence and handoff.receiver is not None and handoff.receiver.peers_write:
            handoff.needs_fence = True
            if handoff.is_awaited:
                self._revoke(handoff, now_s)
        else:
            self._end(handoff, now_s)
            self._owner.returned(key)

    def _spoil(self, handoff: _Handoff, reason: str, now_s: float) -> None:
        self.counters.num_spoiled += 1
        _log.warning("handoff %s spoiled: %s", handoff.incoming.key[0].hex(), reason)
        self._owner.spoiled(handoff.incoming.key, reason)
        self._revoke(handoff, now_s)

    def _revoke(self, handoff: _Handoff, now_s: float) -> None:
        """Take the grant back. Blocks return when no write can be under way."""
        self.counters.num_revoked += 1
        handoff.progress.move(ReceivingState.REVOKING, RECEIVING_MOVES, now_s)
        self._leases.end(handoff.incoming.key)
        if handoff.receiver is not None:
            handoff.receiver.forget(handoff.incoming.key)
        self._send(handoff.link, Revoke(handoff.name))
        handoff.next_revoke_s = now_s + _REVOKE_RETRY_S
        self._fence(handoff, now_s)

    def _fence(self, handoff: _Handoff, now_s: float) -> None:
        """End a revoked handoff when nothing of it can be written any more, and see to it that this comes true."""
        receiver = handoff.receiver
        if receiver is None or not receiver.peers_write or (handoff.is_cut_off and handoff.needs_fence):
            # the grant was never sent, or what it was sent for is fenced, or blocks pass through our own hands, or
            # neither the writer nor this side has anything under way any more
            self._end(handoff, now_s)
            self._owner.returned(handoff.incoming.key)
            return
        age_s = now_s - handoff.progress.stamps[ReceivingState.REVOKING]
        is_due = not handoff.is_cut_off and (handoff.needs_fence or age_s >= FENCE_AFTER_S)
        if is_due and receiver.fence():
            self.counters.num_fences += 1
            self._look_at_endpoints(now_s)  # the next round finds the handoff without a receiver
        elif now_s >= handoff.next_revoke_s:
            handoff.next_revoke_s = now_s + _REVOKE_RETRY_S
            self._revoke_again(handoff, receiver, now_s)

    def _revoke_again(self, handoff: _Handoff, receiver: Receiver, now_s: float) -> None:
        """No answer yet: the writer is gone, or it is asked once more."""
        writer = handoff.writer
        is_local = writer is not None and shares_processes(self._facts.process, writer)
        ends = receiver.ends_with_writer and (receiver.ends_with_endpoint or handoff.is_cut_off)
        if writer is not None and is_local and ends and is_gone(writer):
            self._end(handoff, now_s)
            self._owner.returned(handoff.incoming.key)
            return
        # over a new connection if need be: the blocks must not wait for one lost message
        with contextlib.suppress(BatonError):
            self._send(self._link(handoff.link.peer, now_s), Revoke(handoff.name))

    def _end(self, handoff: _Handoff, now_s: float) -> None:
        handoff.progress.move(ReceivingState.ENDED, RECEIVING_MOVES, now_s)
        self._leases.end(handoff.incoming.key)
        del self._handoffs[handoff.incoming.key]
        if handoff.receiver is not None:
            handoff.receiver.forget(handoff.incoming.key)

    def _of_link(self, link: _Link, key: RequestKey) -> _Handoff | None:
        """The handoff, when it was granted to the peer at the other end of `link`."""
        handoff = self._handoffs.get(key)
        return handoff if handoff is not None and handoff.link.peer == link.peer else None

    def _drop(self, link: _Link, reason: str, now_s: float) -> None:
        """Close a connection that is of no use; everything granted over it is spoiled."""
        link.socket.close()
        self._links.pop((link.peer.node_id, link.peer.epoch), None)
        for key, peer in list(self._interests.items()):
            if (peer.node_id, peer.epoch) == (link.peer.node_id, link.peer.epoch):
                del self._interests[key]
                self._owner.spoiled(key, reason)
        for handoff in list(self._handoffs.values()):
            if handoff.link is link and handoff.progress.state is not ReceivingState.REVOKING:
                self._spoil(handoff, reason, now_s)

    def _renew(self, now_s: float) -> None:
        by_link: dict[tuple[str, int], list[HandoffName]] = {}
        for handoff in self._handoffs.values():
            if handoff.progress.state is not ReceivingState.REVOKING:
                peer = handoff.link.peer
                by_link.setdefault((peer.node_id, peer.epoch), []).append(handoff.name)
        for key, peer in self._interests.items():
            by_link.setdefault((peer.node_id, peer.epoch), []).append(HandoffName(*key))
        for link_key, names in by_link.items():
            link = self._links.get(link_key)
            if link is not None:
                link.used_s = now_s
                self._send(link, Renew(tuple(names)))

    def _close_idle_links(self, now_s: float) -> None:
        in_use = {id(handoff.link) for handoff in self._handoffs.values()}
        for key, link in list(self._links.items()):
            if id(link) not in in_use and now_s - link.used_s > _IDLE_LINK_S:
                link.socket.close()
                del self._links[key]

    def _send(self, link: _Link, message: object) -> None:
        if link.socket.closed:
            return
        try:
            link.socket.send(RECEIVER_TO_SENDER.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            _log.warning("prefill node %s takes no messages, %s dropped", link.peer.node_id, type(message).__name__)
