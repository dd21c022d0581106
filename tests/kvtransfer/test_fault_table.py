"""The rows of the fault table that belong to the handoff, F14 to F22, each test named after its row.

A row passes when no wrong KV is delivered, every handoff ends once, and every block of both pools is free afterwards.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from baton.kvtransfer.commands import GrantBlocks
from baton.kvtransfer.incoming import FENCE_AFTER_S
from baton.kvtransfer.messages import Commit, Grant, HandoffName, Pushed, Release, Renew, Resend, Revoke, Revoked
from baton.kvtransfer.transports.base import Move
from baton.wire.messages.legs import PrefillPeer
from baton.wire.request_key import RequestKey
from tests.kvtransfer.loopback import Fault
from tests.kvtransfer.pair import MAILBOX, MEMORY, TRANSPORTS, Pair, open_pair, receiving_facts, sending_facts
from tests.kvtransfer.pools import BLOCK_BYTES, FREE_BYTE, LEASE_S, first_token, key_of
from tests.kvtransfer.proof import BLOCK_BITS, count_alarms, count_flips
from tests.kvtransfer.wire import TRANSIT_S
from tests.kvtransfer.world import LAYER_ENDS, NUM_LAYERS, Kind, World, patches

KEY = key_of(1)
_NUM_TOKENS = 18  # four blocks and a half
_ALL_BLOCKS = 5


def assert_delivered(pair: Pair, *keys: RequestKey) -> None:
    """These have arrived as they are, and everything is over."""
    pair.until(lambda: pair.is_quiet)
    for key in keys:
        assert pair.decode.pool.has_exactly(key)
        assert pair.decode.pool.failures_of(key) == []


def assert_failed(pair: Pair, *keys: RequestKey, reason: str = "") -> None:
    """These have failed once each, and were not delivered."""
    for key in keys:
        (found,) = pair.decode.pool.failures_of(key)
        assert reason in found
        assert key not in pair.decode.pool.delivered_kv


def assert_next_attempt_works(pair: Pair, key: RequestKey = KEY) -> None:
    again = key._replace(attempt=key.attempt + 1)
    pair.decode.grant(again, _NUM_TOKENS, pair.prefill.peer)
    pair.prefill.prefill(again, _NUM_TOKENS)
    assert_delivered(pair, again)


def hand_over_one(pair: Pair, key: RequestKey = KEY) -> None:
    pair.decode.grant(key, _NUM_TOKENS, pair.prefill.peer)
    pair.prefill.prefill(key, _NUM_TOKENS)


def until_ended(pair: Pair, *keys: RequestKey) -> None:
    """Rounds, and time if nothing else helps, until the decode node has heard the end of these."""
    pool = pair.decode.pool
    for _ in range(40):
        pair.settle()
        if all(key in pool.delivered_kv or pool.failures_of(key) for key in keys) and pair.is_quiet:
            return
        pair.pass_time(1)


# --- F14: a byte flipped on its way ----------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", [MEMORY, MAILBOX])
def test_f14_every_flipped_bit_is_found_wherever_it_is(transport: str) -> None:
    figures, flipper = count_flips(transport, BLOCK_BITS)
    assert figures.num_found == figures.num_flips == BLOCK_BITS
    assert figures.num_wrong == 0
    assert flipper.positions == set(range(BLOCK_BITS))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_f14_clean_blocks_raise_no_alarm(transport: str) -> None:
    figures = count_alarms(transport, 1000)
    assert (figures.num_found, figures.num_wrong) == (0, 0)


def test_f14_a_bit_that_flips_in_the_pool_before_it_is_verified_is_found() -> None:
    with open_pair(MEMORY) as pair:
        pair.decode.grant(KEY, _NUM_TOKENS, pair.prefill.peer)
        pair.prefill.begin(KEY, _NUM_TOKENS)
        pair.until(lambda: pair.prefill.link.num_seen(Grant) == 1)
        pair.prefill.finish(KEY, _NUM_TOKENS)
        pair.prefill.poll(0.0)
        pair.decode.pool.blocks[pair.decode.pool.waiting[KEY].block_ids[3], 7] ^= 0x10
        assert_delivered(pair, KEY)
        assert pair.decode.side.counters.num_damaged_blocks == 1


# --- F15: cut, reordered, doubled, missing ---------------------------------------------------------------------------

_FAULTS_ON_THE_WAY = {
    "cut by a byte": Fault(num_cut_bytes=1),
    "cut to nothing": Fault(num_cut_bytes=BLOCK_BYTES),
    "missing": Fault(num_copies=0),
    "doubled": Fault(num_copies=2),
    "overtaken": Fault(delay=3),
}


@pytest.mark.parametrize("fault", _FAULTS_ON_THE_WAY)
@pytest.mark.parametrize("transport", [MEMORY, MAILBOX])
def test_f15_a_block_that_does_not_come_as_it_was_sent_is_never_taken(transport: str, fault: str) -> None:
    for number_of_block in range(_ALL_BLOCKS):

        def plan(number: int, key: RequestKey, move: Move, faulty: int = number_of_block) -> Fault:
            return _FAULTS_ON_THE_WAY[fault] if number == faulty else Fault()

        with open_pair(transport, plan=plan) as pair:
            hand_over_one(pair)
            until_ended(pair, KEY)
            if transport == MAILBOX and fault in ("cut by a byte", "cut to nothing", "missing"):
                assert_failed(pair, KEY)
                assert_next_attempt_works(pair)
            else:
                assert_delivered(pair, KEY)


# --- F16: the right checksum of the wrong request --------------------------------------------------------------------


def named(own: Commit, other: Commit) -> Commit:
    """The other's commit under this one's name."""
    return replace(other, handoff=own.handoff)


def named_with_digest(own: Commit, other: Commit) -> Commit:
    return replace(named(own, other), prompt_digest=own.prompt_digest)


def named_with_blocks(own: Commit, other: Commit) -> Commit:
    return replace(named_with_digest(own, other), generations=own.generations)


def named_in_full(own: Commit, other: Commit) -> Commit:
    """All of it is this one's, but the checksums."""
    return replace(own, checksums=other.checksums)


