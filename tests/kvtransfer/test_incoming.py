"""One handoff at its decode node: its lease, what it takes, and what it makes of the news about a revoked grant."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton.kvtransfer import incoming
from baton.kvtransfer.commands import ReservedBlocks
from baton.kvtransfer.facts import ReceivingFacts
from baton.kvtransfer.incoming import FENCE_AFTER_S, IncomingHandoff
from baton.kvtransfer.integrity import NONE, XXH3
from baton.kvtransfer.leases import LeaseTable
from baton.kvtransfer.messages import Commit, Grant, HandoffName, ProcessIdentity, Pushed, Resend
from baton.kvtransfer.process_identity import this_process
from baton.kvtransfer.receiver_connections import Connection
from baton.kvtransfer.states import ReceivingState
from baton.kvtransfer.write_proof import PeerWord, Verdict, WriteProof
from baton.wire.errors import InvalidMessage
from baton.wire.messages.output import HandoffFigures
from baton.wire.request_key import RequestKey
from tests.kvtransfer.pools import BLOCK_BYTES, LAYOUT, LEASE_S, digest_of, first_token
from tests.request_keys import A, B, C

BLOCKS = ReservedBlocks(A, 11, 4, digest_of(A), (3, 7), (5, 6), (B,))
COMMIT = Commit(HandoffName(*A), 72, 71, 11, digest_of(A), (5, 6), (101, 102), (first_token(A), first_token(B)), 0, 250)
MINE = ProcessIdentity("boot:1:2", 10, 20)


class FakeReceiver:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.is_silent, self.writes = False, False
        self.write_proof = WriteProof.WRITER_ENDED

    def expect(self, *order: object) -> None:
        self.told.append(order)

    def forget(self, key: RequestKey) -> None:
        self.told.append(("forget", key))

    def is_writing(self, key: RequestKey) -> bool:
        return self.writes


class Side:
    """A handoff and what it has to do with."""

    def __init__(self, *writers: ProcessIdentity, checksum: str = XXH3) -> None:
        self.leases: LeaseTable[RequestKey] = LeaseTable()
        self.receiver = FakeReceiver()
        welcome = SimpleNamespace(writers=writers or (MINE,))
        self.connection: Any = SimpleNamespace(receiver=self.receiver, welcome=welcome, peer=SimpleNamespace(epoch=71))
        facts = ReceivingFacts("D", 72, "model", LAYOUT, 8, MINE, LEASE_S, checksum)
        self.handoff = IncomingHandoff(A, cast("Connection", self.connection), facts, self.leases, 1.0)

    def granted(self) -> Side:
        self.handoff.reserve(BLOCKS, cast("Connection", self.connection), 2.0)
        self.handoff.grant(3.0)
        self.receiver.told.clear()
        return self

    def committed(self) -> Side:
        self.granted()
        assert self.handoff.take_commit(COMMIT, 5.0) == ""
        return self

    def revoked(self, proof: WriteProof = WriteProof.WRITER_ENDED) -> Side:
        self.granted()
        self.receiver.write_proof = proof
        self.handoff.revoke(4.0)
        self.receiver.told.clear()
        return self

    def has_lease_until(self, end_s: float) -> bool:
        return self.leases.overdue(end_s - 0.1) == [] and self.leases.overdue(end_s + 0.1) == [A]


def test_a_grant_names_what_was_reserved_and_the_receiver_expects_it() -> None:
    side = Side()
    handoff = side.handoff
    assert (handoff.state, handoff.num_blocks, handoff.is_wanted, handoff.is_awaited) == (
        ReceivingState.WAITING,
        0,
        True,
        False,
    )
    handoff.reserve(BLOCKS, cast("Connection", side.connection), 2.0)
    assert (handoff.num_blocks, handoff.is_wanted, handoff.is_awaited) == (2, True, False)
    assert side.has_lease_until(2.0 + LEASE_S)
    assert handoff.grant(3.0) == Grant(HandoffName(*A), 72, 71, 11, 4, digest_of(A), (3, 7), (5, 6))
    assert side.receiver.told == [(A, (3, 7), (5, 6))]
    assert (handoff.is_wanted, handoff.is_awaited, handoff.is_quarantined) == (True, True, False)


@pytest.mark.parametrize("lacks", ["receiver", "welcome"])
def test_nothing_is_granted_to_a_peer_that_has_not_welcomed_this_node(lacks: str) -> None:
    side = Side()
    side.handoff.reserve(BLOCKS, cast("Connection", side.connection), 2.0)
    setattr(side.connection, lacks, None)
    with pytest.raises(RuntimeError, match="welcomed"):
        side.handoff.grant(3.0)


@pytest.mark.parametrize(
    ("renew", "is_renewed"),
    [
        (lambda handoff: handoff.renew(7.0), True),
        (lambda handoff: handoff.take_blocks((0,), 7.0), True),
        (lambda handoff: handoff.take_pushed(Pushed(HandoffName(*A), (0,)), 7.0), True),
        (lambda handoff: None, False),
    ],
)
def test_news_of_its_sender_renew_its_lease(renew: Callable[[IncomingHandoff], object], is_renewed: bool) -> None:
    side = Side().granted()
    side.receiver.is_silent = True
    renew(side.handoff)
    assert side.has_lease_until((7.0 if is_renewed else 2.0) + LEASE_S)


def test_blocks_are_noted_while_they_are_awaited() -> None:
    side = Side()
    side.handoff.reserve(BLOCKS, cast("Connection", side.connection), 2.0)
    side.handoff.take_blocks((0, 1), 2.5)
    assert side.handoff.arrived.num_missing == 2
    side.handoff.grant(3.0)
    side.handoff.take_blocks((0,), 3.5)
    assert side.handoff.arrived.num_missing == 1
    assert side.handoff.take_commit(COMMIT, 4.0) == ""
    side.handoff.take_blocks((1,), 4.5)
    assert side.handoff.arrived.num_missing == 0


def test_what_a_sender_says_it_pushed_counts_where_nothing_else_tells() -> None:
    name = HandoffName(*A)
    side = Side().granted()
    side.handoff.take_pushed(Pushed(name, (0, 9)), 3.5)
    assert side.handoff.arrived.num_missing == 2, "the receiver notices by itself"
    side.receiver.is_silent = True
    for index in (2, 9):
        with pytest.raises(InvalidMessage, match="does not have"):
            side.handoff.take_pushed(Pushed(name, (0, index)), 3.5)
    side.handoff.take_pushed(Pushed(name, (1,)), 3.5)
    assert side.handoff.arrived.num_missing == 1
    side.handoff.revoke(4.0)
    side.handoff.take_pushed(Pushed(name, (0,)), 4.5)
    assert side.handoff.arrived.num_missing == 1
    early = Side()
    early.handoff.take_pushed(Pushed(name, (9,)), 1.5)


def test_a_commit_is_taken_once_and_of_a_silent_receiver_it_says_that_all_is_there() -> None:
    for is_silent, num_missing in ((False, 2), (True, 0)):
        side = Side().granted()
        side.receiver.is_silent = is_silent
        assert side.handoff.take_commit(replace(COMMIT, round=1, num_tokens=9), 4.0) == ""
        assert side.handoff.commit is None, "another round"
        assert side.handoff.take_commit(COMMIT, 5.0) == ""
        found: tuple[Commit | None, ReceivingState] = (side.handoff.commit, side.handoff.state)
        assert found == (COMMIT, ReceivingState.COMMITTED)
        assert side.handoff.arrived.num_missing == num_missing
        assert side.handoff.take_commit(replace(COMMIT, num_tokens=9), 6.0) == "", "a duplicate"


@pytest.mark.parametrize(
    ("changes", "objection"),
    [
        ({"receiver_epoch": 73}, "another epoch"),
        ({"sender_epoch": 70}, "another epoch"),
        ({"num_tokens": 12}, "covers 12 tokens, the grant 11"),
        ({"prompt_digest": bytes(16)}, "another prompt"),
        ({"generations": (5, 7)}, "other blocks"),
        ({"checksums": (101,)}, "other blocks"),
        ({"num_drafted": 12}, "draft KV of 12 tokens, and 11 tokens"),
        ({"firsts": (first_token(A),)}, "one first token of each choice"),
        ({"firsts": (first_token(B), first_token(A))}, "one first token of each choice"),
        ({"firsts": (first_token(A), first_token(C))}, "one first token of each choice"),
        ({"firsts": (first_token(A), replace(first_token(B), token_ids=(1, 2)))}, "one first token of each choice"),
    ],
)
def test_a_commit_that_is_of_something_else_changes_nothing(changes: dict[str, Any], objection: str) -> None:
    side = Side().granted()
    assert objection in side.handoff.take_commit(replace(COMMIT, **changes), 5.0)
    assert (side.handoff.commit, side.handoff.state) == (None, ReceivingState.GRANTED)


def test_damaged_blocks_are_asked_for_again_once() -> None:
    side = Side().committed()
    side.handoff.arrived.note((0, 1))
    assert side.handoff.may_resend
    assert side.handoff.request_resend([1], 7.0) == Resend(HandoffName(*A), 1, (1,))
    assert (side.handoff.may_resend, side.handoff.commit) == (False, None)
    assert (side.handoff.state, side.handoff.arrived.num_missing) == (ReceivingState.GRANTED, 1)
    assert side.receiver.told == [(A, (3, 7), (5, 6))]
    assert side.has_lease_until(7.0 + LEASE_S)
    assert side.handoff.take_commit(COMMIT, 8.0) == ""
    assert side.handoff.commit is None, "of the round before"
    assert side.handoff.take_commit(replace(COMMIT, round=1), 8.0) == ""
    assert side.handoff.state is ReceivingState.COMMITTED


def test_a_delivery_ends_the_lease_and_tells_what_was_moved_in_which_time() -> None:
    side = Side().committed()
    assert side.handoff.deliver(COMMIT, 6.0, 6.5) == HandoffFigures(2, 2 * BLOCK_BYTES, 4_500_000, 1_500_250)
    assert (side.handoff.state, side.handoff.is_wanted, len(side.leases)) == (ReceivingState.DELIVERED, False, 0)
    assert side.receiver.told == [("forget", A)]


@pytest.mark.parametrize("checksum", [XXH3, NONE])
def test_blocks_are_hashed_where_they_are_verified(checksum: str) -> None:
    side = Side(checksum=checksum).granted()
    side.handoff.take_blocks((0, 1), 3.5)
    assert side.handoff.arrived.is_hashed is (checksum == NONE)


def test_a_revoked_grant_is_quarantined_and_its_peer_asked_again_each_second() -> None:
    side = Side().granted()
    side.handoff.revoke(4.0)
    assert (side.receiver.told, len(side.leases)) == ([("forget", A)], 0)
    assert (side.handoff.is_quarantined, side.handoff.is_wanted, side.handoff.is_awaited) == (True, False, False)
    asks = [at_s for at_s in (4.5, 4.9, 5.0, 5.5, 5.9, 6.0) if side.handoff.is_recheck_due(at_s)]
    assert asks == [5.0, 6.0]
    side.handoff.end(7.0)
    assert (side.handoff.state, side.handoff.is_quarantined) == (ReceivingState.ENDED, False)


def test_one_that_was_never_granted_ends_with_its_lease() -> None:
    side = Side()
    side.handoff.reserve(BLOCKS, cast("Connection", side.connection), 2.0)
    side.handoff.end(3.0)
    assert (len(side.leases), side.receiver.told) == (0, [])
    with pytest.raises(RuntimeError, match="only a grant"):
        side.handoff.judge(4.0)


ELSEWHERE, UNKNOWN = ProcessIdentity("boot:2:2", 10, 20), ProcessIdentity("", 10, 20)


def test_blocks_are_released_when_each_process_that_may_write_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    gone: set[ProcessIdentity] = set()
    monkeypatch.setattr(incoming, "is_gone", gone.__contains__)
    other = replace(MINE, pid=11)
    side = Side(MINE, other).revoked()
    for ended, verdict in ((MINE, Verdict.WAIT), (other, Verdict.RELEASE)):
        gone.add(ended)
        side.handoff.is_recheck_due(4.5)
        now_s = 10.0 + len(gone)
        assert side.handoff.judge(now_s) is Verdict.WAIT, "nobody has looked"
        assert side.handoff.is_recheck_due(now_s)
        assert side.handoff.judge(now_s) is verdict


@pytest.mark.parametrize("writer", [ELSEWHERE, UNKNOWN])
def test_a_process_that_cannot_be_seen_is_not_known_to_have_ended(
    monkeypatch: pytest.MonkeyPatch, writer: ProcessIdentity
) -> None:
    monkeypatch.setattr(incoming, "is_gone", lambda process: True)
    side = Side(writer).revoked()
    assert side.handoff.is_recheck_due(5.0)
    assert side.handoff.judge(5.0) is Verdict.WAIT
    assert side.handoff.judge(5.0, word=PeerWord.DONE) is Verdict.RELEASE


def test_while_the_receiver_itself_writes_nothing_is_released() -> None:
    side = Side().revoked()
    side.receiver.writes = True
    assert side.handoff.judge(5.0, word=PeerWord.DONE) is Verdict.WAIT
    side.receiver.writes = False
    assert side.handoff.judge(5.0, word=PeerWord.DONE) is Verdict.RELEASE


def test_a_silent_peer_is_fenced_after_some_seconds() -> None:
    side = Side(this_process()).revoked(WriteProof.ENDPOINT_ENDED)
    assert side.handoff.judge(4.0 + FENCE_AFTER_S - 0.1) is Verdict.WAIT
    assert side.handoff.judge(4.0 + FENCE_AFTER_S) is Verdict.FENCE
    assert side.handoff.state is ReceivingState.REVOKING
    assert side.handoff.judge(12.0, has_endpoint_ended=True) is Verdict.RELEASE


def test_what_a_revoked_handoff_has_learnt_stays_known() -> None:
    fencing = Side().revoked(WriteProof.BOTH_ENDED)
    assert fencing.handoff.judge(4.5, word=PeerWord.MAY_LAND) is Verdict.FENCE
    assert (fencing.handoff.state, fencing.handoff.is_quarantined) == (ReceivingState.FENCING, True)
    assert fencing.handoff.judge(4.6) is Verdict.FENCE
    assert fencing.handoff.judge(4.7, has_endpoint_ended=True) is Verdict.RELEASE
    cut_off = Side().revoked(WriteProof.BOTH_ENDED)
    assert cut_off.handoff.judge(4.5, has_endpoint_ended=True) is Verdict.WAIT
    assert (cut_off.handoff.state, cut_off.handoff.is_quarantined) == (ReceivingState.CUT_OFF, True)
    assert cut_off.handoff.judge(20.0) is Verdict.WAIT
    assert cut_off.handoff.judge(20.0, word=PeerWord.MAY_LAND) is Verdict.RELEASE
    elsewhere = Side(ELSEWHERE).revoked(WriteProof.BOTH_ENDED)
    assert elsewhere.handoff.judge(4.5, has_endpoint_ended=True) is Verdict.RELEASE
    assert elsewhere.handoff.state is ReceivingState.REVOKING


def test_a_prefix_comes_without_first_tokens_and_no_other_handoff_does() -> None:
    side = Side()
    side.handoff.reserve(replace(BLOCKS, forks=(), has_firsts=False), side.connection, 1.0)
    side.handoff.grant(1.0)
    assert "first token" in side.handoff.take_commit(replace(COMMIT, firsts=(first_token(A),)), 2.0)
    assert side.handoff.take_commit(replace(COMMIT, firsts=()), 2.0) == ""
    assert side.handoff.state is ReceivingState.COMMITTED


class KnownChecksums:
    """The checksum of a block of the pool is its number and 100, or what `wrong` says."""

    max_blocks = 8

    def __init__(self) -> None:
        self.wrong: dict[int, int] = {}

    def begin(self, block_ids: Sequence[int]) -> Any:
        return SimpleNamespace(take=lambda: [self.wrong.get(block_id, 100 + block_id) for block_id in block_ids])


NAME = HandoffName(*A)
PREFIX = replace(BLOCKS, num_tokens=16, forks=(), has_firsts=False, block_ids=(3, 7, 2), generations=(5, 6, 4))
ALL = replace(COMMIT, num_tokens=16, generations=(5, 6, 4), checksums=(103, 107, 102), firsts=())


def prefix(checksums: KnownChecksums, *arrived: int) -> Side:
    """A granted prefix, of which some blocks have arrived."""
    side = Side()
    side.handoff.reserve(PREFIX, side.connection, 2.0)
    side.handoff.grant(3.0)
    arrive(side, checksums, *arrived)
    return side


def arrive(side: Side, checksums: KnownChecksums, *indexes: int) -> None:
    side.handoff.take_blocks(indexes, 3.0)
    side.handoff.hash(cast(Any, checksums), math.inf)


def test_of_a_prefix_blocks_count_as_soon_as_they_and_all_before_them_are_what_was_sent() -> None:
    checksums = KnownChecksums()
    side = prefix(checksums, 1)
    handoff = side.handoff
    handoff.take_pushed(Pushed(NAME, (0, 1), (103, 107)), 3.5)
    assert (handoff.verify_more(), handoff.num_verified_blocks) == (False, 0)
    arrive(side, checksums, 0, 2)
    assert (handoff.verify_more(), handoff.num_verified_blocks) == (True, 2)
    assert (handoff.verify_more(), handoff.num_verified_blocks) == (False, 2)
    handoff.take_pushed(Pushed(NAME, (2,), (102,)), 3.5)
    assert (handoff.verify_more(), handoff.num_verified_blocks) == (True, 3)
    assert handoff.take_commit(ALL, 4.0) == ""


def test_behind_a_damaged_block_of_a_prefix_none_counts() -> None:
    checksums = KnownChecksums()
    checksums.wrong[7] = 1
    side = prefix(checksums, 0, 1, 2)
    side.handoff.take_pushed(Pushed(NAME, (0, 1, 2), (103, 107, 102)), 3.5)
    assert (side.handoff.verify_more(), side.handoff.num_verified_blocks) == (True, 1)


def test_a_sender_is_not_asked_again_where_it_could_write_into_blocks_that_are_in_use() -> None:
    checksums = KnownChecksums()
    side = prefix(checksums, 0)
    assert side.handoff.may_resend
    side.handoff.take_pushed(Pushed(NAME, (0,), (103,)), 3.5)
    side.handoff.verify_more()
    assert not side.handoff.may_resend


def test_a_sender_cannot_take_back_what_it_has_said_of_a_block() -> None:
    side = prefix(KnownChecksums(), 0, 1, 2)
    side.handoff.take_pushed(Pushed(NAME, (0,), (103,)), 3.5)
    side.handoff.take_pushed(Pushed(NAME, (0,), (1,)), 3.6)
    assert "other checksums" in side.handoff.take_commit(replace(ALL, checksums=(1, 107, 102)), 4.0)
    assert side.handoff.take_commit(ALL, 4.0) == ""


@pytest.mark.parametrize("pushed", [Pushed(NAME, (0,), (1, 2)), Pushed(NAME, (0, 1), (1,)), Pushed(NAME, (7,), (1,))])
def test_checksums_are_one_for_each_block_of_the_grant(pushed: Pushed) -> None:
    with pytest.raises(InvalidMessage):
        prefix(KnownChecksums()).handoff.take_pushed(pushed, 3.5)


def test_no_other_handoff_has_checksums_before_its_commit() -> None:
    with pytest.raises(InvalidMessage, match="of a prefix"):
        Side().granted().handoff.take_pushed(Pushed(NAME, (0,), (103,)), 3.5)
