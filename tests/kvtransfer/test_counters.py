"""What both sides count, of one handoff of each kind: what is not named stays 0."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace

import pytest

from baton.kvtransfer.messages import Grant, Revoke, Revoked
from tests.kvtransfer.loopback import Fault
from tests.kvtransfer.pair import MAILBOX, MEMORY, Pair, open_pair
from tests.kvtransfer.pools import BLOCK_BYTES, LEASE_S, key_of

KEY = key_of(1)
NUM_TOKENS, NUM_BLOCKS = 18, 5
MOVED = {"num_blocks": NUM_BLOCKS, "num_bytes": NUM_BLOCKS * BLOCK_BYTES}


def counted(pair: Pair) -> tuple[dict[str, int], dict[str, int]]:
    """What the prefill node and the decode node have counted, as far as it is not 0."""
    sides = (pair.prefill.side.counters, pair.decode.side.counters)
    sent, received = ({name: count for name, count in asdict(side).items() if count} for side in sides)
    return sent, received


def both(pair: Pair) -> None:
    pair.prefill.prefill(KEY, NUM_TOKENS)
    pair.decode.grant(KEY, NUM_TOKENS, pair.prefill.peer)
    pair.until(lambda: pair.is_quiet)


def granted(pair: Pair) -> None:
    pair.prefill.begin(KEY, NUM_TOKENS)
    pair.decode.grant(KEY, NUM_TOKENS, pair.prefill.peer)
    pair.until(lambda: pair.prefill.link.num_seen(Grant) == 1)
    pair.settle()


def cancelled_by_prefill(pair: Pair) -> None:
    granted(pair)
    pair.prefill.cancel(KEY)
    pair.until(lambda: pair.is_quiet)


def ended_with_token_1(pair: Pair) -> None:
    granted(pair)
    pair.prefill.cancel(KEY, request_ended=True)
    pair.until(lambda: pair.is_quiet)


def cancelled_by_decode(pair: Pair) -> None:
    granted(pair)
    pair.decode.cancel(KEY)
    pair.until(lambda: pair.is_quiet)


def cancelled_without_room(pair: Pair) -> None:
    pair.decode.wait_for_room(KEY, pair.prefill.peer)
    pair.decode.cancel(KEY)
    pair.settle()


def cannot_be_dialled(pair: Pair) -> None:
    pair.decode.wait_for_room(KEY, replace(pair.prefill.peer, address="nonsense"))


def expired(pair: Pair) -> None:
    pair.prefill.link.lose(Grant, Revoke)
    pair.prefill.prefill(KEY, NUM_TOKENS)
    pair.decode.grant(KEY, NUM_TOKENS, pair.prefill.peer)
    pair.pass_time(2 * LEASE_S)
    pair.until(lambda: pair.is_quiet)


def noise(pair: Pair) -> None:
    both(pair)
    pair.prefill.say_bytes(b"noise")
    pair.decode.say_bytes(b"noise")
    pair.settle()


GRANTED, FAILED = {"num_granted": 1}, {"num_failed": 1}
GOOD = ({"num_handoffs": 1, "num_released": 1, **MOVED}, {**GRANTED, "num_delivered": 1, **MOVED})
AWAY = {"num_handoffs": 1, "num_cancelled": 1}


@pytest.mark.parametrize(
    ("happens", "sent", "received"),
    [
        (both, *GOOD),
        (cancelled_by_prefill, AWAY, {**GRANTED, **FAILED}),
        (ended_with_token_1, AWAY, GRANTED),
        (cancelled_by_decode, AWAY, {**GRANTED, "num_revoked": 1}),
        (cancelled_without_room, {}, {}),
        (cannot_be_dialled, {}, FAILED),
        (expired, {**AWAY, "num_expired": 1}, {**GRANTED, **FAILED, "num_expired": 1, "num_revoked": 1}),
        (noise, {**GOOD[0], "num_rejected_messages": 1}, {**GOOD[1], "num_rejected_messages": 1}),
    ],
)
def test_each_thing_that_happens_is_counted_once(
    happens: Callable[[Pair], None], sent: dict[str, int], received: dict[str, int]
) -> None:
    with open_pair(MAILBOX) as pair:
        happens(pair)
        assert counted(pair) == (sent, received)


def test_blocks_that_arrive_damaged_are_counted_each_time() -> None:
    def flip(number: int, key: object, move: object) -> Fault:
        return Fault(flipped_bits=(5,)) if number < 2 else Fault()

    with open_pair(MAILBOX, plan=flip) as pair:
        both(pair)
        sent, received = counted(pair)
        more = {"num_blocks": NUM_BLOCKS + 2, "num_bytes": (NUM_BLOCKS + 2) * BLOCK_BYTES}
        assert sent == {**GOOD[0], **more, "num_resent_blocks": 2}
        assert received == {**GOOD[1], "num_damaged_blocks": 2, "num_resends": 1}


def test_blocks_are_quarantined_until_the_peer_says_that_it_writes_nothing_more() -> None:
    with open_pair(MEMORY) as pair:
        granted(pair)
        pair.prefill.link.lose(Revoked)
        assert pair.decode.side.num_quarantined_blocks == 0
        pair.decode.cancel(KEY)
        pair.settle()
        assert pair.decode.side.num_quarantined_blocks == NUM_BLOCKS
        pair.prefill.link.lose()
        pair.pass_time(2)
        assert (pair.decode.side.num_quarantined_blocks, pair.is_quiet) == (0, True)