class Swapper:
    """Sends the commits of each two handoffs as `mix` says: this one's name, the other's content."""

    def __init__(self, pair: Pair, mix: Callable[[Commit, Commit], Commit]) -> None:
        self._mix = mix
        self._waiting: dict[int, Commit] = {}
        pair.wire.rewrite = self.rewrite

    def rewrite(self, message: object) -> Sequence[object]:
        if not isinstance(message, Commit):
            return [message]
        couple = int.from_bytes(message.handoff.handoff_id, "big") // 2
        if couple not in self._waiting:
            self._waiting[couple] = message
            return []
        other = self._waiting.pop(couple)
        return [self._mix(message, other), self._mix(other, message)]


@pytest.mark.parametrize(
    ("mix", "reason"),
    [
        (named, "the commit is for another prompt"),
        (named_with_digest, "the commit names other blocks than the grant"),
        (named_with_blocks, "the commit does not carry one first token of each choice"),
        (named_in_full, "damaged, twice"),
    ],
    ids=["name", "and digest", "and blocks", "all but checksums"],
)
def test_f16_commits_of_the_wrong_request_are_refused(mix: Callable[[Commit, Commit], Commit], reason: str) -> None:
    num_pairs, num_rounds = 20, 1
    with open_pair(MEMORY, num_blocks=4 * num_pairs) as pair:
        # blocks have been used a different number of times, as they have in any pool that is not new
        for count in (1, 3, 40):
            pair.decode.pool.pool.release(pair.decode.pool.pool.allocate(count))
        Swapper(pair, mix)
        for number_of_round in range(num_rounds):
            first = 2 * num_pairs * number_of_round
            keys = [key_of(number) for number in range(first, first + 2 * num_pairs)]
            for key in keys:
                pair.decode.grant(key, 8, pair.prefill.peer)
                pair.prefill.prefill(key, 8)
            pair.until(lambda: pair.is_quiet)
            if mix is named_with_digest:
                refused = [key for key in keys if pair.decode.pool.failures_of(key)]
                keys = refused  # two grants whose blocks were used equally often differ in something else
                assert refused
            assert_failed(pair, *keys)
        reasons = [found for _, found in pair.decode.pool.failures]
        assert len(reasons) == 2 * num_pairs * num_rounds
        assert pair.decode.pool.delivered_kv == {}
        assert sum(reason in found for found in reasons) > (0 if mix is named_with_digest else len(reasons) - 1)


