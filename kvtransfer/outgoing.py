"""One handoff at its prefill node: its prompt, its grant, and the blocks that were pushed with their checksums.

Owns its state, its lease and its jobs at the pusher. Knows no sockets and no other handoff: `SendingSide` passes
events to it and sends the messages that it returns.

Invariants: blocks are pushed only to where an accepted grant says, each once per round; Commit is made when all of them
were pushed; no push begins once it is releasing or cancelling; `is_drained` is true only when none of its blocks is
queued or read any more, so blocks are never released while a transport reads them.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.kvtransfer.absent import End
from baton.kvtransfer.commands import BeginHandoff, CancelSending, FinishHandoff, PushComputed, PushLayers
from baton.kvtransfer.facts import SendingFacts
from baton.kvtransfer.integrity import NONE
from baton.kvtransfer.layers import LayerProgress
from baton.kvtransfer.leases import LeaseTable
from baton.kvtransfer.messages import Commit, Grant, PeerHello, Pushed, Resend
from baton.kvtransfer.pusher import Pusher, PushJob, PushReport
from baton.kvtransfer.sender_connections import Peer
from baton.kvtransfer.states import SENDING_MOVES, Lifecycle, SendingState
from baton.kvtransfer.transports.base import Move
from baton.wire.errors import InvalidMessage
from baton.wire.request_key import RequestKey

_MIN_JOB_BYTES = 4 * 2**20
_MAX_REASON = 1000


class OutgoingHandoff:
    """One handoff from this node. `peer` is set with the grant; its connection may have ended since."""

    def __init__(
        self, prompt: BeginHandoff, facts: SendingFacts, leases: LeaseTable[RequestKey], pusher: Pusher, now_s: float
    ) -> None:
        self.key = prompt.key
        self.peer: Peer | None = None
        self.grant: Grant | None = None
        self.reason = ""
        self._prompt = prompt
        self._facts = facts
        self._leases = leases
        self._pusher = pusher
        self._life = Lifecycle(SendingState.COMPUTING, SENDING_MOVES, now_s)
        self._table: Sequence[int] = ()
        self._num_ready_blocks = 0
        self._layers: LayerProgress | None = None
        self._num_submitted = 0
        self._num_jobs = 0
        self._checksums: dict[int, int] = {}
        self._finish: FinishHandoff | None = None
        self._round = 0
        self._request_ended = False

    @property
    def state(self) -> SendingState:
        """The current state of the handoff."""
        return self._life.state

    @property
    def since_s(self) -> float:
        """When the handoff entered its current state, in seconds, monotonic."""
        return self._life.since_s

    @property
    def may_push(self) -> bool:
        """Whether pushes of the handoff's blocks may still begin."""
        return self._life.state in (SendingState.COMPUTING, SendingState.PUSHING)

    @property
    def is_ending(self) -> bool:
        """Whether the handoff only waits until none of its blocks is queued or read any more."""
        return self._life.state in (SendingState.RELEASING, SendingState.CANCELLING)

    @property
    def is_drained(self) -> bool:
        """Whether none of the handoff's blocks is queued or read any more."""
        return not self._num_jobs and not self._pusher.is_reading(self.key)

    def belongs_to(self, hello: PeerHello) -> bool:
        """Whether the receiver that sent `hello` is the one that the router named."""
        return (hello.node_id, hello.epoch) == (self._prompt.decode_node_id, self._prompt.decode_epoch)

    def renew(self, now_s: float) -> None:
        """Renew the handoff's lease, because its receiver has mentioned it."""
        self._leases.renew(self.key, now_s + self._facts.lease_s)

    # the prompt

    def chunk_computed(self, news: PushComputed, now_s: float) -> None:
        """Push the blocks that a computed chunk of the prompt completed."""
        if self.state is SendingState.COMPUTING:
            self._table = news.table
            self._num_ready_blocks = news.num_computed_tokens // self._facts.layout.block_size
            self._push_ready(now_s)

    def last_step_begins(self, news: PushLayers, now_s: float) -> None:
        """Prepare to push the rest of the prompt layer by layer, while the step that computes it runs."""
        if self.state is SendingState.COMPUTING:
            self._table, self._layers = news.table, news.layers
            self._push_layers(now_s)

    def finish(self, news: FinishHandoff, now_s: float) -> None:
        """Push the rest of a computed prompt. Its blocks are held by a lease from now on."""
        if self.state is not SendingState.COMPUTING:
            return
        self._life.enter(SendingState.PUSHING, now_s)
        self._finish, self._table = news, news.table
        self._layers = None  # the step is over: what was not pushed layer by layer goes as whole blocks
        self._num_ready_blocks = -(-self._prompt.num_tokens // self._facts.layout.block_size)
        self._leases.begin(self.key, now_s + self._facts.lease_s)
        self._push_ready(now_s)

    # messages of the receiver

    def objection_to(self, grant: Grant, hello: PeerHello) -> str:
        """Why this grant does not match this handoff or names impossible blocks; "" if it is acceptable."""
        if not self.belongs_to(hello):
            return "this handoff belongs to another decode node"
        if self.grant is not None:
            return "this handoff has a grant already"
        if grant.sender_epoch != self._facts.epoch or grant.receiver_epoch != hello.epoch:
            return "the grant names another epoch"
        if grant.num_tokens != self._prompt.num_tokens or grant.prompt_digest != self._prompt.prompt_digest:
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

    def accept(self, grant: Grant, peer: Peer, now_s: float) -> None:
        """Accept a grant and push the complete blocks. A cancelled handoff only learns which peer to answer."""
        self.peer, self.grant = peer, grant
        self.renew(now_s)
        if self.may_push:
            self._push_ready(now_s)
            self._push_layers(now_s)

    def resend(self, resend: Resend, now_s: float) -> int:
        """Push blocks again that arrived damaged; returns how many. A duplicate of the message changes nothing.

        Raises `InvalidMessage` for blocks that the grant does not have.
        """
        grant, peer = self.grant, self.peer
        if self.state is not SendingState.COMMITTED or resend.round != self._round + 1:
            return 0
        if grant is None or peer is None or not peer.is_connected:
            return 0
        indexes = sorted(set(resend.indexes))
        if not indexes or indexes[-1] >= len(grant.block_ids):
            raise InvalidMessage("blocks were asked for again that the grant does not have")
        self._round = resend.round
        self._life.enter(SendingState.PUSHING, now_s)
        self.renew(now_s)
        for index in indexes:
            del self._checksums[index]
        self._submit(indexes, now_s)
        return len(indexes)

    def release(self, now_s: float) -> bool:
        """Begin to release, because the receiver has all KV. Returns False and does nothing before Commit."""
        is_committed = self.state is SendingState.COMMITTED
        if is_committed:
            self._life.enter(SendingState.RELEASING, now_s)
        return is_committed

    # pushing and its end

    def take_report(self, report: PushReport) -> None:
        """Take the checksums of a push job that has ended."""
        self._num_jobs -= 1
        for move, checksum in zip(report.moves, report.checksums, strict=False):
            self._checksums[move.index] = checksum

    def pushed(self, report: PushReport) -> Pushed | None:
        """The message about pushed blocks, for a receiver that cannot notice arrivals by itself, or uses them before
        the last has come; None if it is not needed.
        """
        if self.peer is None or self.grant is None or not self._is_verified:
            return None
        if not (self.peer.sender.is_silent or self._is_prefix):
            return None
        checksums = tuple(report.checksums) if self._is_prefix else ()
        return Pushed(self.grant.handoff, tuple(move.index for move in report.moves), checksums)

    def commit(self, now_s: float, clock_s: float) -> Commit | None:
        """The Commit message, once everything was pushed; None before. `clock_s`: the current time."""
        grant, finish = self.grant, self._finish
        if self.state is not SendingState.PUSHING or grant is None or finish is None:
            return None
        if len(self._checksums) < len(grant.block_ids):
            return None
        self._life.enter(SendingState.COMMITTED, now_s)
        return Commit(
            handoff=grant.handoff,
            receiver_epoch=grant.receiver_epoch,
            sender_epoch=self._facts.epoch,
            num_tokens=self._prompt.num_tokens,
            prompt_digest=self._prompt.prompt_digest,
            generations=grant.generations,
            checksums=tuple(self._checksums[index] for index in range(len(grant.block_ids))),
            firsts=finish.firsts,
            round=self._round,
            exposed_us=round((clock_s - finish.computed_s) * 1e6),
            num_drafted=finish.num_drafted,
        )

    def cancel(self, why: CancelSending, now_s: float) -> bool:
        """Begin no further push. Returns False when it is ending already."""
        if self.is_ending:
            return False
        self.reason, self._request_ended = why.reason[:_MAX_REASON], why.request_ended
        self._life.enter(SendingState.CANCELLING, now_s)
        self._pusher.cancel(self.key)
        return True

    def end(self, now_s: float) -> End:
        """End the handoff, once it is drained; returns how it ended."""
        was_cancelled = self.state is SendingState.CANCELLING
        end = End(self._request_ended, was_cancelled and self._pusher.needs_fence(self.key))
        self._life.enter(SendingState.ENDED, now_s)
        self._leases.end(self.key)
        self._pusher.forget(self.key)
        return end

    def _push_ready(self, now_s: float) -> None:
        """Submit the granted blocks that are complete and not submitted yet."""
        if self.grant is None or self.peer is None or not self.peer.is_connected:
            return
        first = self.grant.num_cached_tokens // self._facts.layout.block_size
        last = min(self._num_ready_blocks - first, len(self.grant.block_ids))
        if last > self._num_submitted:
            self._submit(range(self._num_submitted, last), now_s)
            self._num_submitted = last

    def _push_layers(self, now_s: float) -> None:
        """Submit the granted blocks that the step in flight computes."""
        layers, grant, peer = self._layers, self.grant, self.peer
        if layers is None or layers.is_abandoned or grant is None or peer is None:
            return
        if peer.is_connected and peer.sender.pushes_parts:
            self._layers = None
            indexes = range(self._num_submitted, len(grant.block_ids))
            self._num_submitted = len(grant.block_ids)
            self._submit(indexes, now_s, layers)

    def _submit(self, indexes: Sequence[int], now_s: float, layers: LayerProgress | None = None) -> None:
        """Submit blocks of the grant to the pusher, as one job or several."""
        grant, peer = self.grant, self.peer
        if grant is None or peer is None:
            raise RuntimeError("blocks are pushed to where a grant says")
        first = grant.num_cached_tokens // self._facts.layout.block_size
        moves = [
            Move(index, self._table[first + index], grant.block_ids[index], grant.generations[index])
            for index in indexes
        ]
        while moves:
            is_whole = layers is not None or not self._is_verified
            block_bytes = self._facts.layout.block_bytes
            size = len(moves) if is_whole else _job_size(len(moves), block_bytes, is_prefix=self._is_prefix)
            self._num_jobs += 1
            self._pusher.submit(PushJob(self.key, peer.sender, moves[:size], layers), now_s)
            moves = moves[size:]

    @property
    def _is_prefix(self) -> bool:
        """Whether no token is sampled behind what is handed over, and its receiver only caches it."""
        return self._finish is not None and not self._finish.firsts

    @property
    def _is_verified(self) -> bool:
        """Whether receivers verify blocks, and need to know which have been pushed."""
        return self._facts.checksum != NONE


def _job_size(num_blocks: int, block_bytes: int, *, is_prefix: bool) -> int:
    """How many of so many blocks the next job takes: half of them, and at least a few megabytes. The receiver verifies
    one job while the next is pushed, so little is left to verify after the last one. Of a prefix each job can be used
    when it has come, so it takes no more.
    """
    least = -(-_MIN_JOB_BYTES // block_bytes)
    return least if is_prefix else max(num_blocks // 2, least)
