"""One handoff, from the sending side to the receiving side, over every transport."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import pytest
import zmq

from baton.kvtransfer.commands import GrantBlocks
from baton.kvtransfer.incoming_handoffs import ReceivingCounters
from baton.kvtransfer.messages import (
    SENDER_TO_RECEIVER,
    Commit,
    Grant,
    HandoffName,
    PeerHello,
    PeerRefusal,
    Release,
    Renew,
    Resend,
    Revoke,
    Revoked,
)
from baton.kvtransfer.pusher import STANDSTILL_S
from baton.kvtransfer.sending import SendingCounters
from baton.kvtransfer.transports.base import Move
from baton.wire.request_key import RequestKey
from tests.kvtransfer.loopback import Fault
from tests.kvtransfer.pair import (
    MAILBOX,
    MEMORY,
    RECEIVER_EPOCH,
    SETTINGS,
    TRANSPORTS,
    Pair,
    dead_process,
    make_decode_node,
    make_prefill_node,
    open_pair,
    receiving_facts,
    sending_facts,
)
from tests.kvtransfer.pools import BLOCK_BYTES, LEASE_S, digest_of, first_token, key_of
from tests.kvtransfer.wire import FakeDealer

KEY = key_of(1)
_NUM_TOKENS = 18  # four blocks and a half
_ALL_BLOCKS = 5


@pytest.fixture(params=TRANSPORTS)
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with open_pair(request.param) as pair:
        yield pair


@pytest.fixture(params=(MEMORY, MAILBOX))
def quick_pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A pair with a loopback transport of each kind, for tests that are not about transports."""
    with open_pair(request.param) as pair:
        yield pair


def is_delivered(pair: Pair, key: RequestKey = KEY) -> bool:
    return key in pair.decode.pool.delivered_kv


def has_pushed(pair: Pair, num_blocks: int) -> bool:
    return pair.prefill.side.counters.num_blocks == num_blocks


def assert_delivered_and_quiet(pair: Pair, key: RequestKey = KEY) -> None:
    pair.until(lambda: is_delivered(pair, key) and pair.is_quiet)
    assert pair.decode.pool.has_exactly(key)
    assert pair.decode.pool.delivered_first[key] == first_token(key)
    assert pair.decode.pool.failures == []


def assert_failed_and_quiet(pair: Pair, reason: str, key: RequestKey = KEY, *, was_granted: bool = True) -> None:
    """Assert that the handoff failed once, for this reason, that nothing was delivered and no block is held."""
    pair.until(lambda: pair.is_quiet)
    reasons = pair.decode.pool.failures_of(key)
    assert len(reasons) == 1
    assert reason in reasons[0]
    assert not is_delivered(pair, key)
    assert pair.decode.pool.released_keys == [key] * was_granted


def test_prompt_is_handed_over_in_chunks_and_every_block_is_sent_once(pair: Pair) -> None:
    pair.prefill.begin(KEY, _NUM_TOKENS)
    pair.decode.grant(KEY, _NUM_TOKENS, pair.prefill.peer)
    pair.until(lambda: pair.prefill.link.num_seen(Grant) == 1)
    for num_tokens, num_blocks in ((3, 0), (8, 2), (11, 2), (16, 4)):
        pair.prefill.advance(KEY, num_tokens)
        pair.until(partial(has_pushed, pair, num_blocks))
    assert pair.prefill.link.num_seen(Commit) == 0
    pair.prefill.finish(KEY, _NUM_TOKENS)
    assert_delivered_and_quiet(pair)
    assert pair.prefill.side.counters.num_blocks == pair.decode.side.counters.num_blocks == _ALL_BLOCKS
    assert pair.prefill.side.counters.num_bytes == _ALL_BLOCKS * BLOCK_BYTES
    assert pair.prefill.link.num_seen(Release) == 1


def test_only_what_the_decode_node_lacks_is_sent(pair: Pair) -> None:
    pair.decode.grant(KEY, _NUM_TOKENS, pair.prefill.peer, num_cached_tokens=8)
    pair.prefill.begin(KEY, _NUM_TOKENS)
    pair.prefill.advance(KEY, 12)
    pair.prefill.finish(KEY, _NUM_TOKENS)
    assert_delivered_and_quiet(pair)
    assert pair.prefill.side.counters.num_blocks == 3