# --- F17: blocks freed and used again before they were read ----------------------------------------------------------

_SHORT_LEASE_S = 0.05
_NUM_VICTIMS = 12


def short_leases(transport: str, plan: Callable[[int, RequestKey, Move], Fault]) -> Any:
    return open_pair(
        transport,
        plan=plan,
        sender=replace(sending_facts(), lease_s=_SHORT_LEASE_S),
        receiver=replace(receiving_facts(), lease_s=_SHORT_LEASE_S),
        num_blocks=2 * _NUM_VICTIMS,
    )


def let_leases_end(pair: Pair) -> None:
    for _ in range(3):
        pair.now_s += _SHORT_LEASE_S
        pair.settle()


def churn(pair: Pair, release: Callable[[], None]) -> list[RequestKey]:
    """Victims whose blocks are all used again, by others, when what was sent for them arrives."""
    victims = [key_of(number) for number in range(1, _NUM_VICTIMS + 1)]
    others = [key_of(number) for number in range(101, _NUM_VICTIMS + 101)]
    for key in victims:
        pair.decode.grant(key, 8, pair.prefill.peer)
        pair.prefill.prefill(key, 8)
    pair.until(lambda: pair.prefill.side.counters.num_blocks == 2 * _NUM_VICTIMS)
    pair.settle()
    used = {block_id for key in victims for block_id in pair.decode.pool.held[key]}
    let_leases_end(pair)
    assert_failed(pair, *victims)
    for key in others:
        pair.decode.grant(key, 8, pair.prefill.peer)
    assert {block_id for key in others for block_id in pair.decode.pool.held[key]} == used
    pair.settle()
    release()
    pair.settle()
    assert (pair.decode.pool.blocks == FREE_BYTE).all(), "what was sent for others was written"
    for key in others:
        pair.prefill.prefill(key, 8)
    assert_delivered(pair, *others)
    return victims


def test_f17_blocks_that_come_after_their_lease_do_not_touch_those_who_have_the_memory_now() -> None:
    is_late = True

    def plan(number: int, key: RequestKey, move: Move) -> Fault:
        return Fault(delay=10**6) if is_late else Fault()

    with short_leases(MAILBOX, plan) as pair:
        receiver = pair.decode.receivers[0]

        def release() -> None:
            nonlocal is_late
            is_late = False
            pair.network._delayed = [(0, parcel) for _, parcel in pair.network._delayed]

        victims = churn(pair, release)
        assert receiver.num_refused == 2 * len(victims)


# --- F18: the five rows of vLLM #52234 -------------------------------------------------------------------------------


@pytest.fixture(params=[MEMORY, MAILBOX])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def say_to_prefill(pair: Pair, message: object) -> None:
    pair.decode.say(message)
    pair.settle()


def say_to_decode(pair: Pair, message: object) -> None:
    pair.prefill.say(message)
    pair.settle()


def messages_of(pair: Pair, kind: type[Any]) -> list[Any]:
    return [message for message in pair.prefill.link.seen if isinstance(message, kind)]


