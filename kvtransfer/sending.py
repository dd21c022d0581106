"""The sending side of handoffs: what a prefill node does with KV that somebody else wants.

Owns the state of every outgoing handoff, the connections of receivers, and the order push -> Commit -> Release. Does
not compute KV and does not hold blocks: a `BlockHolder` (the engine) does, and is told when it may give them back.

Timeouts: a computed prompt's blocks are leased to its handoff. Whatever the receiver says about the handoff renews the
lease by `lease_s`; one that runs out is withdrawn. A Grant that comes before its Prefill waits `lease_s`. A handoff
ends when nothing of it is queued or under way any more, so blocks are never given back while they are read; blocks that
stay under way for `STANDSTILL_S` cost the receiver its transport. A committed handoff is not renewed towards its
receiver: the two would otherwise keep each other alive when Commit or KV was lost.

A receiver that has gone is noticed by a message that cannot be delivered, at the latest by the next renewal: its
transport is closed then, because a mapping of a dead node's pool would keep that memory in use.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import zmq

from kvtransfer.integrity import NONE, XXH3
from kvtransfer.layers import LayerProgress
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
from kvtransfer.pusher import STANDSTILL_S, Pusher, PushJob, PushReport
from kvtransfer.states import SENDING_MOVES, Progress, SendingState
from kvtransfer.transports.base import Move, Sender
from wire import links
from wire.codec import Codec
from wire.errors import BatonError, InvalidMessage, Refused
from wire.layout import KvLayout
from wire.messages import TokenEvent
from wire.request_key import RequestKey

_MAX_ENDED = 4096
_MAX_EARLY = 4096
_MIN_JOB_BYTES = 4 * 2**20
_log = logging.getLogger(__name__)


class BlockHolder(Protocol):
    """Who holds the blocks: the engine behind a prefill node. Called on the transfer thread."""

    def let_go(self, key: RequestKey) -> None:
        """Stop computing this prompt, if it still is, and give its blocks back: nothing reads them any more."""
        ...

    def refused(self, key: RequestKey, reason: str) -> None:
        """This handoff cannot be; nothing of it was begun."""
        ...


class SenderOpener(Protocol):
    """Opens transports towards receivers."""

    def open(self, hello: PeerHello) -> tuple[str, Sender]:
        """(transport name, sender). Raises `Refused`."""
        ...

    def poll(self) -> None:
        """Called every round, for what all senders share."""
        ...

    def wait_on(self) -> Sequence[Any]:
        """What is readable when `poll` has something to do."""
        ...


@dataclass(frozen=True, slots=True)
class SendingFacts:
    """What this node is; compared in handshakes."""

    node_id: str
    epoch: int
    fingerprint: str
    layout: KvLayout
    process: ProcessIdentity
    lease_s: float
    checksum: str = XXH3


@dataclass(slots=True)
class SendingCounters:
    """What happened so far; read by metrics."""

    num_handoffs: int = 0
    num_released: int = 0
    num_withdrawn: int = 0
    num_expired: int = 0
    num_resent_blocks: int = 0
    num_blocks: int = 0
    num_bytes: int = 0
    num_rejected_messages: int = 0


@dataclass(slots=True)
class _Peer:
    """A connected receiver that passed the handshake."""

    hello: PeerHello
    sender: Sender


@dataclass(slots=True)
class _Outgoing:
    key: RequestKey
    decode_node_id: str
    decode_epoch: int
    num_tokens: int
    prompt_digest: bytes
    progress: Progress[SendingState]
    peer_id: bytes = b""
    grant: Grant | None = None
    table: Sequence[int] = ()
    num_ready_blocks: int = 0
    layers: LayerProgress | None = None
    num_submitted: int = 0
    num_jobs: int = 0
    checksums: dict[int, int] = field(default_factory=dict)
    first: TokenEvent | None = None
    computed_s: float = 0.0
    round: int = 0
    reason: str = ""
    request_ended: bool = False

    def belongs_to(self, hello: PeerHello) -> bool:
        """Whether that receiver is the one the router named."""
        return (hello.node_id, hello.epoch) == (self.decode_node_id, self.decode_epoch)

    @property
    def may_push(self) -> bool:
        """Whether blocks of it may still begin to move."""
        return self.progress.state in (SendingState.COMPUTING, SendingState.PUSHING)


@dataclass(frozen=True, slots=True)
class _End:
    """How a handoff ended: what late messages about it are answered with."""

    request_ended: bool = False
    needs_fence: bool = False


class SendingSide:
    """All outgoing handoffs of one node. Driven by one thread: the verbs, and `round` between them."""

    def __init__(
        self,
        facts: SendingFacts,
        link: zmq.Socket[bytes],
        opener: SenderOpener,
        pusher: Pusher,
        holder: BlockHolder,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = SendingCounters()
        self._facts = facts
        self._link = link
        self._opener = opener
        self._pusher = pusher
        self._holder = holder
        self._clock = clock
        self._leases: LeaseTable[RequestKey] = LeaseTable()
        self._peers: dict[bytes, _Peer] = {}
        self._outgoing: dict[RequestKey, _Outgoing] = {}
        self._draining: dict[RequestKey, float] = {}
        self._early: dict[RequestKey, tuple[float, bytes, Grant]] = {}
        self._ended: OrderedDict[RequestKey, _End] = OrderedDict()
        self._refusals: list[tuple[bytes, PeerRefusal]] = []
        self._next_renewal_s = 0.0

    @property
    def num_live(self) -> int:
        """Handoffs that have not ended."""
        return len(self._outgoing)

    def wait_on(self) -> Sequence[Any]:
        """See `Side`."""
        return list(dict.fromkeys([self._link, *self._opener.wait_on(), *self._pusher.wait_on()]))

    def begin(
        self,
        key: RequestKey,
        now_s: float,
        *,
        decode_node_id: str,
        decode_epoch: int,
        num_tokens: int,
        prompt_digest: bytes,
    ) -> None:
        """A prompt is about to be computed for that decode node. A key that is known already is refused."""
        if key in self._outgoing or key in self._ended:
            self._holder.refused(key, "this attempt of the handoff exists already, or has ended")
            return
        self.counters.num_handoffs += 1
        self._outgoing[key] = _Outgoing(
            key=key,
            decode_node_id=decode_node_id,
            decode_epoch=decode_epoch,
            num_tokens=num_tokens,
            prompt_digest=prompt_digest,
            progress=Progress(SendingState.COMPUTING, {SendingState.COMPUTING: now_s}),
        )
        early = self._early.pop(key, None)
        if early is not None and early[1] in self._peers:
            self._on_grant(early[1], early[2], now_s)

    def advance(self, key: RequestKey, table: Sequence[int], num_computed_tokens: int, now_s: float) -> None:
        """The KV of so many tokens is in the blocks of `table`: push what became complete."""
        handoff = self._outgoing.get(key)
        if handoff is not None and handoff.progress.state is SendingState.COMPUTING:
            handoff.table = table
            handoff.num_ready_blocks = num_computed_tokens // self._facts.layout.block_size
            self._push_ready(handoff, now_s)

    def follow(self, key: RequestKey, table: Sequence[int], layers: LayerProgress, now_s: float) -> None:
        """The step that is about to run computes the rest of the prompt: push its blocks layer by layer, where the
        receiver's transport makes that cheap, as soon as it has granted them.
        """
        handoff = self._outgoing.get(key)
        if handoff is not None and handoff.progress.state is SendingState.COMPUTING:
            handoff.table, handoff.layers = table, layers
            self._push_layers(handoff, now_s)

    def finish(self, key: RequestKey, table: Sequence[int], first: TokenEvent, computed_s: float, now_s: float) -> None:
        """The prompt was computed at `computed_s` and token 1 is on its way to the client: push the rest and commit."""
        handoff = self._outgoing.get(key)
        if handoff is None or handoff.progress.state is not SendingState.COMPUTING:
            return
        handoff.progress.move(SendingState.PUSHING, SENDING_MOVES, now_s)
        handoff.table, handoff.first, handoff.computed_s = table, first, computed_s
        handoff.layers = None  # the step is over: what was not followed goes as whole blocks
        handoff.num_ready_blocks = -(-handoff.num_tokens // self._facts.layout.block_size)
        self._leases.begin(key, now_s + self._facts.lease_s)
        self._push_ready(handoff, now_s)
        self._commit_if_pushed(handoff, now_s)

    def withdraw(self, key: RequestKey, reason: str, now_s: float, *, request_ended: bool = False) -> None:
        """Give a handoff up: no further writes; its blocks go back once none is under way. Harmless when it is over."""
        handoff = self._outgoing.get(key)
        if handoff is None or key in self._draining:
            return
        self.counters.num_withdrawn += 1
        handoff.reason, handoff.request_ended = reason[:1000], request_ended
        _log.debug("handoff %s/%d withdrawn: %s", key[0].hex(), key[1], reason)
        handoff.progress.move(SendingState.WITHDRAWING, SENDING_MOVES, now_s)
        self._pusher.cancel(key)
        self._draining[key] = now_s

    def round(self, now_s: float) -> float:
        """See `Side`."""
        self._handle(now_s)
        self._opener.poll()
        for owner in self._leases.overdue(now_s):
            self._expire(owner, now_s)
        wait_s = self._pusher.work(now_s)
        self._collect(now_s)
        self._drain(now_s)
        self._refuse()
        self._tick(now_s)
        return wait_s

    def close(self) -> None:
        """Close every connection."""
        for peer_id in list(self._peers):
            self._drop_peer(peer_id, "this node stops")
        self._link.close()

    def _expire(self, key: RequestKey, now_s: float) -> None:
        """The lease of this handoff's blocks ran out."""
        if key not in self._draining:
            self.counters.num_expired += 1
            self.withdraw(key, "lease expired", now_s)

    def _handle(self, now_s: float) -> None:
        """Process every message that has arrived. A bad one costs its sender's connection, nothing else."""
        while True:
            try:
                peer_id, *frames = self._link.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._dispatch(peer_id, frames, now_s)
            except BatonError as error:
                self.counters.num_rejected_messages += 1
                _log.warning("message from a decode node rejected: %s", error)
                self._drop_peer(peer_id, "the receiver sent a bad message")
                self._send(peer_id, PeerRefusal(str(error)[:1000]))

    def _collect(self, now_s: float) -> None:
        """Take what the pusher has to tell."""
        for report in self._pusher.reports():
            self._on_report(report, now_s)
        for sender, reason in self._pusher.failures():
            for peer_id in [peer_id for peer_id, peer in self._peers.items() if peer.sender is sender]:
                self._give_up_peer(peer_id, reason, now_s)

    def _drain(self, now_s: float) -> None:
        """End what is over, as soon as nothing of it is under way."""
        for key, since_s in list(self._draining.items()):
            handoff = self._outgoing[key]
            if handoff.num_jobs or self._pusher.is_reading(key):
                if now_s - since_s > STANDSTILL_S and handoff.peer_id in self._peers:
                    self._give_up_peer(handoff.peer_id, "blocks under way could not be called back", now_s)
            else:
                self._end(handoff, now_s)

    def _refuse(self) -> None:
        """Send receivers away whose transport has failed: after the last word about their handoffs, since they close
        the connection on it."""
        refusals, self._refusals = self._refusals, []
        for peer_id, refusal in refusals:
            self._send(peer_id, refusal)

    def _tick(self, now_s: float) -> None:
        """Answer grants that nothing came for and renew what is alive."""
        for key, (deadline_s, peer_id, grant) in list(self._early.items()):
            if deadline_s <= now_s:
                del self._early[key]
                # its receiver may use the blocks again: neither a late prompt nor this grant once more may write them
                self._remember_end(key, _End())
                self._send_revoked(peer_id, grant.handoff, "no such handoff")
        if now_s >= self._next_renewal_s:
            self._next_renewal_s = now_s + self._facts.lease_s / 3
            self._renew()

    def _dispatch(self, peer_id: bytes, frames: Sequence[bytes], now_s: float) -> None:
        if len(frames) != 1:
            raise InvalidMessage("a message is one frame")
        message = RECEIVER_TO_SENDER.decode(frames[0])
        if isinstance(message, PeerHello):
            self._on_hello(peer_id, message, now_s)
        elif peer_id not in self._peers:
            raise Refused("say PeerHello first")
        elif isinstance(message, Grant):
            self._on_grant(peer_id, message, now_s)
        elif isinstance(message, Resend):
            self._on_resend(peer_id, message, now_s)
        elif isinstance(message, Release):
            self._on_release(peer_id, message, now_s)
        elif isinstance(message, Revoke):
            self._on_revoke(peer_id, message, now_s)
        elif isinstance(message, Renew):
            self._on_renew(peer_id, message, now_s)

    def _on_hello(self, peer_id: bytes, hello: PeerHello, now_s: float) -> None:
        if hello.sender_epoch != self._facts.epoch:
            raise Refused(
                f"{self._facts.node_id} has restarted: epoch {self._facts.epoch} instead of {hello.sender_epoch}"
            )
        if hello.fingerprint != self._facts.fingerprint:
            raise Refused(f"model differs: {self._facts.fingerprint} here, {hello.fingerprint} at {hello.node_id}")
        self._facts.layout.require_same(hello.layout, hello.node_id)
        if hello.checksum != self._facts.checksum:
            raise Refused(
                f"KV checksum is {self._facts.checksum} here and {hello.checksum} at {hello.node_id}:"
                " start both with the same --kv-checksum"
            )
        self._drop_peer(peer_id, "the receiver said hello again")
        transport, sender = self._opener.open(hello)
        self._peers[peer_id] = _Peer(hello, sender)
        self._void_grants(peer_id, hello, now_s)
        _log.info("decode node %s connected, KV goes by %s", hello.node_id, transport)
        writer = sender.writer or self._facts.process
        self._send(peer_id, PeerWelcome(self._facts.node_id, self._facts.epoch, transport, writer))

    def _void_grants(self, peer_id: bytes, hello: PeerHello, now_s: float) -> None:
        """The same life of the receiver dials again or was fenced: it holds no block for what it granted before."""
        for handoff in self._outgoing.values():
            if handoff.grant is not None and handoff.belongs_to(hello):
                handoff.peer_id = peer_id  # where the answer goes
                self.withdraw(handoff.key, "the receiver said hello again", now_s)
        for key, (_, _, grant) in list(self._early.items()):
            if grant.receiver_epoch == hello.epoch:
                del self._early[key]
                self._remember_end(key, _End())

    def _on_grant(self, peer_id: bytes, grant: Grant, now_s: float) -> None:
        key = grant.handoff.key
        handoff = self._outgoing.get(key)
        if handoff is None:
            if key in self._ended:
                self._send_revoked(peer_id, grant.handoff, "the handoff has ended")
            elif len(self._early) >= _MAX_EARLY:
                self._remember_end(key, _End())
                self._send_revoked(peer_id, grant.handoff, "too many grants without a prompt")
            else:
                self._early[key] = (now_s + self._facts.lease_s, peer_id, grant)
            return
        if grant == handoff.grant:
            return  # doubled on its way
        objection = self._objection(handoff, self._peers[peer_id].hello, grant)
        if objection:
            self._send_revoked(peer_id, grant.handoff, objection)
            return
        handoff.peer_id, handoff.grant = peer_id, grant
        self._leases.renew(key, now_s + self._facts.lease_s)
        if handoff.progress.state is SendingState.WITHDRAWING:
            return
        self._push_ready(handoff, now_s)
        self._push_layers(handoff, now_s)
        self._commit_if_pushed(handoff, now_s)

    def _objection(self, handoff: _Outgoing, hello: PeerHello, grant: Grant) -> str:
        """Why this grant is not the one this handoff waits for, or names impossible blocks; "" if all is well."""
        if not handoff.belongs_to(hello):
            return "this handoff belongs to another decode node"
        if handoff.grant is not None:
            return "this handoff has a grant already"
        if grant.sender_epoch != self._facts.epoch or grant.receiver_epoch != hello.epoch:
            return "the grant names another epoch"
        if grant.num_tokens != handoff.num_tokens or grant.prompt_digest != handoff.prompt_digest:
            return "the grant is for another prompt"
        block_size = self._facts.layout.block_size
        num_blocks = -(-grant.num_tokens // block_size) - grant.num_cached_tokens // block_size
        if grant.num_cached_tokens % block_size or grant.num_cached_tokens > grant.num_tokens:
            return "cached tokens must be whole blocks of the prompt"
        if not len(grant.block_ids) == len(set(grant.block_ids)) == len(grant.generations) == num_blocks:
            return f"the grant names {len(grant.block_ids)} blocks, {num_blocks} are needed"
        if any(block_id >= hello.num_blocks for block_id in grant.block_ids):
            return f"the grant names blocks beyond the pool of {hello.num_blocks}"
        return ""

    def _push_ready(self, handoff: _Outgoing, now_s: float) -> None:
        """Submit the granted blocks that are complete and not submitted yet."""
        grant, peer = handoff.grant, self._peers.get(handoff.peer_id)
        if grant is None or peer is None:
            return
        first = grant.num_cached_tokens // self._facts.layout.block_size
        last = min(handoff.num_ready_blocks - first, len(grant.block_ids))
        if last > handoff.num_submitted:
            self._submit(handoff, peer.sender, range(handoff.num_submitted, last), now_s)
            handoff.num_submitted = last

    def _push_layers(self, handoff: _Outgoing, now_s: float) -> None:
        """Submit the granted blocks that the step under way computes."""
        layers, grant, peer = handoff.layers, handoff.grant, self._peers.get(handoff.peer_id)
        if layers is None or layers.is_abandoned or grant is None or peer is None or not peer.sender.pushes_parts:
            return
        handoff.layers = None
        indexes = range(handoff.num_submitted, len(grant.block_ids))
        handoff.num_submitted = len(grant.block_ids)
        self._submit(handoff, peer.sender, indexes, now_s, layers)

    def _submit(
        self,
        handoff: _Outgoing,
        sender: Sender,
        indexes: Sequence[int],
        now_s: float,
        layers: LayerProgress | None = None,
    ) -> None:
        """Have blocks of the grant pushed."""
        grant = handoff.grant
        if grant is None:
            raise RuntimeError("blocks are pushed to where a grant says")
        first = grant.num_cached_tokens // self._facts.layout.block_size
        moves = [
            Move(index, handoff.table[first + index], grant.block_ids[index], grant.generations[index])
            for index in indexes
        ]
        while moves:
            size = len(moves) if layers is not None or not self._is_told else self._job_size(len(moves))
            handoff.num_jobs += 1
            self._pusher.submit(PushJob(handoff.key, sender, moves[:size], layers), now_s)
            moves = moves[size:]

    @property
    def _is_told(self) -> bool:
        """Whether receivers verify, and have to hear what has been pushed."""
        return self._facts.checksum != NONE

    def _job_size(self, num_blocks: int) -> int:
        """Half of what is left, or a few megabytes: the receiver verifies one job while the next is pushed, a message
        for each, and finds little to do after the last.
        """
        return max(num_blocks // 2, -(-_MIN_JOB_BYTES // self._facts.layout.block_bytes))

    def _on_report(self, report: PushReport, now_s: float) -> None:
        handoff = self._outgoing.get(report.key)
        if handoff is None:
            return
        handoff.num_jobs -= 1
        self.counters.num_blocks += len(report.checksums)
        self.counters.num_bytes += len(report.checksums) * self._facts.layout.block_bytes
        for move, checksum in zip(report.moves, report.checksums, strict=False):
            handoff.checksums[move.index] = checksum
        if handoff.may_push and report.error:
            self.withdraw(report.key, report.error, now_s)
        elif handoff.may_push and not self._commit_if_pushed(handoff, now_s):
            self._tell_pushed(handoff, report)

    def _tell_pushed(self, handoff: _Outgoing, report: PushReport) -> None:
        """Let the receiver verify what it could not know is there."""
        peer = self._peers.get(handoff.peer_id)
        if self._is_told and peer is not None and handoff.grant is not None and peer.sender.is_silent:
            self._send(handoff.peer_id, Pushed(handoff.grant.handoff, tuple(move.index for move in report.moves)))

    def _commit_if_pushed(self, handoff: _Outgoing, now_s: float) -> bool:
        grant = handoff.grant
        if handoff.progress.state is not SendingState.PUSHING or grant is None or handoff.first is None:
            return False
        if len(handoff.checksums) < len(grant.block_ids):
            return False
        handoff.progress.move(SendingState.COMMITTED, SENDING_MOVES, now_s)
        commit = Commit(
            handoff=grant.handoff,
            receiver_epoch=grant.receiver_epoch,
            sender_epoch=self._facts.epoch,
            num_tokens=handoff.num_tokens,
            prompt_digest=handoff.prompt_digest,
            generations=grant.generations,
            checksums=tuple(handoff.checksums[index] for index in range(len(grant.block_ids))),
            first=handoff.first,
            round=handoff.round,
            exposed_us=round((self._clock() - handoff.computed_s) * 1e6),
        )
        self._send(handoff.peer_id, commit)
        return True

    def _on_resend(self, peer_id: bytes, resend: Resend, now_s: float) -> None:
        handoff, peer = self._of_peer(peer_id, resend.handoff.key), self._peers[peer_id]
        if handoff is None or handoff.progress.state is not SendingState.COMMITTED or handoff.grant is None:
            return
        if resend.round != handoff.round + 1 or handoff.key in self._draining:
            return  # doubled on its way
        indexes = sorted(set(resend.indexes))
        if not indexes or indexes[-1] >= len(handoff.grant.block_ids):
            raise InvalidMessage("blocks were asked for again that the grant does not have")
        self.counters.num_resent_blocks += len(indexes)
        handoff.round = resend.round
        handoff.progress.move(SendingState.PUSHING, SENDING_MOVES, now_s)
        self._leases.renew(handoff.key, now_s + self._facts.lease_s)
        for index in indexes:
            del handoff.checksums[index]
        self._submit(handoff, peer.sender, indexes, now_s)

    def _on_release(self, peer_id: bytes, release: Release, now_s: float) -> None:
        handoff = self._of_peer(peer_id, release.handoff.key)
        if handoff is None or handoff.progress.state is not SendingState.COMMITTED or handoff.key in self._draining:
            return
        self.counters.num_released += 1
        self._draining[handoff.key] = now_s

    def _on_revoke(self, peer_id: bytes, revoke: Revoke, now_s: float) -> None:
        key = revoke.handoff.key
        self._early.pop(key, None)
        handoff = self._of_peer(peer_id, key)
        if handoff is None:
            self._remember_end(key, _End())
            self._send_revoked(peer_id, revoke.handoff, "no such handoff")
            return
        self.withdraw(key, "revoked by the decode node", now_s)
        if handoff.grant is None:
            self._send_revoked(peer_id, revoke.handoff, "its grant has not arrived")

    def _on_renew(self, peer_id: bytes, renew: Renew, now_s: float) -> None:
        hello = self._peers[peer_id].hello
        for name in renew.handoffs:
            handoff = self._outgoing.get(name.key)
            if handoff is None:
                if name.key in self._ended:
                    self._send_revoked(peer_id, name, "the handoff has ended")
            elif handoff.belongs_to(hello):
                self._leases.renew(name.key, now_s + self._facts.lease_s)

    def _of_peer(self, peer_id: bytes, key: RequestKey) -> _Outgoing | None:
        """The handoff, when it is meant for the receiver at the other end of this connection."""
        handoff = self._outgoing.get(key)
        return handoff if handoff is not None and handoff.belongs_to(self._peers[peer_id].hello) else None

    def _end(self, handoff: _Outgoing, now_s: float) -> None:
        was_withdrawn = handoff.progress.state is SendingState.WITHDRAWING
        end = _End(handoff.request_ended, was_withdrawn and self._pusher.needs_fence(handoff.key))
        handoff.progress.move(SendingState.ENDED, SENDING_MOVES, now_s)
        del self._outgoing[handoff.key]
        self._draining.pop(handoff.key, None)
        self._leases.end(handoff.key)
        self._pusher.forget(handoff.key)
        self._remember_end(handoff.key, end)
        if was_withdrawn and handoff.grant is not None:
            self._send_revoked(handoff.peer_id, handoff.grant.handoff, handoff.reason)
        self._holder.let_go(handoff.key)

    def _send_revoked(self, peer_id: bytes, name: HandoffName, reason: str) -> None:
        end = self._ended.get(name.key, _End())
        self._send(peer_id, Revoked(name, reason, end.request_ended, end.needs_fence))

    def _remember_end(self, key: RequestKey, end: _End) -> None:
        """So that late messages of an ended handoff are answered, not waited for."""
        # what was said once is not taken back: a handoff that is revoked again may still need its fence
        self._ended.setdefault(key, end)
        while len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)

    def _renew(self) -> None:
        # an empty Renew is sent too: it finds out whether the receiver is still there
        by_peer: dict[bytes, list[HandoffName]] = {peer_id: [] for peer_id in self._peers}
        for handoff in self._outgoing.values():
            if handoff.grant is not None and handoff.may_push:
                by_peer.setdefault(handoff.peer_id, []).append(handoff.grant.handoff)
        for peer_id, names in by_peer.items():
            self._send(peer_id, Renew(tuple(names)))

    def _give_up_peer(self, peer_id: bytes, reason: str, now_s: float) -> None:
        """A transport has failed: nothing else that waits for it would come through."""
        self._drop_peer(peer_id, reason)
        for handoff in list(self._outgoing.values()):
            if handoff.grant is not None and handoff.peer_id == peer_id:
                self.withdraw(handoff.key, reason, now_s)
        self._refusals.append((peer_id, PeerRefusal(reason[:1000])))

    def _drop_peer(self, peer_id: bytes, reason: str) -> None:
        peer = self._peers.pop(peer_id, None)
        if peer is not None:
            self._pusher.retire(peer.sender, reason)

    def _send(self, peer_id: bytes, message: object, codec: Codec = SENDER_TO_RECEIVER) -> None:
        try:
            self._link.send_multipart([peer_id, codec.encode(message)], zmq.NOBLOCK)
        except zmq.Again:
            _log.warning("a decode node takes no messages, %s dropped", type(message).__name__)
        except zmq.ZMQError:
            # this connection is gone for good: its leases on our blocks end by their deadline
            _log.info("a decode node is not reachable, %s dropped", type(message).__name__)
            self._drop_peer(peer_id, "the receiver is not reachable")


def open_listener(
    context: zmq.Context[zmq.Socket[bytes]], host: str, port: int, settings: links.LinkSettings
) -> tuple[zmq.Socket[bytes], str]:
    """The socket that decode nodes dial, and its address. Raises `InvalidSetting`."""
    return links.listen(context, zmq.ROUTER, host, port, settings)