def test_a_prompt_that_is_cached_completely_needs_only_the_commit(pair: Pair) -> None:
    pair.decode.grant(KEY, 16, pair.prefill.peer, num_cached_tokens=16)
    pair.prefill.prefill(KEY, 16)
    assert_delivered_and_quiet(pair)
    assert pair.prefill.side.counters.num_blocks == 0


def test_a_grant_may_come_before_its_prompt(quick_pair: Pair) -> None:
    pair = quick_pair
    pair.decode.grant(KEY, _NUM_TOKENS, pair.prefill.peer)
    pair.until(lambda: pair.prefill.link.num_seen(Grant) == 1)
    pair.prefill.prefill(KEY, _NUM_TOKENS)
    assert_delivered_and_quiet(pair)


def test_a_grant_may_come_after_the_prompt_is_finished(quick_pair: Pair) -> None:
    pair = quick_pair
    pair.prefill.prefill(KEY, _NUM_TOKENS)
    pair.pass_time(2)
    pair.decode.grant(KEY, _NUM_TOKENS, pair.prefill.peer)
    assert_delivered_and_quiet(pair)


def test_a_duplicate_grant_changes_nothing(quick_pair: Pair) -> None:
    pair = quick_pair
    pair.prefill.begin(KEY, _NUM_TOKENS)
    pair.decode.grant(KEY, _NUM_TOKENS, pair.prefill.peer)
    pair.until(lambda: pair.prefill.link.num_seen(Grant) == 1)
    (grant,) = [message for message in pair.prefill.link.seen if isinstance(message, Grant)]
    pair.decode.say(grant)
    pair.prefill.finish(KEY, _NUM_TOKENS)
    assert_delivered_and_quiet(pair)
    assert pair.prefill.side.counters.num_blocks == _ALL_BLOCKS


def test_a_request_that_ends_with_token_1_does_not_fail(pair: Pair) -> None:
    pair.decode.grant(KEY, _NUM_TOKENS, pair.prefill.peer)
    pair.prefill.begin(KEY, _NUM_TOKENS)
    pair.prefill.advance(KEY, 8)
    pair.prefill.cancel(KEY, "token 1 ended the request", request_ended=True)
    pair.until(lambda: pair.is_quiet)
    assert pair.decode.pool.failures == []
    assert pair.decode.pool.released_keys == [KEY]


def test_a_grant_after_token_1_ended_the_request_does_not_fail_it(quick_pair: Pair) -> None:
    pair = quick_pair
    pair.prefill.begin(KEY, _NUM_TOKENS)
    pair.prefill.cancel(KEY, "token 1 ended the request", request_ended=True)
    pair.decode.grant(KEY, _NUM_TOKENS, pair.prefill.peer)
    pair.until(lambda: pair.is_quiet)
    assert pair.decode.pool.failures == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prompt_digest": bytes(16)}, "for another prompt"),
        ({"num_tokens": 17}, "for another prompt"),
        ({"num_cached_tokens": 4}, "4 are needed"),
        ({"num_cached_tokens": 3}, "must be whole blocks"),
        ({"block_ids": (0, 1, 2, 3, 3)}, "5 are needed"),
        ({"block_ids": (0, 1, 2, 3)}, "5 are needed"),
        ({"generations": (1, 1, 1, 1)}, "5 are needed"),
    ],
    ids=str,
)
def test_a_grant_that_does_not_fit_is_refused(quick_pair: Pair, change: dict[str, Any], reason: str) -> None:
    pair = quick_pair
    pair.prefill.prefill(KEY, _NUM_TOKENS)
    incoming = replace(pair.decode.pool.reserve(KEY, _NUM_TOKENS, 0), **change)
    pair.decode.side.do(GrantBlocks(incoming, pair.prefill.peer), pair.now_s)
    pair.until(lambda: not pair.decode.side.handoffs)
    assert reason in pair.decode.pool.failures_of(KEY)[0]
    assert pair.prefill.side.counters.num_blocks == 0
    pair.pass_time(LEASE_S + 2)
    assert pair.is_quiet