def test_f18_a_replayed_grant_and_a_replayed_commit_do_nothing(transport: str) -> None:
    with open_pair(transport) as pair:
        hand_over_one(pair)
        assert_delivered(pair, KEY)
        (grant,), (commit,) = messages_of(pair, Grant), messages_of(pair, Commit)
        hand_over_one(pair, key_of(2))
        assert_delivered(pair, key_of(2))
        num_blocks = pair.prefill.side.counters.num_blocks
        say_to_prefill(pair, grant)
        assert pair.prefill.link.num_seen(Revoked) == 1
        say_to_decode(pair, commit)
        assert pair.prefill.side.counters.num_blocks == num_blocks
        assert pair.decode.side.counters.num_delivered == 2
        assert (pair.decode.pool.blocks == FREE_BYTE).all()
        # its blocks are another's now: it is refused although this prompt waits for a grant
        again = key_of(1, attempt=2)
        pair.prefill.prefill(again, _NUM_TOKENS)
        say_to_prefill(pair, replace(grant, handoff=HandoffName(*again), prompt_digest=bytes(16)))
        assert pair.prefill.side.counters.num_blocks == num_blocks
        pair.decode.grant(again, _NUM_TOKENS, pair.prefill.peer)
        assert_delivered(pair, again)


def test_f18_an_id_that_nobody_knows_is_answered_or_ignored(transport: str) -> None:
    with open_pair(transport) as pair:
        hand_over_one(pair)
        assert_delivered(pair, KEY)
        unknown, (grant,), (commit,) = HandoffName(*key_of(77)), messages_of(pair, Grant), messages_of(pair, Commit)
        for message in (Release(unknown), Resend(unknown, 1, (0,)), Revoke(unknown), Renew((unknown,))):
            say_to_prefill(pair, message)
        say_to_prefill(pair, replace(grant, handoff=HandoffName(*key_of(78))))
        forged = replace(commit, handoff=unknown, firsts=(first_token(key_of(77)),))
        for answer in (forged, Pushed(unknown, (0,)), Revoked(unknown, "", False), Renew((unknown,))):
            say_to_decode(pair, answer)
        pair.pass_time(LEASE_S + 1)
        assert [answer.handoff for answer in messages_of(pair, Revoked)[:1]] == [unknown]
        assert pair.decode.side.counters.num_delivered == 1
        assert pair.decode.pool.failures == []
        assert pair.prefill.side.counters.num_blocks == _ALL_BLOCKS
        assert_next_attempt_works(pair)


@pytest.mark.parametrize("change", [{"block_ids": (0, 1, 2, 3, 16)}, {"block_ids": (0, 1, 2, 3, 2**32 - 1)}], ids=str)
def test_f18_a_grant_of_blocks_out_of_range_is_refused(transport: str, change: dict[str, Any]) -> None:
    with open_pair(transport) as pair:
        pair.prefill.prefill(KEY, _NUM_TOKENS)
        incoming = replace(pair.decode.pool.reserve(KEY, _NUM_TOKENS, 0), **change)
        pair.decode.side.do(GrantBlocks(incoming, pair.prefill.peer), pair.now_s)
        pair.pass_time(LEASE_S + 2)
        assert_failed(pair, KEY, reason="beyond the pool of 16")
        assert pair.prefill.side.counters.num_blocks == 0
        assert_next_attempt_works(pair)


@pytest.mark.parametrize("message", [Pushed(HandoffName(*KEY), (5,)), Resend(HandoffName(*KEY), 1, (5,))], ids=str)
def test_f18_indexes_out_of_range_cost_their_connection_and_nothing_is_delivered(message: object) -> None:
    with open_pair(MEMORY) as pair:
        pair.prefill.link.lose(Release)
        pair.decode.grant(KEY, _NUM_TOKENS, pair.prefill.peer)
        pair.prefill.begin(KEY, _NUM_TOKENS)
        pair.until(lambda: pair.prefill.link.num_seen(Grant) == 1)
        if isinstance(message, Pushed):
            say_to_decode(pair, message)
            assert pair.decode.side.counters.num_rejected_messages == 1
            pair.pass_time(LEASE_S + 2)
            assert_failed(pair, KEY)
        else:
            pair.prefill.finish(KEY, _NUM_TOKENS)
            pair.settle()
            say_to_prefill(pair, message)
            assert pair.prefill.side.counters.num_rejected_messages == 1
            pair.pass_time(LEASE_S + 2)
        pair.prefill.link.lose()
        pair.prefill.cancel(KEY)
        pair.until(lambda: pair.is_quiet)
        assert_next_attempt_works(pair)


