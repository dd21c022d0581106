"""One handoff at its decode node: its blocks, its grant, and which blocks have arrived and are verified.

Owns its state, its lease and the checksums of its blocks. Knows no sockets and no other handoff: `ReceivingSide` passes
events to it and sends the messages that it returns.

Invariants: it holds a lease while it is reserved, granted or committed, and at no other time; it is delivered only when
its Commit names what was granted, every block has arrived, and all bytes match their checksums; its blocks are released
only when `judge` (see `write_proof`) says so. All that a revoked handoff has learnt about its peer is in its state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from baton.kvtransfer.arrived import ArrivedBlocks
from baton.kvtransfer.commands import ReservedBlocks
from baton.kvtransfer.facts import ReceivingFacts
from baton.kvtransfer.integrity import NONE
from baton.kvtransfer.leases import LeaseTable
from baton.kvtransfer.messages import Commit, Grant, HandoffName, ProcessIdentity, Pushed, Resend
from baton.kvtransfer.pools.base import Checksums
from baton.kvtransfer.process_identity import is_elsewhere, is_gone, shares_processes
from baton.kvtransfer.receiver_connections import Connection
from baton.kvtransfer.states import RECEIVING_MOVES, Lifecycle, ReceivingState
from baton.kvtransfer.transports.base import Receiver
from baton.kvtransfer.write_proof import Known, PeerWord, Verdict, Writer, judge, writer_of_all
from baton.wire.errors import InvalidMessage
from baton.wire.messages.output import HandoffFigures
from baton.wire.request_key import RequestKey

FENCE_AFTER_S = 5.0
_REVOKE_AGAIN_S = 1.0
_MAX_RESENDS = 1
_R = ReceivingState


class IncomingHandoff:
    """One handoff to this node. `receiver` takes its blocks once it is granted; `arrived` says which blocks have
    arrived."""

    def __init__(
        self,
        key: RequestKey,
        connection: Connection,
        facts: ReceivingFacts,
        leases: LeaseTable[RequestKey],
        now_s: float,
    ) -> None:
        self.key = key
        self.name = HandoffName(*key)
        self.connection = connection
        self.receiver: Receiver | None = None
        self.commit: Commit | None = None
        self._facts = facts
        self._leases = leases
        self._life = Lifecycle(_R.WAITING, RECEIVING_MOVES, now_s)
        self._blocks = ReservedBlocks(key, 0, 0, b"", (), ())
        self.arrived = ArrivedBlocks(0, checksums=False)
        self.num_verified_blocks = 0
        """From the first one on, of a prefix whose sender tells checksums before its Commit."""
        self._told: dict[int, int] = {}
        self._writers: dict[ProcessIdentity, Writer] = {}
        self._round = 0
        self._next_recheck_s = 0.0

    @property
    def state(self) -> ReceivingState:
        """The current state of the handoff."""
        return self._life.state

    @property
    def num_blocks(self) -> int:
        """The number of blocks that the handoff holds."""
        return len(self._blocks.block_ids)

    @property
    def is_wanted(self) -> bool:
        """Whether the handoff may still be delivered."""
        return self._life.state in (_R.WAITING, _R.RESERVED, _R.GRANTED, _R.COMMITTED)

    @property
    def is_awaited(self) -> bool:
        """Whether blocks of the handoff may arrive."""
        return self._life.state in (_R.GRANTED, _R.COMMITTED)

    @property
    def is_quarantined(self) -> bool:
        """Whether the handoff's blocks are held only because a peer may still write them."""
        return self._life.state in (_R.REVOKING, _R.FENCING, _R.CUT_OFF)

    def renew(self, now_s: float) -> None:
        """Renew the handoff's lease, because a block has arrived or the sender has mentioned it."""
        self._leases.renew(self.key, now_s + self._facts.lease_s)

    # granting

    def reserve(self, blocks: ReservedBlocks, connection: Connection, now_s: float) -> None:
        """Give the handoff the blocks that were reserved for it, and begin its lease."""
        self._life.enter(_R.RESERVED, now_s)
        self.connection, self._blocks = connection, blocks
        self.arrived = ArrivedBlocks(len(blocks.block_ids), checksums=self._facts.checksum != NONE)
        self._leases.begin(self.key, now_s + self._facts.lease_s)

    def grant(self, now_s: float) -> Grant:
        """Make the grant for a peer that has welcomed this node. The peer may write from now on."""
        receiver, welcome = self.connection.receiver, self.connection.welcome
        if receiver is None or welcome is None:
            raise RuntimeError("a grant is sent to a peer that has welcomed us")
        self._life.enter(_R.GRANTED, now_s)
        self.receiver = receiver
        for writer in welcome.writers:
            is_outside = is_elsewhere(self._facts.process, writer)
            self._writers[writer] = Writer.ELSEWHERE if is_outside else Writer.MAY_RUN
        blocks = self._blocks
        receiver.expect(self.key, blocks.block_ids, blocks.generations)
        return Grant(
            handoff=self.name,
            receiver_epoch=self._facts.epoch,
            sender_epoch=self.connection.peer.epoch,
            num_tokens=blocks.num_tokens,
            num_cached_tokens=blocks.num_cached_tokens,
            prompt_digest=blocks.prompt_digest,
            block_ids=blocks.block_ids,
            generations=blocks.generations,
        )

    # arrivals

    def take_blocks(self, indexes: Iterable[int], now_s: float) -> None:
        """Record blocks that the receiver has seen arrive."""
        if self.is_awaited:
            self.arrived.note(indexes)
            # not through `renew`: this runs for every block
            self._leases.renew(self.key, now_s + self._facts.lease_s)

    def take_pushed(self, pushed: Pushed, now_s: float) -> None:
        """Record blocks that the sender reports as written. Raises `InvalidMessage` for blocks outside the grant."""
        if self.receiver is None or not (self.receiver.is_silent or pushed.checksums):
            return
        if any(index >= self.num_blocks for index in pushed.indexes):
            raise InvalidMessage("blocks were pushed that the grant does not have")
        if pushed.checksums and (self._blocks.has_firsts or len(pushed.checksums) != len(pushed.indexes)):
            raise InvalidMessage("blocks were pushed with other checksums than one for each block of a prefix")
        if self.state is _R.GRANTED:
            if self.receiver.is_silent:
                self.arrived.note(pushed.indexes)
            for index, checksum in zip(pushed.indexes, pushed.checksums, strict=False):
                self._told.setdefault(index, checksum)
            self.renew(now_s)

    def take_commit(self, commit: Commit, clock_s: float) -> str:
        """Accept the Commit, which says that everything was pushed. Returns why it does not belong to the grant; "" if
        it does, or if it is a duplicate. `clock_s`: the current time.
        """
        if self.state is not _R.GRANTED or commit.round != self._round:
            return ""
        epochs = (self._facts.epoch, self.connection.peer.epoch)
        if objection := _objection_to(commit, self._blocks, epochs):
            return objection
        if any(commit.checksums[index] != checksum for index, checksum in self._told.items()):
            return "the commit names other checksums than before"
        self.commit = commit
        if self.receiver is not None and self.receiver.is_silent:
            self.arrived.note_rest()
        self._life.enter(_R.COMMITTED, clock_s)
        return ""

    # verifying

    def hash(self, checksums: Checksums, end_s: float) -> None:
        """Compute checksums of the blocks that have arrived, until `end_s` (see `ArrivedBlocks.hash`)."""
        self.arrived.hash(checksums, self._blocks.block_ids, end_s)

    def verify_more(self) -> bool:
        """Whether more blocks from the first one on are what the sender said than before."""
        first = self.num_verified_blocks
        while (checksum := self._told.get(self.num_verified_blocks)) is not None:
            if not self.arrived.has(self.num_verified_blocks, checksum):
                break
            self.num_verified_blocks += 1
        return self.num_verified_blocks > first

    @property
    def may_resend(self) -> bool:
        """Whether the sender may be asked to push damaged blocks again. Not once some are in use: it could write into
        those too."""
        return self._round < _MAX_RESENDS and not self.num_verified_blocks

    def request_resend(self, damaged: Sequence[int], now_s: float) -> Resend:
        """The message that asks the sender to push damaged blocks again."""
        self._life.enter(_R.GRANTED, now_s)
        self.commit = None
        self._round += 1
        self.arrived.expect_again(damaged)
        if self.receiver is not None:
            self.receiver.expect(self.key, self._blocks.block_ids, self._blocks.generations)
        self.renew(now_s)
        return Resend(self.name, self._round, tuple(damaged))

    def deliver(self, commit: Commit, now_s: float, clock_s: float) -> HandoffFigures:
        """Record that all blocks are verified: they belong to the request from now on. `clock_s`: the current time."""
        entered_s = self._life.entered_s
        # the sum of two times, each measured on one node; the time that Commit was in flight is in neither of them
        exposed_us = commit.exposed_us + round((clock_s - entered_s[_R.COMMITTED]) * 1e6)
        transfer_us = round((clock_s - entered_s[_R.RESERVED]) * 1e6)
        self._life.enter(_R.DELIVERED, now_s)
        self._leave()
        return HandoffFigures(
            self.num_blocks, self.num_blocks * self._facts.layout.block_bytes, transfer_us, exposed_us
        )

    # the end

    def revoke(self, now_s: float) -> None:
        """Revoke the grant: the blocks are quarantined."""
        self._life.enter(_R.REVOKING, now_s)
        self._next_recheck_s = now_s + _REVOKE_AGAIN_S
        self._leave()

    def end(self, now_s: float) -> None:
        """End the handoff: its blocks cannot be written any more, or never could be."""
        self._life.enter(_R.ENDED, now_s)
        self._leave()

    def is_recheck_due(self, now_s: float) -> bool:
        """Whether to ask the peer again if it may still write. If so, this also checks which of its processes have
        ended."""
        is_due = now_s >= self._next_recheck_s
        if is_due:
            self._next_recheck_s = now_s + _REVOKE_AGAIN_S
            for writer in self._writers:
                if shares_processes(self._facts.process, writer) and is_gone(writer):
                    self._writers[writer] = Writer.ENDED
        return is_due

    def judge(self, now_s: float, *, word: PeerWord | None = None, has_endpoint_ended: bool = False) -> Verdict:
        """Decide about its quarantined blocks, from its state and from this news. Its state then includes the news."""
        if self.receiver is None:
            raise RuntimeError("only a grant can be revoked")
        if self.receiver.is_writing(self.key):
            return Verdict.WAIT
        known = Known(
            word=PeerWord.MAY_LAND if self.state is _R.FENCING else word or PeerWord.SILENT,
            has_endpoint_ended=has_endpoint_ended or self.state is _R.CUT_OFF,
            writer=writer_of_all(self._writers.values()),
            is_overdue=now_s - self._life.entered_s[_R.REVOKING] >= FENCE_AFTER_S,
        )
        verdict = judge(self.receiver.write_proof, known)
        if verdict is not Verdict.RELEASE and self.state is _R.REVOKING:
            if known.has_endpoint_ended:
                self._life.enter(_R.CUT_OFF, now_s)
            elif known.word is PeerWord.MAY_LAND:
                self._life.enter(_R.FENCING, now_s)
        return verdict

    def _leave(self) -> None:
        """End its lease, and tell its receiver to expect no more blocks."""
        self._leases.end(self.key)
        if self.receiver is not None:
            self.receiver.forget(self.key)


def _objection_to(commit: Commit, blocks: ReservedBlocks, epochs: tuple[int, int]) -> str:
    """Why this commit does not match the grant; "" if it does. `epochs`: of the receiver and of the sender."""
    if (commit.receiver_epoch, commit.sender_epoch) != epochs:
        return "the commit names another epoch"
    if commit.num_tokens != blocks.num_tokens:
        return f"the commit covers {commit.num_tokens} tokens, the grant {blocks.num_tokens}"
    if commit.num_drafted > commit.num_tokens:
        return f"the commit has draft KV of {commit.num_drafted} tokens, and {commit.num_tokens} tokens"
    if commit.prompt_digest != blocks.prompt_digest:
        return "the commit is for another prompt"
    if commit.generations != blocks.generations or len(commit.checksums) != len(blocks.block_ids):
        return "the commit names other blocks than the grant"
    choices = [(first.handoff_id, first.attempt) for first in commit.firsts if len(first.token_ids) == 1]
    if choices != ([blocks.key, *blocks.forks] if blocks.has_firsts else []):
        return "the commit does not carry one first token of each choice"
    return ""