def test_only_the_decode_node_that_the_router_named_gets_the_kv(quick_pair: Pair) -> None:
    pair = quick_pair
    pair.prefill.begin(KEY, _NUM_TOKENS, decode_epoch=RECEIVER_EPOCH + 1)
    pair.decode.grant(KEY, _NUM_TOKENS, pair.prefill.peer)
    pair.until(lambda: bool(pair.decode.pool.failures))
    (reason,) = pair.decode.pool.failures_of(KEY)
    assert "belongs to another decode node" in reason or "the handoff has ended" in reason
    pair.prefill.finish(KEY, _NUM_TOKENS)
    pair.settle()
    assert pair.prefill.side.counters.num_blocks == 0
    assert pair.prefill.link.num_seen(Commit) == 0


def test_a_stranger_can_neither_release_nor_revoke_nor_renew(quick_pair: Pair) -> None:
    pair = quick_pair
    pair.prefill.begin(KEY, _NUM_TOKENS, decode_epoch=RECEIVER_EPOCH + 1)
    pair.decode.grant(key_of(2), 4, pair.prefill.peer)
    pair.until(lambda: pair.prefill.link.num_seen(Grant) == 1)
    for message in (Release(HandoffName(*KEY)), Revoke(HandoffName(*KEY)), Renew((HandoffName(*KEY),))):
        pair.decode.say(message)
    pair.until(lambda: pair.prefill.link.num_seen(Renew) >= 1)
    assert len(pair.prefill.side.handoffs) == 1


# --- damaged or wrong blocks -----------------------------------------------------------------------------------------


def fault_on_first(fault: Fault) -> Callable[[int, RequestKey, Move], Fault]:
    return lambda number, key, move: fault if number == 0 else Fault()


def fault_on_index_0(fault: Fault) -> Callable[[int, RequestKey, Move], Fault]:
    return lambda number, key, move: fault if move.index == 0 and key == KEY else Fault()


@pytest.mark.parametrize("transport", [MEMORY, MAILBOX])
@pytest.mark.parametrize("bit", [0, 777, 1023])
def test_a_block_that_arrives_damaged_is_sent_again_once(transport: str, bit: int) -> None:
    with open_pair(transport, plan=fault_on_first(Fault(flipped_bits=(bit,)))) as pair:
        pair.prefill.prefill(KEY, _NUM_TOKENS)
        pair.decode.grant(KEY, _NUM_TOKENS, pair.prefill.peer)
        assert_delivered_and_quiet(pair)
        received, sent = pair.decode.side.counters, pair.prefill.side.counters
        assert (received.num_damaged_blocks, received.num_resends, sent.num_resent_blocks) == (1, 1, 1)
        assert sent.num_blocks == _ALL_BLOCKS + 1


@pytest.mark.parametrize("transport", [MEMORY, MAILBOX])
def test_a_block_that_is_damaged_twice_is_never_delivered(transport: str) -> None:
    with open_pair(transport, plan=fault_on_index_0(Fault(flipped_bits=(777,)))) as pair:
        pair.prefill.prefill(KEY, _NUM_TOKENS)
        pair.decode.grant(KEY, _NUM_TOKENS, pair.prefill.peer)
        assert_failed_and_quiet(pair, "1 of 5 blocks arrived damaged, twice")
        assert pair.prefill.link.num_seen(Resend) == 1
        assert pair.prefill.link.num_seen(Revoke) >= 1
        # both pools are intact: the next attempt succeeds
        again = key_of(1, attempt=2)
        pair.prefill.prefill(again, _NUM_TOKENS)
        pair.decode.grant(again, _NUM_TOKENS, pair.prefill.peer)
        pair.until(lambda: is_delivered(pair, again) and pair.is_quiet)
        assert pair.decode.pool.has_exactly(again)


@pytest.mark.parametrize("lost", [Resend, Commit], ids=lambda kind: str(kind.__name__))
def test_a_resend_without_an_answer_lets_the_lease_expire(lost: type[Any]) -> None:
    with open_pair(MEMORY, plan=fault_on_first(Fault(flipped_bits=(5,)))) as pair:
        num_commits = itertools.count()
        pair.prefill.link.is_lost = lambda message: (
            isinstance(message, lost) and (lost is Resend or next(num_commits) == 1)
        )
        pair.prefill.prefill(KEY, _NUM_TOKENS)
        pair.decode.grant(KEY, _NUM_TOKENS, pair.prefill.peer)
        pair.until(lambda: pair.decode.side.counters.num_resends == 1)
        pair.pass_time(2 * LEASE_S)
        assert_failed_and_quiet(pair, "renewing")