def test_f18_a_grant_after_the_lease_is_refused(transport: str) -> None:
    with open_pair(transport) as pair:
        pair.prefill.prefill(KEY, _NUM_TOKENS)
        pair.pass_time(LEASE_S + 1)
        assert pair.prefill.pool.pool.num_held == 0
        pair.decode.grant(KEY, _NUM_TOKENS, pair.prefill.peer)
        pair.until(lambda: pair.is_quiet)
        assert_failed(pair, KEY, reason="the handoff has ended")
        assert pair.prefill.side.counters.num_blocks == 0
        assert_next_attempt_works(pair)


@pytest.mark.parametrize("whose", ["sender_epoch", "receiver_epoch"])
@pytest.mark.parametrize("kind", [Grant, Commit], ids=lambda kind: str(kind.__name__))
def test_f18_a_stale_epoch_is_refused(transport: str, kind: type[Any], whose: str) -> None:
    with open_pair(transport) as pair:
        todo = [1]

        def stale_once(message: Any) -> Sequence[object]:
            is_meant = isinstance(message, kind) and bool(todo)
            return [replace(message, **{whose: todo.pop()}) if is_meant else message]

        pair.wire.rewrite = stale_once
        hand_over_one(pair)
        pair.pass_time(LEASE_S + 2)
        assert_failed(pair, KEY, reason="another epoch")
        assert_next_attempt_works(pair)


# --- F18, F6: earlier lives and earlier endpoints --------------------------------------------------------------------


@pytest.fixture
def rdma(monkeypatch: pytest.MonkeyPatch) -> World:
    return patched(monkeypatch, World(Kind.RDMA))


def patched(monkeypatch: pytest.MonkeyPatch, world: World) -> World:
    for target, value in patches(world).items():
        monkeypatch.setattr(target, value)
    return world


def turns(world: World, count: int, duration_s: float = TRANSIT_S) -> None:
    for _ in range(count):
        world.turn(duration_s)
        world.check()


def end(world: World) -> None:
    world.quiesce()
    world.check()
    world.check_over()


@pytest.mark.parametrize("has_prompt", [True, False], ids=["with its prompt", "before its prompt"])
def test_f18_a_grant_from_before_a_fence_is_void_though_its_revoke_was_lost(rdma: World, has_prompt: bool) -> None:
    world = rdma
    if has_prompt:
        world.begin(KEY, 8)
    world.grant(KEY, 8)
    turns(world, 5)
    world.wire.fate = lambda message: () if isinstance(message, Revoke) else (TRANSIT_S,)
    world.fence()
    turns(world, 5)
    assert KEY not in world.decode_pool.held
    world.grant(key_of(2), 8)  # has the same blocks now
    if not has_prompt:
        world.begin(KEY, 8)
    if KEY in world.life.computing:
        world.finish(KEY)
    world.push(100)
    turns(world, 10)
    assert world.life.side.counters.num_blocks == 0
    end(world)


def test_f6_a_request_for_an_earlier_life_does_not_disturb_the_handoffs_of_this_one(transport: str) -> None:
    with open_pair(transport) as pair:
        pair.decode.grant(KEY, _NUM_TOKENS, pair.prefill.peer)
        pair.prefill.begin(KEY, _NUM_TOKENS)
        pair.until(lambda: pair.prefill.link.num_seen(Grant) == 1)
        stale = PrefillPeer("P", pair.prefill.epoch - 1, pair.prefill.address)
        pair.decode.grant(key_of(2), 4, stale)
        pair.until(lambda: bool(pair.decode.pool.failures_of(key_of(2))))
        assert "has restarted" in pair.decode.pool.failures_of(key_of(2))[0]
        pair.prefill.finish(KEY, _NUM_TOKENS)
        assert_delivered(pair, KEY)


# --- F19: cancelled while a writer is in flight ----------------------------------------------------------------------


