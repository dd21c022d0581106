"""What a receiver that writes its own pool may write. Whole transports are asked the same in the conformance suite."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from baton.kvtransfer.transports.announced import AnnouncedBlocks, GrantedWriter
from baton.kvtransfer.transports.base import BlocksArrived
from baton.wire.request_key import RequestKey
from tests.request_keys import key_of

KEY = key_of(1)
GRANTED, GENERATIONS = (5, 2, 7), (4, 4, 9)


@pytest.fixture
def announced() -> AnnouncedBlocks:
    announced = AnnouncedBlocks()
    announced.expect(KEY, GRANTED, GENERATIONS)
    return announced


@pytest.mark.parametrize(("first", "count"), [(0, 3), (0, 1), (1, 2), (2, 1)])
def test_any_run_of_a_grant_may_be_written(announced: AnnouncedBlocks, first: int, count: int) -> None:
    last = first + count
    assert announced.may_write(KEY, first, GRANTED[first:last], GENERATIONS[first:last])


@pytest.mark.parametrize(
    ("first_index", "block_ids", "generations"),
    [
        (0, (5, 2, 6), GENERATIONS),
        (0, (2, 5, 7), GENERATIONS),
        (0, GRANTED, (4, 4, 8)),
        (0, GRANTED, (4, 4)),
        (0, (5, 2), GENERATIONS),
        (1, GRANTED, GENERATIONS),
        (2**40, GRANTED, GENERATIONS),
        (0, (*GRANTED, 1), (*GENERATIONS, 1)),
        (0, (), ()),
        (3, (), ()),
    ],
    ids=[
        "foreign block",
        "swapped",
        "old generation",
        "too few generations",
        "too few blocks",
        "shifted",
        "far away",
        "beyond the grant",
        "nothing",
        "nothing at its end",
    ],
)
def test_nothing_else_may(
    announced: AnnouncedBlocks, first_index: int, block_ids: tuple[int, ...], generations: tuple[int, ...]
) -> None:
    assert not announced.may_write(KEY, first_index, block_ids, generations)


@pytest.mark.parametrize("key", [key_of(2), RequestKey(KEY.handoff_id, 2)], ids=["another handoff", "another attempt"])
def test_a_grant_is_of_one_attempt_at_one_handoff(announced: AnnouncedBlocks, key: RequestKey) -> None:
    assert not announced.may_write(key, 0, GRANTED, GENERATIONS)


def test_blocks_that_have_arrived_may_not_come_again_alone_or_among_others(announced: AnnouncedBlocks) -> None:
    announced.arrived(KEY, 1, 1)
    assert not announced.may_write(KEY, 1, (2,), (4,))
    assert not announced.may_write(KEY, 0, GRANTED, GENERATIONS)
    assert announced.may_write(KEY, 2, (7,), (9,))


def test_arrivals_are_told_once(announced: AnnouncedBlocks) -> None:
    announced.arrived(KEY, 1, 2)
    announced.arrived(KEY, 0, 1)
    assert announced.take_arrivals() == [BlocksArrived(KEY, 1, 2), BlocksArrived(KEY, 0, 1)]
    assert announced.take_arrivals() == []


def test_what_is_forgotten_is_neither_written_nor_told(announced: AnnouncedBlocks) -> None:
    announced.arrived(KEY, 0, 1)
    announced.forget(KEY)
    assert announced.take_arrivals() == []
    assert not announced.may_write(KEY, 1, (2,), (4,))


def test_what_is_expected_again_may_be_written_again(announced: AnnouncedBlocks) -> None:
    announced.arrived(KEY, 0, 3)
    announced.expect(KEY, GRANTED, GENERATIONS)
    assert announced.may_write(KEY, 0, GRANTED, GENERATIONS)


def test_a_receiver_that_writes_by_itself_is_fenced_by_forgetting() -> None:
    assert GrantedWriter().fence()


def test_only_a_handoff_that_was_never_announced_is_waited_for_and_once() -> None:
    announced, waited = AnnouncedBlocks(), list[bool]()
    announced.look = lambda is_known: waited.append(not is_known())
    announced.expect(key_of(1), (7,), (1,))
    assert announced.may_write(key_of(1), 0, (7,), (1,))
    announced.forget(key_of(1))
    assert not announced.may_write(key_of(1), 0, (7,), (1,))
    assert waited == [False], "a late block of a handoff that is over"
    for _ in range(2):
        assert not announced.may_write(key_of(2), 0, (7,), (1,))
    assert waited == [False, True, False]

    def order_comes(is_known: Callable[[], bool]) -> None:
        announced.expect(key_of(3), (8,), (2,))
        assert is_known()

    announced.look = order_comes
    assert announced.may_write(key_of(3), 0, (8,), (2,))


def test_a_block_that_comes_again_before_the_order_to_expect_it_anew_is_waited_for_once_a_grant() -> None:
    announced, waited = AnnouncedBlocks(), list[bool]()

    def nothing_comes(is_known: Callable[[], bool]) -> None:
        waited.append(is_known())

    def order_comes(is_known: Callable[[], bool]) -> None:
        announced.expect(KEY, GRANTED, GENERATIONS)
        waited.append(is_known())

    announced.expect(KEY, GRANTED, GENERATIONS)
    announced.arrived(KEY, 0, 3)
    announced.look = order_comes
    assert announced.may_write(KEY, 1, (2,), (4,)), "it is sent again because it was damaged"
    announced.arrived(KEY, 1, 1)
    announced.look = nothing_comes
    for _ in range(2):
        assert not announced.may_write(KEY, 1, (2,), (4,)), "it is doubled"
    assert waited == [True, False]