@pytest.mark.parametrize("transport", [MEMORY, MAILBOX])
def test_duplicate_commits_and_resends_change_nothing(transport: str) -> None:
    with open_pair(transport, plan=fault_on_first(Fault(flipped_bits=(5,)))) as pair:
        pair.wire.rewrite = lambda message: [message] * (2 if isinstance(message, Commit | Resend) else 1)
        pair.prefill.prefill(KEY, _NUM_TOKENS)
        pair.decode.grant(KEY, _NUM_TOKENS, pair.prefill.peer)
        assert_delivered_and_quiet(pair)
        assert pair.decode.side.counters.num_resends == 1


def test_the_exposed_time_of_a_handoff_is_measured() -> None:
    with open_pair(MEMORY) as pair:
        pair.decode.grant(KEY, _NUM_TOKENS, pair.prefill.peer)
        pair.prefill.begin(KEY, _NUM_TOKENS)
        pair.until(lambda: pair.prefill.link.num_seen(Grant) == 1)
        pair.pass_time(3)
        pair.prefill.finish(KEY, _NUM_TOKENS, computed_s=pair.now_s - 0.5)
        assert_delivered_and_quiet(pair)
        figures = pair.decode.pool.figures[KEY]
        assert (figures.num_blocks, figures.num_bytes) == (_ALL_BLOCKS, _ALL_BLOCKS * BLOCK_BYTES)
        assert (figures.transfer_us, figures.exposed_us) == (3_250_000, 750_000)


def test_the_time_from_the_commit_to_the_last_block_is_exposed() -> None:
    with open_pair(MAILBOX, plan=lambda number, key, move: Fault(delay=1000)) as pair:
        pair.decode.grant(KEY, _NUM_TOKENS, pair.prefill.peer)
        pair.prefill.prefill(KEY, _NUM_TOKENS)
        pair.until(lambda: pair.prefill.link.num_seen(Commit) == 1)
        committed_s = pair.now_s
        while not is_delivered(pair):
            assert pair.now_s < LEASE_S
            pair.now_s += 0.005
            pair.poll()
        exposed_s = pair.decode.pool.figures[KEY].exposed_us / 1e6
        assert exposed_s == pytest.approx(pair.now_s - committed_s, abs=0.3)
        assert exposed_s > 1.0


@pytest.mark.parametrize("fault", [Fault(num_cut_bytes=1), Fault(num_copies=0)], ids=str)
def test_blocks_that_never_arrive_let_the_lease_expire(fault: Fault) -> None:
    with open_pair(MAILBOX, plan=fault_on_first(fault)) as pair:
        pair.prefill.prefill(KEY, _NUM_TOKENS)
        pair.decode.grant(KEY, _NUM_TOKENS, pair.prefill.peer)
        pair.until(lambda: pair.prefill.link.num_seen(Commit) == 1)
        pair.pass_time(LEASE_S + 2)
        assert_failed_and_quiet(pair, "stopped renewing")


def test_blocks_that_trickle_in_after_the_commit_keep_the_lease_alive() -> None:
    def one_by_one(number: int, key: RequestKey, move: Move) -> Fault:
        return Fault(delay=1000 * (number + 1))

    with open_pair(MAILBOX, plan=one_by_one) as pair:
        pair.decode.grant(KEY, _NUM_TOKENS, pair.prefill.peer)
        pair.prefill.prefill(KEY, _NUM_TOKENS)
        pair.until(lambda: pair.prefill.link.num_seen(Commit) == 1)
        while not is_delivered(pair) and pair.now_s < 4 * LEASE_S:
            pair.now_s += 0.005
            pair.poll()
        assert pair.now_s > 1.5 * LEASE_S
        assert pair.decode.pool.has_exactly(KEY)


