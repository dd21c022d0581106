"""One handoff at its prefill node: what it pushes and when, which grants it refuses, and how it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton.kvtransfer.absent import End
from baton.kvtransfer.commands import BeginHandoff, CancelSending, FinishHandoff, PushComputed, PushLayers
from baton.kvtransfer.facts import SendingFacts
from baton.kvtransfer.integrity import NONE, XXH3
from baton.kvtransfer.layers import LayerProgress
from baton.kvtransfer.leases import LeaseTable
from baton.kvtransfer.messages import Commit, Endpoint, Grant, HandoffName, PeerHello, Pushed, Resend
from baton.kvtransfer.outgoing import OutgoingHandoff
from baton.kvtransfer.process_identity import this_process
from baton.kvtransfer.pusher import Pusher, PushJob, PushReport
from baton.kvtransfer.sender_connections import Peer
from baton.kvtransfer.states import SendingState
from baton.kvtransfer.transports.base import Move, Sender
from baton.wire.errors import InvalidMessage
from baton.wire.layout import KvLayout, LayerKv
from baton.wire.request_key import RequestKey
from tests.kvtransfer.pools import BLOCK_BYTES, LAYOUT, LEASE_S, digest_of, first_token
from tests.request_keys import A

TABLE = tuple(range(50, 60))
"""Of a prompt of 11 tokens, which are three blocks; the first may be cached at the receiver."""
HELLO = PeerHello("D", 72, 71, "model", LAYOUT, 8, XXH3, this_process(), endpoints=(Endpoint("memory", "address"),))
GRANT = Grant(HandoffName(*A), 72, 71, 11, 4, digest_of(A), (3, 7), (5, 6))
FIRSTS = (first_token(A),)


class FakePusher:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.jobs: list[PushJob] = []
        self.told: list[object] = []
        self.reads, self.must_fence = False, True

    def submit(self, job: PushJob, now_s: float) -> None:
        self.told.append(("submit", now_s))
        self.jobs.append(job)

    def is_reading(self, key: RequestKey) -> bool:
        return self.reads

    def needs_fence(self, key: RequestKey) -> bool:
        return self.must_fence

    def cancel(self, key: RequestKey) -> None:
        self.told.append(("cancel", key))

    def forget(self, key: RequestKey) -> None:
        self.told.append(("forget", key))

    def moves(self) -> list[list[tuple[int, int, int, int]]]:
        """(index, source, target, generation) of each move of each job."""
        return [[(move.index, move.source, move.target, move.generation) for move in job.moves] for job in self.jobs]


class Side:
    """A handoff and what it has to do with."""

    def __init__(self, *, checksum: str = XXH3, layout: KvLayout = LAYOUT, num_tokens: int = 11) -> None:
        self.pusher = FakePusher()
        self.leases: LeaseTable[RequestKey] = LeaseTable()
        self.sender = SimpleNamespace(pushes_parts=True, is_silent=True)
        self.peer = Peer(b"connection", HELLO, cast("Sender", self.sender))
        facts = SendingFacts("P", 71, "model", layout, this_process(), LEASE_S, checksum)
        prompt = BeginHandoff(A, "D", 72, num_tokens, digest_of(A))
        self.handoff = OutgoingHandoff(prompt, facts, self.leases, cast("Pusher", self.pusher), 1.0)

    def accept(self, grant: Grant = GRANT, now_s: float = 2.0) -> None:
        self.handoff.accept(grant, self.peer, now_s)

    def finish(self, now_s: float = 3.0) -> None:
        self.handoff.finish(FinishHandoff(A, TABLE, FIRSTS, 2.5), now_s)

    def report(self, checksums: Sequence[int] = (101, 102)) -> None:
        """The oldest job has ended."""
        job = self.pusher.jobs.pop(0)
        self.handoff.take_report(PushReport(A, job.moves, checksums, ""))

    def committed(self) -> Side:
        self.accept()
        self.finish()
        self.report()
        assert self.handoff.commit(4.0, 4.5) is not None
        return self


LAST = [(0, 51, 3, 5), (1, 52, 7, 6)]


def test_blocks_are_pushed_as_they_are_complete_and_granted() -> None:
    side = Side()
    side.handoff.chunk_computed(PushComputed(A, TABLE, 7), 1.5)
    assert side.pusher.jobs == []
    side.accept()
    assert side.pusher.moves() == [], "the second block is not complete"
    side.handoff.chunk_computed(PushComputed(A, TABLE, 8), 2.5)
    side.handoff.chunk_computed(PushComputed(A, TABLE, 11), 2.6)
    assert side.pusher.moves() == [LAST[:1]]
    side.finish()
    side.handoff.chunk_computed(PushComputed(A, (), 0), 3.5)
    assert side.pusher.moves() == [LAST[:1], LAST[1:]]
    assert side.pusher.told == [("submit", 2.5), ("submit", 3.0)]
    assert all((job.key, job.sender, job.layers) == (A, side.sender, None) for job in side.pusher.jobs)
    side.finish(9.0)
    assert (side.handoff.state, side.handoff.since_s) == (SendingState.PUSHING, 3.0)


def test_what_is_complete_when_the_grant_comes_is_pushed_then() -> None:
    side = Side()
    side.finish()
    side.accept(now_s=3.5)
    assert (side.pusher.moves(), side.pusher.told) == ([LAST], [("submit", 3.5)])


def test_nothing_is_pushed_to_a_peer_that_is_gone_or_of_a_handoff_that_ends() -> None:
    gone, cancelled = Side(), Side()
    gone.peer.is_connected = False
    gone.accept()
    gone.finish()
    assert gone.pusher.jobs == []
    assert cancelled.handoff.cancel(CancelSending(A, "no more"), 1.5)
    cancelled.accept()
    cancelled.finish()
    cancelled.handoff.last_step_begins(PushLayers(A, TABLE, layers()), 2.0)
    assert cancelled.pusher.jobs == []
    assert cancelled.handoff.peer is cancelled.peer, "it is the one to answer"


def layers() -> LayerProgress:
    return LayerProgress([BLOCK_BYTES], lambda: None)


@pytest.mark.parametrize("is_granted_before", [True, False])
def test_the_last_step_is_pushed_layer_by_layer_where_that_is_cheap(is_granted_before: bool) -> None:
    side, progress = Side(), layers()
    if is_granted_before:
        side.accept()
    side.handoff.last_step_begins(PushLayers(A, TABLE, progress), 2.5)
    if not is_granted_before:
        side.accept(now_s=2.5)
    assert side.pusher.moves() == [LAST]
    assert side.pusher.jobs[0].layers is progress
    side.finish()
    side.handoff.last_step_begins(PushLayers(A, (), layers()), 3.5)
    assert len(side.pusher.jobs) == 1


@pytest.mark.parametrize("reason", ["abandoned", "costly", "gone", "over"])
def test_what_cannot_be_pushed_layer_by_layer_goes_as_whole_blocks(reason: str) -> None:
    side, progress = Side(), layers()
    side.sender.pushes_parts = reason != "costly"
    side.peer.is_connected = reason != "gone"
    if reason == "abandoned":
        progress.abandon()
    side.handoff.last_step_begins(PushLayers(A, TABLE, progress), 2.0)
    if reason == "over":
        side.finish(2.1)
    side.accept(now_s=2.5)
    assert [job for job in side.pusher.jobs if job.layers is not None] == []
    side.peer.is_connected = True
    if reason != "over":
        side.finish()
    assert side.pusher.moves() == [LAST]


def test_several_blocks_are_pushed_in_jobs_of_half_of_what_is_left_and_a_few_megabytes() -> None:
    layout = KvLayout.of_layers("float32", 4, [LayerKv(num_kv_heads=64, head_dim=512)])  # blocks of 1 MiB
    assert layout.block_bytes == 2**20
    num_blocks = 20
    grant = replace(GRANT, num_tokens=80, num_cached_tokens=0, block_ids=tuple(range(20)), generations=tuple(range(20)))
    for checksum, sizes in ((XXH3, [10, 5, 4, 1]), (NONE, [num_blocks])):
        side = Side(checksum=checksum, layout=layout, num_tokens=80)
        side.accept(grant)
        side.handoff.finish(FinishHandoff(A, range(20), FIRSTS, 2.5), 3.0)
        assert [len(job.moves) for job in side.pusher.jobs] == sizes
        assert [move.index for job in side.pusher.jobs for move in job.moves] == list(range(20))
    side = Side(layout=layout, num_tokens=80)
    side.accept(grant)
    side.handoff.last_step_begins(PushLayers(A, range(20), layers()), 2.5)
    assert [len(job.moves) for job in side.pusher.jobs] == [20]


def test_a_grant_that_fits_is_accepted() -> None:
    side = Side()
    for grant in (
        GRANT,
        replace(GRANT, num_cached_tokens=0, block_ids=(1, 0, 7), generations=(1, 1, 1)),
        replace(GRANT, num_cached_tokens=8, block_ids=(0,), generations=(1,)),
    ):
        assert side.handoff.objection_to(grant, HELLO) == ""


@pytest.mark.parametrize(
    ("changes", "objection"),
    [
        ({"sender_epoch": 70}, "another epoch"),
        ({"receiver_epoch": 73}, "another epoch"),
        ({"num_tokens": 12}, "another prompt"),
        ({"prompt_digest": bytes(16)}, "another prompt"),
        ({"num_cached_tokens": 5}, "whole blocks"),
        ({"num_cached_tokens": 12, "block_ids": (), "generations": ()}, "whole blocks"),
        ({"block_ids": (3,), "generations": (5,)}, "names 1 blocks, 2 are needed"),
        ({"block_ids": (3, 3)}, "names 2 blocks, 2 are needed"),
        ({"generations": (5,)}, "names 2 blocks, 2 are needed"),
        ({"block_ids": (3, 8)}, "beyond the pool of 8"),
    ],
)
def test_a_grant_that_does_not_fit_is_refused(changes: dict[str, Any], objection: str) -> None:
    assert objection in Side().handoff.objection_to(replace(GRANT, **changes), HELLO)


def test_only_the_node_that_the_router_named_may_have_a_prompt_and_only_once() -> None:
    side = Side()
    for hello in (replace(HELLO, node_id="E"), replace(HELLO, epoch=73)):
        assert not side.handoff.belongs_to(hello)
        assert "another decode node" in side.handoff.objection_to(GRANT, hello)
    side.accept()
    assert side.handoff.belongs_to(HELLO)
    assert "a grant already" in side.handoff.objection_to(GRANT, HELLO)


def test_a_commit_is_made_once_when_everything_was_pushed() -> None:
    side = Side()
    assert side.handoff.commit(1.5, 1.5) is None
    side.accept()
    assert side.handoff.commit(2.5, 2.5) is None
    side.finish()
    side.report((101,))
    assert side.handoff.commit(3.5, 3.5) is None
    side.handoff.take_report(PushReport(A, [Move(1, 52, 7, 6)], (102,), ""))
    assert side.handoff.commit(4.0, 4.5) == Commit(
        GRANT.handoff, 72, 71, 11, digest_of(A), (5, 6), (101, 102), FIRSTS, round=0, exposed_us=2_000_000
    )
    assert (side.handoff.state, side.handoff.since_s) == (SendingState.COMMITTED, 4.0)
    assert side.handoff.commit(5.0, 5.0) is None


def test_without_a_grant_a_finished_prompt_is_not_committed() -> None:
    side = Side()
    side.finish()
    assert side.handoff.commit(4.0, 4.0) is None


def test_damaged_blocks_are_pushed_again_once_for_each_round() -> None:
    side = Side().committed()
    name = GRANT.handoff
    for resend in (Resend(name, 0, (1,)), Resend(name, 2, (1,))):
        assert side.handoff.resend(resend, 5.0) == 0
    for indexes in ((), (0, 2)):
        with pytest.raises(InvalidMessage, match="asked for again"):
            side.handoff.resend(Resend(name, 1, indexes), 5.0)
    assert side.handoff.state is SendingState.COMMITTED
    assert side.handoff.resend(Resend(name, 1, (1, 0, 1)), 5.0) == 2
    assert (side.pusher.moves(), side.handoff.state, side.handoff.since_s) == ([LAST], SendingState.PUSHING, 5.0)
    assert side.handoff.resend(Resend(name, 1, (1,)), 5.5) == 0
    assert side.handoff.commit(5.5, 5.5) is None
    side.report((103, 104))
    again = side.handoff.commit(6.0, 6.0)
    assert again is not None
    assert (again.round, again.checksums) == (1, (103, 104))
    assert side.handoff.resend(Resend(name, 2, (1,)), 6.5) == 1
    assert side.pusher.moves() == [LAST[1:]]
    side.report((105,))
    third = side.handoff.commit(7.0, 7.0)
    assert third is not None
    assert (third.round, third.checksums) == (2, (103, 105))


def test_nothing_is_pushed_again_to_a_peer_that_is_gone() -> None:
    side = Side().committed()
    side.peer.is_connected = False
    assert side.handoff.resend(Resend(GRANT.handoff, 1, (1,)), 5.0) == 0
    assert (side.handoff.state, side.pusher.jobs) == (SendingState.COMMITTED, [])


def test_it_may_push_until_everything_was_pushed_and_ends_when_nothing_is_read() -> None:
    side = Side()
    handoff = side.handoff
    assert (handoff.may_push, handoff.is_ending, handoff.is_drained, handoff.state) == (
        True,
        False,
        True,
        SendingState.COMPUTING,
    )
    assert not handoff.release(1.5)
    side.accept()
    side.finish()
    assert (handoff.may_push, handoff.is_drained, handoff.release(3.5)) == (True, False, False)
    side.report()
    side.pusher.reads = True
    assert not handoff.is_drained
    side.pusher.reads = False
    assert handoff.is_drained
    assert handoff.commit(4.0, 4.0) is not None
    assert (handoff.may_push, handoff.is_ending) == (False, False)
    assert handoff.release(5.0)
    assert (handoff.state, handoff.since_s, handoff.is_ending) == (SendingState.RELEASING, 5.0, True)
    assert not handoff.cancel(CancelSending(A, "too late"), 5.5)
    assert handoff.end(6.0) == End(request_ended=False, needs_fence=False)
    assert (handoff.state, handoff.since_s, handoff.reason) == (SendingState.ENDED, 6.0, "")
    assert (side.pusher.told[-1], len(side.leases)) == (("forget", A), 0)


@pytest.mark.parametrize(("request_ended", "must_fence"), [(True, True), (False, False)])
def test_one_that_is_cancelled_says_why_and_whether_its_writes_may_still_land(
    request_ended: bool, must_fence: bool
) -> None:
    side = Side()
    side.pusher.must_fence = must_fence
    assert side.handoff.cancel(CancelSending(A, "x" * 1001, request_ended), 2.0)
    assert (side.handoff.state, side.handoff.is_ending, side.handoff.since_s) == (SendingState.CANCELLING, True, 2.0)
    assert side.handoff.reason == "x" * 1000
    assert not side.handoff.cancel(CancelSending(A, "again"), 3.0)
    assert side.pusher.told == [("cancel", A)]
    assert side.handoff.end(4.0) == End(request_ended, must_fence)


def test_the_blocks_of_a_finished_prompt_have_a_lease_that_its_receiver_renews() -> None:
    side = Side()
    side.accept()
    assert A not in side.leases
    side.finish(3.0)
    assert side.leases.overdue(3.0 + LEASE_S - 0.1) == []
    side.handoff.renew(5.0)
    assert side.leases.overdue(5.0 + LEASE_S - 0.1) == []
    assert side.leases.overdue(5.0 + LEASE_S + 0.1) == [A]
    for renews in ("grant", "resend"):
        side = Side().committed() if renews == "resend" else Side()
        if renews == "grant":
            side.finish(3.0)
            side.accept(now_s=7.0)
        else:
            side.handoff.resend(Resend(GRANT.handoff, 1, (1,)), 7.0)
        assert side.leases.overdue(7.0 + LEASE_S - 0.1) == [], renews


def test_a_receiver_that_notices_nothing_by_itself_is_told_what_was_pushed() -> None:
    report = PushReport(A, [Move(0, 51, 3, 5), Move(1, 52, 7, 6)], (1, 2), "")
    side = Side()
    assert side.handoff.pushed(report) is None, "it is not known who that is"
    side.accept()
    assert side.handoff.pushed(report) == Pushed(GRANT.handoff, (0, 1))
    side.sender.is_silent = False
    assert side.handoff.pushed(report) is None
    side = Side(checksum=NONE)
    side.accept()
    assert side.handoff.pushed(report) is None, "nobody verifies"


def test_who_uses_a_prefix_as_it_comes_is_told_what_was_pushed_and_its_checksums() -> None:
    report = PushReport(A, [Move(0, 51, 3, 5), Move(1, 52, 7, 6)], (1, 2), "")
    for is_silent in (True, False):
        side = Side()
        side.sender.is_silent = is_silent
        side.handoff.finish(FinishHandoff(A, TABLE, (), 2.5), 3.0)
        side.accept()
        assert side.handoff.pushed(report) == Pushed(GRANT.handoff, (0, 1), (1, 2))


def test_a_prefix_is_pushed_in_jobs_of_a_few_megabytes_each_of_which_can_be_used() -> None:
    layout = KvLayout.of_layers("float32", 4, [LayerKv(num_kv_heads=64, head_dim=512)])  # blocks of 1 MiB
    blocks = tuple(range(10))
    side = Side(layout=layout, num_tokens=40)
    side.handoff.finish(FinishHandoff(A, TABLE, (), 2.5), 3.0)
    side.accept(replace(GRANT, num_tokens=40, num_cached_tokens=0, block_ids=blocks, generations=blocks))
    assert [len(job.moves) for job in side.pusher.jobs] == [4, 4, 2]