def test_f19_memory_is_not_used_again_before_the_writes_in_flight_have_come(rdma: World) -> None:
    world = rdma
    world.network.plan = lambda number, key, move: Fault(delay=25)
    ages_s: list[float] = []
    world.push(10**6)
    for number in range(1, 25):
        key, following = key_of(number), key_of(1000 + number)
        world.grant(key, 8)
        world.begin(key, 8)
        turns(world, 4)
        world.finish(key)
        turns(world, 2 + number % 6)
        assert world.network._delayed, "nothing is in flight, so this shows nothing"
        given_up_s = world.wire.now_s
        world.cancel_decode(key)
        while key in world.decode_pool.held:
            assert world.decode.num_quarantined_blocks == 2
            turns(world, 1)
        ages_s.append(world.wire.now_s - given_up_s)
        assert not world.network._delayed
        world.grant(following, 8)  # at once, and the same blocks
        world.begin(following, 8)
        world.finish(following)
        while following not in world.decode_pool.running:
            turns(world, 1)
        world.decode_pool.retire(following)
        turns(world, 3)
    assert 2 * TRANSIT_S < max(ages_s) < 1.0
    assert world.decode.counters.num_fences == 0
    end(world)


def test_f19_memory_of_a_silent_writer_is_fenced_and_what_it_writes_later_is_lost(rdma: World) -> None:
    world = rdma
    world.begin(KEY, 16)
    world.grant(KEY, 16)
    turns(world, 5)
    world.compute(KEY, 16)
    world.network.plan = lambda number, key, move: Fault(delay=10**6)
    world.push(1)
    turns(world, 2)
    world.is_prefill_frozen = True
    given_up_s = world.wire.now_s
    world.cancel_decode(KEY)
    while KEY in world.decode_pool.held:
        turns(world, 1, 0.25)
    assert FENCE_AFTER_S <= world.wire.now_s - given_up_s < FENCE_AFTER_S + 1.5
    assert world.decode.counters.num_fences == 1
    world.is_prefill_frozen = False
    world.network.plan = lambda number, key, move: Fault()
    world.grant(key_of(2), 16)
    world.push(100)
    turns(world, 20)
    world.begin(key_of(2), 16)
    world.finish(key_of(2))
    turns(world, 20)
    assert key_of(2) in world.decode_pool.delivered_kv
    end(world)


def test_f19_what_a_failed_sender_left_in_flight_is_fenced_before_the_memory_is_used_again(rdma: World) -> None:
    world, faults = rdma, [Fault(refusal="cable cut"), *[Fault(delay=200)] * 4]
    world.network.plan = lambda number, key, move: faults.pop() if faults else Fault()
    world.begin(KEY, 32)
    world.grant(KEY, 32)
    turns(world, 5)
    world.push(2)
    world.finish(KEY)
    was_in_flight = False
    for _ in range(4):
        turns(world, 1)
        was_in_flight = was_in_flight or bool(world.network._delayed)
    assert was_in_flight, "nothing was in flight, so this shows nothing"
    assert world.life.side.handoffs == (), "nothing is read any more"
    while KEY in world.decode_pool.held:
        turns(world, 1, 0.1)
    assert world.wire.now_s < FENCE_AFTER_S, "the word of the prefill node is enough, nobody waits for the timer"
    world.grant(key_of(2), 32)  # at once, and the same blocks
    turns(world, 250)
    assert world.decode.counters.num_fences == 1
    end(world)


def test_f19_memory_that_cannot_be_fenced_stays_quarantined_as_long_as_its_writer_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = patched(monkeypatch, World(Kind.MEMORY))
    world.begin(KEY, 16)
    world.grant(KEY, 16)
    turns(world, 5)
    world.is_prefill_frozen = True
    world.cancel_decode(KEY)
    turns(world, 100, 1.0)
    assert world.decode.num_quarantined_blocks == 4
    world.is_prefill_frozen = False
    # it goes on where it was: it had not heard yet, and may still write
    world.compute(KEY, 16)
    world.push(1)
    turns(world, 5)
    assert world.decode.num_quarantined_blocks == 0
    end(world)