def swap_first_two(numbers: tuple[int, ...]) -> tuple[int, ...]:
    return (numbers[1], numbers[0], *numbers[2:])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda commit: replace(commit, checksums=swap_first_two(commit.checksums)),
            "2 of 5 blocks arrived damaged, twice",
        ),
        (lambda commit: replace(commit, checksums=commit.checksums[:-1]), "other blocks than the grant"),
        (lambda commit: replace(commit, generations=(9, *commit.generations[1:])), "other blocks than the grant"),
        (lambda commit: replace(commit, num_tokens=17), "covers 17 tokens, the grant 18"),
        (lambda commit: replace(commit, prompt_digest=digest_of(key_of(9))), "for another prompt"),
        (lambda commit: replace(commit, firsts=(first_token(key_of(9)),)), "one first token of each choice"),
        (lambda commit: replace(commit, firsts=(first_token(key_of(1, attempt=2)),)), "one first token"),
        (lambda commit: replace(commit, firsts=()), "one first token of each choice"),
        (lambda commit: replace(commit, firsts=(*commit.firsts, first_token(key_of(9)))), "one first token"),
        (lambda commit: replace(commit, firsts=(replace(commit.firsts[0], token_ids=()),)), "one first token"),
    ],
)
def test_a_commit_that_does_not_fit_the_grant_fails(
    quick_pair: Pair, change: Callable[[Commit], Commit], reason: str
) -> None:
    pair = quick_pair
    rewrite_commits(pair, change)
    pair.decode.grant(KEY, _NUM_TOKENS, pair.prefill.peer)
    pair.prefill.prefill(KEY, _NUM_TOKENS)
    assert_failed_and_quiet(pair, reason)


def rewrite_commits(pair: Pair, change: Callable[[Commit], Commit]) -> None:
    pair.wire.rewrite = lambda message: [change(message) if isinstance(message, Commit) else message]


# --- either side cancels ----------------------------------------------------------------------------------------------

_PHASES = ("before the grant arrives", "granted", "half pushed", "commit in flight")


def bring_to(pair: Pair, phase: str) -> None:
    """Bring a handoff into this phase."""
    pair.prefill.begin(KEY, _NUM_TOKENS)
    pair.decode.grant(KEY, _NUM_TOKENS, pair.prefill.peer)
    if phase == "before the grant arrives":
        return
    pair.until(lambda: pair.prefill.link.num_seen(Grant) == 1)
    if phase == "granted":
        return
    pair.prefill.advance(KEY, 8)
    pair.until(lambda: pair.prefill.side.counters.num_blocks == 2)
    if phase == "half pushed":
        return
    pair.prefill.link.lose(Commit)
    pair.prefill.finish(KEY, _NUM_TOKENS)
    pair.until(lambda: pair.prefill.side.counters.num_blocks == _ALL_BLOCKS)
    pair.prefill.link.lose()


@pytest.mark.parametrize("phase", _PHASES)
def test_the_decode_node_cancels_in_every_phase(pair: Pair, phase: str) -> None:
    bring_to(pair, phase)
    pair.decode.cancel(KEY)
    pair.decode.cancel(KEY)
    if phase == "before the grant arrives":
        pair.prefill.cancel(KEY, "cancelled")
    pair.until(lambda: pair.is_quiet)
    assert pair.decode.pool.failures == []
    assert pair.decode.pool.released_keys == [KEY]
    assert not is_delivered(pair)


@pytest.mark.parametrize("phase", _PHASES)
def test_the_prefill_node_cancels_in_every_phase(pair: Pair, phase: str) -> None:
    bring_to(pair, phase)
    pair.prefill.cancel(KEY, "cancelled")
    pair.prefill.cancel(KEY, "cancelled again")
    assert pair.prefill.side.counters.num_cancelled == 1
    # a later question is answered: the handoff has ended
    reason = "the handoff has ended" if phase == "before the grant arrives" else "cancelled"
    assert_failed_and_quiet(pair, f"ended by the prefill node: {reason}")


def test_an_ended_handoff_cannot_begin_again(quick_pair: Pair) -> None:
    pair = quick_pair
    bring_to(pair, "granted")
    pair.decode.cancel(KEY)
    pair.until(lambda: pair.is_quiet)
    pair.prefill.begin(KEY, _NUM_TOKENS)
    assert [(key, "has ended" in reason) for key, reason in pair.prefill.pool.refusals] == [(KEY, True)]
    assert pair.is_quiet


def test_blocks_that_only_the_decode_node_writes_are_released_at_once() -> None:
    with open_pair(MAILBOX) as pair:
        bring_to(pair, "half pushed")
        pair.decode.cancel(KEY)
        assert pair.decode.pool.released_keys == [KEY]
        assert pair.decode.pool.pool.num_held == 0


def test_the_engine_has_the_blocks_before_the_prefill_node_is_told(quick_pair: Pair) -> None:
    pair = quick_pair
    had_blocks: list[bool] = []

    def look(message: object) -> list[object]:
        had_blocks.extend([is_delivered(pair)] * isinstance(message, Release))
        return [message]

    pair.wire.rewrite = look
    pair.decode.grant(KEY, _NUM_TOKENS, pair.prefill.peer)
    pair.prefill.prefill(KEY, _NUM_TOKENS)
    assert_delivered_and_quiet(pair)
    assert had_blocks == [True]


def test_another_hello_voids_the_earlier_grants_of_a_receiver() -> None:
    with open_pair(MEMORY) as pair:
        bring_to(pair, "granted")
        (hello,) = [message for message in pair.prefill.link.seen if isinstance(message, PeerHello)]
        pair.decode.say(hello)
        pair.settle()
        assert_failed_and_quiet(pair, "said hello again")
        assert pair.prefill.side.counters.num_blocks == 0


def test_blocks_that_stay_in_flight_close_the_transport_of_the_receiver() -> None:
    with open_pair(MEMORY, plan=lambda number, key, move: Fault(delay=10**6)) as pair:
        pair.prefill.prefill(KEY, _NUM_TOKENS)
        pair.decode.grant(KEY, _NUM_TOKENS, pair.prefill.peer)
        pair.until(lambda: pair.prefill.side.counters.num_blocks == _ALL_BLOCKS)
        pair.prefill.cancel(KEY)
        pair.pass_time(STANDSTILL_S - 1)
        assert pair.prefill.pool.pool.num_held == _ALL_BLOCKS
        pair.pass_time(3)
        assert pair.prefill.pool.pool.num_held == 0
        assert pair.prefill.link.num_seen(PeerRefusal) == 1


def test_a_prefill_node_can_only_affect_its_own_handoffs() -> None:
    with open_pair(MAILBOX) as pair:
        bring_to(pair, "granted")
        pair.decode.wait_for_room(key_of(2), replace(pair.prefill.peer, node_id="another"))
        stranger = list(pair.prefill.router.dealers)[-1]
        revoked = SENDER_TO_RECEIVER.encode(Revoked(HandoffName(*KEY), "lies", request_ended=False))
        pair.prefill.router.send_multipart([stranger, revoked], 0)
        pair.decode.poll(pair.now_s)
        assert pair.decode.pool.failures == []
        assert KEY in pair.decode.pool.held


# --- messages and nodes are lost -------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", [MEMORY, MAILBOX])
@pytest.mark.parametrize("lost", [Grant, Renew], ids=lambda kind: str(kind.__name__))
def test_after_a_lost_message_both_leases_expire(transport: str, lost: type[Any]) -> None:
    with open_pair(transport) as pair:
        pair.prefill.link.lose(lost)
        pair.prefill.begin(KEY, _NUM_TOKENS)
        pair.decode.grant(KEY, _NUM_TOKENS, pair.prefill.peer)
        pair.settle()
        pair.prefill.advance(KEY, 8)
        pair.settle()
        if lost is not Renew:
            pair.prefill.finish(KEY, _NUM_TOKENS)
        pair.pass_time(3 * LEASE_S)
        pair.until(lambda: pair.is_quiet)
        assert not is_delivered(pair)


def test_a_lost_revoked_is_repeated_when_the_other_side_renews(quick_pair: Pair) -> None:
    pair = quick_pair
    bring_to(pair, "half pushed")
    pair.prefill.link.lose(Revoked)
    pair.prefill.cancel(KEY, "cancelled")
    pair.settle()
    pair.prefill.link.lose()
    pair.pass_time(LEASE_S / 2)
    assert_failed_and_quiet(pair, "the handoff has ended")


def test_a_handoff_that_waits_for_room_learns_that_the_prefill_node_cancelled(quick_pair: Pair) -> None:
    pair = quick_pair
    pair.decode.wait_for_room(KEY, pair.prefill.peer)
    pair.prefill.prefill(KEY, _NUM_TOKENS)
    pair.prefill.cancel(KEY, "cancelled")
    pair.pass_time(LEASE_S)
    assert_failed_and_quiet(pair, "the handoff has ended", was_granted=False)