def test_f19_the_prefill_nodes_blocks_are_not_used_again_while_they_are_read(rdma: World) -> None:
    world = rdma
    world.network.plan = lambda number, key, move: Fault(delay=30)
    world.begin(KEY, 8)
    world.grant(KEY, 8)
    turns(world, 5)
    world.push(100)
    world.finish(KEY)
    turns(world, 2)
    world.cancel_prefill(KEY, "cancelled")
    while world.network._delayed:
        assert KEY in world.life.pool.tables
        turns(world, 1)
    turns(world, 5)
    assert KEY not in world.life.pool.tables
    end(world)


# --- F20: the words about the end, lost or doubled -------------------------------------------------------------------


@pytest.mark.parametrize("message", [Commit, Release, Revoke, Revoked], ids=lambda kind: str(kind.__name__))
@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name.lower())
def test_f20_lost_and_doubled_words_about_the_end_leave_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, kind: Kind, message: type[Any]
) -> None:
    fates: list[Sequence[float]] = [(), (TRANSIT_S, TRANSIT_S), (TRANSIT_S, 3.0), (3.0,)]
    for fate, is_cancelled in itertools.product(fates, (False, True)):
        with monkeypatch.context() as patching:
            end_with(patched(patching, World(kind)), message, fate, is_cancelled=is_cancelled)


def end_with(world: World, message: type[Any], fate: Sequence[float], *, is_cancelled: bool) -> None:
    """A handoff whose first `message` has this fate."""
    todo = [fate]
    world.wire.fate = lambda said: todo.pop() if isinstance(said, message) and todo else (TRANSIT_S,)
    world.push(100)
    world.begin(KEY, 8)
    world.grant(KEY, 8)
    turns(world, 5)
    if is_cancelled:
        world.compute(KEY, 4)
        turns(world, 2)
        world.cancel_decode(KEY)
        turns(world, 4)
    if KEY in world.life.computing:
        world.finish(KEY)
    turns(world, 40, 0.5)
    is_expected = not is_cancelled and not (message is Commit and fate == ())
    assert (KEY in world.decode_pool.delivered_kv) == is_expected
    assert len(world.decode_pool.failures) == (not is_cancelled and not is_expected)
    end(world)


def test_f20_a_resend_that_comes_again_late_is_not_pushed_into_delivered_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = patched(monkeypatch, World(Kind.MEMORY))
    faults = [Fault(flipped_bits=(3,))]
    world.network.plan = lambda number, key, move: faults.pop() if faults else Fault()
    fates: dict[type[Any], Sequence[float]] = {Resend: (TRANSIT_S, 0.5), Release: ()}
    world.wire.fate = lambda said: fates.get(type(said), (TRANSIT_S,))
    world.push(100)
    world.begin(KEY, 8)
    world.grant(KEY, 8)
    turns(world, 5)
    world.finish(KEY)
    turns(world, 30)
    assert KEY in world.decode_pool.running
    num_blocks = world.life.side.counters.num_blocks
    turns(world, 60)
    assert world.life.side.counters.num_blocks == num_blocks
    end(world)


def test_f20_the_commit_of_another_round_is_not_taken_for_that_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    world = patched(monkeypatch, World(Kind.MEMORY))
    faults = [Fault(flipped_bits=(3,))]
    world.network.plan = lambda number, key, move: faults.pop() if faults else Fault()
    world.wire.fate = lambda said: (TRANSIT_S, 0.2) if isinstance(said, Commit) and not said.round else (TRANSIT_S,)
    world.begin(KEY, 8)
    world.grant(KEY, 8)
    turns(world, 5)
    world.push(1)
    world.finish(KEY)
    turns(world, 30)  # the commit comes again while the block is asked for again, and not pushed yet
    assert world.decode.counters.num_resends == 1
    world.push(1)
    turns(world, 5)
    assert KEY in world.decode_pool.delivered_kv
    end(world)