def test_blocks_for_a_vanished_decode_node_are_released_when_the_lease_expires(quick_pair: Pair) -> None:
    pair = quick_pair
    bring_to(pair, "half pushed")
    pair.prefill.finish(KEY, _NUM_TOKENS)
    pair.prefill.link.lose(Release)
    pair.decode.side.close()
    for _ in range(round(LEASE_S) + 2):
        pair.now_s += 1.0
        pair.settle_prefill()
    assert len(pair.prefill.side.handoffs) == 0
    assert pair.prefill.pool.pool.num_held == 0
    assert len(pair.prefill.side.connections) == 0


def test_a_dead_prefill_process_is_fenced() -> None:
    with open_pair(MEMORY, sender=replace(sending_facts(), process=dead_process())) as pair:
        bring_to(pair, "half pushed")
        pair.prefill.link.lose(Grant, Release, Renew, Revoke, Revoked)
        pair.pass_time(LEASE_S + 3)
        assert pair.decode.pool.pool.num_held == 0
        assert len(pair.decode.pool.failures_of(KEY)) == 1


def test_a_prefill_node_restarted_at_the_same_address_is_refused(quick_pair: Pair) -> None:
    pair = quick_pair
    bring_to(pair, "granted")
    old_peer = pair.prefill.peer
    pair.prefill.close()
    facts = replace(sending_facts(), epoch=sending_facts().epoch + 1)
    pair.prefill = make_prefill_node(pair.wire, pair.network, pair.transport, facts=facts)
    # the old connection now reaches another life of the node
    for _ in range(40):
        pair.now_s += LEASE_S / 30
        pair.settle()
    assert len(pair.decode.pool.failures_of(KEY)) == 1
    # a handoff that names the old epoch fails, over a new connection or over the old one
    pair.decode.grant(key_of(2), 4, old_peer)
    pair.until(lambda: bool(pair.decode.pool.failures_of(key_of(2))))
    (reason,) = pair.decode.pool.failures_of(key_of(2))
    assert "has restarted" in reason or "the first message must be PeerHello" in reason
    # the new life serves requests
    pair.prefill.prefill(key_of(3), _NUM_TOKENS)
    pair.decode.grant(key_of(3), _NUM_TOKENS, pair.prefill.peer)
    pair.until(lambda: is_delivered(pair, key_of(3)))
    assert pair.decode.pool.has_exactly(key_of(3))


def test_a_new_life_of_the_decode_node_gets_no_handoff_of_the_old_one(quick_pair: Pair) -> None:
    pair = quick_pair
    bring_to(pair, "half pushed")
    pair.decode.close()
    facts = replace(receiving_facts(), epoch=RECEIVER_EPOCH + 1)
    pair.decode = make_decode_node(pair.context, pair.network, pair.transport, facts=facts)
    pair.decode.grant(KEY, _NUM_TOKENS, pair.prefill.peer)
    pair.prefill.finish(KEY, _NUM_TOKENS)
    pair.until(lambda: bool(pair.decode.pool.failures))
    (reason,) = pair.decode.pool.failures_of(KEY)
    assert "belongs to another decode node" in reason or "the handoff has ended" in reason
    pair.pass_time(LEASE_S + 5)
    assert pair.is_quiet
    assert len(pair.prefill.side.connections) == 1


def test_a_failed_push_cancels_every_handoff_of_the_same_transport() -> None:
    with open_pair(MAILBOX, plan=fault_on_first(Fault(refusal="cable cut"))) as pair:
        for number in (1, 2):
            pair.prefill.begin(key_of(number), 8)
            pair.decode.grant(key_of(number), 8, pair.prefill.peer)
        pair.until(lambda: pair.prefill.link.num_seen(Grant) == 2)
        pair.prefill.advance(KEY, 8)
        pair.until(lambda: pair.is_quiet)
        for number in (1, 2):
            assert "cable cut" in pair.decode.pool.failures_of(key_of(number))[0]
        assert pair.prefill.link.num_seen(PeerRefusal) == 1
        assert len(pair.prefill.side.connections) == 0


def test_a_handoff_that_is_cancelled_counts_once(quick_pair: Pair) -> None:
    counters = quick_pair.prefill.side.counters
    quick_pair.prefill.begin(KEY, _NUM_TOKENS)
    for _ in range(2):
        quick_pair.prefill.cancel(KEY)
        assert counters.num_cancelled == 1


def test_counts_begin_at_zero() -> None:
    for counters in (SendingCounters(), ReceivingCounters()):
        assert set(asdict(counters).values()) == {0}


def test_each_side_renews_what_is_alive_three_times_a_lease() -> None:
    with open_pair(MEMORY) as pair:
        pair.decode.grant(KEY, _NUM_TOKENS, pair.prefill.peer)
        pair.prefill.begin(KEY, _NUM_TOKENS)
        pair.until(lambda: pair.prefill.link.num_seen(Grant) == 1)
        pair.settle()
        num_before = pair.prefill.link.num_seen(Renew)
        pair.pass_time(2 * LEASE_S)
        assert pair.prefill.link.num_seen(Renew) - num_before == 2 * 5  # time passes by seconds


def test_renewals_after_the_commit_do_not_extend_the_lease() -> None:
    with open_pair(MAILBOX, plan=fault_on_first(Fault(num_copies=0))) as pair:
        pair.prefill.prefill(KEY, _NUM_TOKENS)
        pair.decode.grant(KEY, _NUM_TOKENS, pair.prefill.peer)
        pair.until(lambda: pair.prefill.link.num_seen(Commit) == 1)
        for _ in range(round(LEASE_S) + 2):
            pair.prefill.say(Renew((HandoffName(*KEY),)))
            pair.pass_time(1)
        assert_failed_and_quiet(pair, "stopped renewing")


def test_a_revoke_is_answered_even_if_its_grant_was_lost() -> None:
    with open_pair(MEMORY) as pair:
        pair.prefill.link.lose(Grant)
        pair.prefill.begin(KEY, _NUM_TOKENS)
        pair.decode.grant(KEY, _NUM_TOKENS, pair.prefill.peer)
        pair.settle()
        pair.decode.cancel(KEY)
        pair.until(lambda: pair.is_quiet)
        assert pair.prefill.link.num_seen(Revoke) == 1


def test_a_grant_whose_prompt_never_comes_is_answered(quick_pair: Pair) -> None:
    pair = quick_pair
    pair.decode.grant(KEY, _NUM_TOKENS, pair.prefill.peer)
    pair.settle()
    pair.pass_time(LEASE_S + 2)
    pair.until(lambda: pair.is_quiet)
    assert len(pair.decode.pool.failures_of(KEY)) == 1
    pair.prefill.begin(KEY, _NUM_TOKENS)
    assert [(key, "exists already" in reason) for key, reason in pair.prefill.pool.refusals] == [(KEY, True)]


def test_a_connection_that_ends_while_its_grant_waits_does_no_harm(quick_pair: Pair) -> None:
    pair = quick_pair
    pair.decode.grant(KEY, _NUM_TOKENS, pair.prefill.peer)
    pair.until(lambda: pair.prefill.link.num_seen(Grant) == 1)
    pair.decode.say_bytes(b"not a message")
    pair.until(lambda: pair.prefill.side.counters.num_rejected_messages == 1)
    pair.prefill.prefill(KEY, _NUM_TOKENS)
    pair.pass_time(LEASE_S + 2)
    assert pair.is_quiet
    assert len(pair.decode.pool.failures_of(KEY)) == 1


def test_an_address_that_cannot_be_dialled_is_refused_and_forgotten(quick_pair: Pair) -> None:
    pair = quick_pair
    for address in ("nonsense", "tcp://a b:5"):
        peer = replace(pair.prefill.peer, address=address, node_id=address)
        pair.decode.wait_for_room(KEY, peer)
        pair.decode.grant(key_of(2), 4, peer)
    assert len(pair.decode.pool.failures_of(KEY)) == len(pair.decode.pool.failures_of(key_of(2))) == 2
    assert all("address" in reason or "cannot be reached" in reason for _, reason in pair.decode.pool.failures)
    assert pair.is_quiet
    assert SETTINGS.cluster_key is None


def test_without_room_for_a_socket_a_handoff_fails_and_the_thread_lives(
    quick_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    pair = quick_pair
    with monkeypatch.context() as patch:
        patch.setattr(FakeDealer, "get_monitor_socket", refuse)
        pair.decode.grant(KEY, _NUM_TOKENS, replace(pair.prefill.peer, node_id="another", epoch=99))
    assert any("no socket for another prefill node" in reason for _, reason in pair.decode.pool.failures)
    assert pair.is_quiet