# --- F21: renewals are lost, data flows ------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [0, 60, 150], ids=["prompt", "late", "later than the lease"])
def test_f21_without_renewals_no_block_is_used_again_while_it_is_read_or_written(rdma: World, delay: int) -> None:
    world = rdma
    world.wire.fate = lambda message: () if isinstance(message, Renew) else (TRANSIT_S,)
    world.network.plan = lambda number, key, move: Fault(delay=delay)
    for number in range(1, 9):
        world.begin(key_of(number), 8)
        world.grant(key_of(number), 8)
    turns(world, 5)
    for number in range(1, 9):
        if key_of(number) in world.life.computing:  # the lease at the decode node has not ended it
            world.finish(key_of(number))
        world.push(1)
        turns(world, 15, 0.1)  # longer than a lease altogether: `check` looks at every reader and every owner
    turns(world, 60, 0.3)
    delivered, failed = world.decode_pool.delivered_kv.keys(), {key for key, _ in world.decode_pool.failures}
    assert len(delivered) + len(failed) == 8
    assert failed, "without renewals the last ones end by the lease"
    assert (len(delivered) > 2) == (delay < 100)
    end(world)


def test_f21_a_lease_that_ends_does_not_end_a_read(rdma: World) -> None:
    world = rdma
    world.wire.fate = lambda message: () if isinstance(message, Renew) else (TRANSIT_S,)
    world.network.plan = lambda number, key, move: Fault(delay=10**6)
    world.begin(KEY, 8)
    world.grant(KEY, 8)
    turns(world, 5)
    world.push(1)
    world.finish(KEY)
    turns(world, 10)
    while world.network._delayed:
        assert KEY in world.life.pool.tables, "I3: it is still read"
        turns(world, 1, 0.1)
    assert world.wire.now_s > LEASE_S, "no lease has ended meanwhile, so this shows nothing"
    turns(world, 2, 0.1)
    assert KEY not in world.life.pool.tables
    end(world)


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name.lower())
def test_f21_renewals_alone_keep_a_slow_handoff_alive(monkeypatch: pytest.MonkeyPatch, kind: Kind) -> None:
    world = patched(monkeypatch, World(kind))
    world.begin(KEY, 8)
    world.begin(key_of(2), 8)
    world.grant(KEY, 8)
    world.wait_for_room(key_of(2))
    world.finish(key_of(2))
    turns(world, 50, LEASE_S / 10)
    assert world.decode_pool.failures == []
    world.finish(KEY)
    world.grant(key_of(2), 8)
    world.push(10)
    turns(world, 10)
    assert world.decode_pool.delivered_kv.keys() == {KEY, key_of(2)}
    end(world)


# --- F22: leases behind a renewed one --------------------------------------------------------------------------------


def test_f22_grants_that_a_silent_prefill_node_never_answers_expire_together() -> None:
    with open_pair(MEMORY) as pair:
        pair.prefill.link.is_lost = lambda message: True
        for number in range(1, 4):
            pair.decode.grant(key_of(number), 4, pair.prefill.peer)
        pair.pass_time(LEASE_S + 1)
        assert_failed(pair, *map(key_of, range(1, 4)), reason="no answer from prefill node P")
        assert pair.decode.pool.pool.num_held == len(pair.decode.side.handoffs) == 0


# --- the order of grant and step --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_granted_first", [True, False], ids=["granted before the step", "granted during the step"])
def test_a_step_is_pushed_layer_by_layer_whenever_its_grant_comes(
    monkeypatch: pytest.MonkeyPatch, is_granted_first: bool
) -> None:
    world = patched(monkeypatch, World(Kind.MEMORY))
    world.push(10**6)
    world.begin(KEY, 8)
    if is_granted_first:
        world.grant(KEY, 8)
        turns(world, 5)
    world.begin_last_step(KEY)
    if not is_granted_first:
        world.grant(KEY, 8)
    world.store_layer(KEY)
    turns(world, 5)
    block_ids = world.decode_pool.held[KEY]
    layer_bytes = LAYER_ENDS[0]
    assert (world.decode_pool.blocks[block_ids, :layer_bytes] != FREE_BYTE).any(), "layer 0 was not pushed"
    assert (world.decode_pool.blocks[block_ids, layer_bytes:] == FREE_BYTE).all()
    for _ in range(NUM_LAYERS - 1):
        world.store_layer(KEY)
    turns(world, 5)
    assert KEY in world.decode_pool.running
    end(world)
