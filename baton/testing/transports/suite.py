"""What every transport must do, whatever it is made of: two processes, one pair for all tests of a transport."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from baton.testing.transports.end_process import Spec
from baton.testing.transports.rig import EndFailed, Rig, Starter, Starters, open_rig

_BLOCK_BYTES = 2**18
_NUM_TARGETS, _NUM_SOURCES = 300, 272
_BIG = 256
"""Blocks in 64 MiB."""


class TransportSuite:
    """Derive from it, and say by the fixture `transport` where the `Transport` is. Needs 150 MiB in /dev/shm.

    `is_in_process`: both ends have to be in one process.
    """

    is_in_process = False

    @pytest.fixture(scope="class")
    @classmethod
    def transport(cls) -> str:
        """Where it is found: "package.module:NAME"."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def starters(cls) -> Iterator[Starters]:
        """What forks the ends."""
        if cls.is_in_process:
            yield None
            return
        with Starter() as starter:
            yield starter, starter

    @pytest.fixture(scope="class")
    @classmethod
    def connected(cls, transport: str, starters: Starters) -> Iterator[Rig]:
        """Both ends, for all tests."""
        with open_rig(Spec(transport, _NUM_TARGETS, _BLOCK_BYTES), _NUM_SOURCES, starters) as rig:
            yield rig

    @pytest.fixture
    def rig(self, connected: Rig) -> Rig:
        """Both ends, with nothing in flight and nothing in the receiver's pool."""
        connected.reset()
        return connected

    def test_bytes_arrive_exactly_and_nowhere_else(self, rig: Rig) -> None:
        sources, targets = [3, 4, 5, 9, 271], [11, 12, 2, 299, 0]
        number = rig.expect(targets)
        rig.push(number, sources, targets)
        rig.until_delivered(number, 5)
        assert rig.has(dict(zip(targets, sources, strict=True)))

    def test_neighbouring_blocks_arrive_in_order(self, rig: Rig) -> None:
        targets = range(100, 160)
        number = rig.expect(targets)
        rig.push(number, range(5, 65), targets)
        rig.until_delivered(number, 60)
        assert rig.has({100 + i: 5 + i for i in range(60)})

    def test_scattered_blocks_arrive_each_in_its_place(self, rig: Rig) -> None:
        order = random.Random(4)
        sources, targets = order.sample(range(_NUM_SOURCES), 80), order.sample(range(_NUM_TARGETS), 80)
        number = rig.expect(targets)
        rig.push(number, sources, targets)
        rig.until_delivered(number, 80)
        assert rig.has(dict(zip(targets, sources, strict=True)))

    def test_one_source_block_may_go_to_several_places(self, rig: Rig) -> None:
        number = rig.expect([7, 9, 8])
        rig.push(number, [1, 1, 1], [7, 9, 8])
        rig.until_delivered(number, 3)
        assert rig.has({7: 1, 8: 1, 9: 1})

    def test_a_grant_may_be_filled_in_several_pushes_in_any_order(self, rig: Rig) -> None:
        targets = [9, 8, 1, 2, 15]
        number = rig.expect(targets)
        rig.push(number, [3, 4], targets[3:], first_index=3)
        rig.push(number, [0], targets[:1])
        rig.until_sent(number)
        if not rig.is_silent:
            rig.until(lambda: len(rig.arrived(number)) == 3, "three blocks")
            assert sorted(rig.arrived(number)) == [0, 3, 4]
        assert rig.has({2: 3, 15: 4, 9: 0})
        rig.push(number, [1, 2], targets[1:3], first_index=1)
        rig.until_delivered(number, 5)
        assert rig.has({2: 3, 15: 4, 9: 0, 8: 1, 1: 2})

    def test_many_handoffs_interleave(self, rig: Rig) -> None:
        order = random.Random(5)
        targets, sources = order.sample(range(_NUM_TARGETS), 80), order.sample(range(_NUM_SOURCES), 80)
        numbers = [rig.expect(targets[8 * i : 8 * i + 8]) for i in range(10)]
        pushes = [(handoff, index) for handoff in range(10) for index in range(0, 8, 2)]
        order.shuffle(pushes)
        for handoff, index in pushes:
            place = slice(8 * handoff + index, 8 * handoff + index + 2)
            rig.push(numbers[handoff], sources[place], targets[place], first_index=index)
        for number in numbers:
            rig.until_delivered(number, 8)
        assert rig.has(dict(zip(targets, sources, strict=True)))

    def test_the_source_may_change_once_nothing_is_read_any_more(self, rig: Rig) -> None:
        number = rig.expect(range(64))
        rig.push(number, range(64), range(64))
        rig.until_sent(number)
        rig.sender.do("wipe")
        rig.until_delivered(number, 64)
        assert rig.has({i: i for i in range(64)})

    def test_nothing_to_push_is_fine(self, rig: Rig) -> None:
        number = rig.expect([])
        rig.push(number, [], [])
        rig.until_delivered(number, 0)
        assert rig.has({})

    @pytest.mark.parametrize("what", ["unknown", "forgotten", "wrong generation", "wrong block", "beyond the grant"])
    def test_what_no_grant_announced_is_no_arrival(self, rig: Rig, what: str) -> None:
        number = rig.expect([4, 5])
        wanted = {4: 0, 5: 1}
        rig.push(number, [0, 1], [4, 5])
        rig.until_delivered(number, 2)
        stray = rig.next_number()
        if what == "forgotten":
            rig.expect_again(stray, [20, 21])
            rig.receiver.do("forget", number=stray)
        elif what != "unknown":
            rig.expect_again(stray, [20, 21], generation=4 if what == "wrong generation" else 3)
        targets = [21, 20] if what == "wrong block" else [20, 21]
        rig.push(stray, [8, 9], targets, first_index=2 if what == "beyond the grant" else 0)
        rig.until_sent(stray)
        # and the way is open for others, which come after the stray blocks
        number = rig.expect([30, 31])
        rig.push(number, [2, 3], [30, 31])
        rig.until_delivered(number, 2)
        if rig.writes_itself:
            assert rig.has({**wanted, 30: 2, 31: 3})
        if not rig.is_silent:
            assert rig.arrived(stray) == []

    def test_what_comes_twice_counts_once(self, rig: Rig) -> None:
        number = rig.expect([6, 7])
        rig.push(number, [0, 1], [6, 7])
        rig.until_delivered(number, 2)
        rig.push(number, [2, 3], [6, 7])
        rig.until_sent(number)
        rig.settle()
        if rig.writes_itself:
            assert rig.has({6: 0, 7: 1})
        if not rig.is_silent:
            assert sorted(rig.arrived(number)) == [0, 1]

    def test_what_is_expected_again_is_taken_again(self, rig: Rig) -> None:
        number = rig.expect([6, 7])
        rig.push(number, [0, 1], [6, 7])
        rig.until_delivered(number, 2)
        rig.receiver.do("guard", block_ids=[6, 7])
        rig.expect_again(number, [6, 7])
        rig.push(number, [0, 1], [6, 7])
        rig.until_sent(number)
        if not rig.is_silent:
            rig.until(lambda: sorted(rig.arrived(number)) == [0, 0, 1, 1], "arrived again")
        assert rig.has({6: 0, 7: 1})

    @pytest.mark.parametrize("piece_bytes", [0, _BIG * _BLOCK_BYTES], ids=["in pieces", "at once"])
    def test_64_mib_arrive(self, rig: Rig, piece_bytes: int) -> None:
        targets = range(10, 10 + _BIG)
        number = rig.expect(targets)
        rig.push(number, range(_BIG), targets, piece_bytes=piece_bytes)
        rig.until_delivered(number, _BIG)
        assert rig.has({10 + i: i for i in range(_BIG)})

    def test_200_small_pushes_arrive(self, rig: Rig) -> None:
        targets = list(reversed(range(200)))
        number = rig.expect(targets)
        rig.push(number, range(200), targets, piece_bytes=_BLOCK_BYTES)
        rig.until_delivered(number, 200)
        assert rig.has({199 - i: i for i in range(200)})

    def test_a_receiver_that_was_frozen_for_a_moment_gets_everything(self, rig: Rig) -> None:
        number = rig.expect(range(_BIG))
        rig.receiver.freeze()
        rig.push(number, range(_BIG), range(_BIG))
        time.sleep(0.3)
        rig.receiver.thaw()
        rig.until_delivered(number, _BIG)
        assert rig.has({i: i for i in range(_BIG)})

    def test_a_fenced_receiver_is_not_written_by_the_endpoint_of_before(self, rig: Rig) -> None:
        stray = rig.expect([1, 2])
        if not rig.receiver.do("fence"):
            return  # this one says that it cannot
        rig.receiver.do("forget", number=stray)
        try:
            rig.push(stray, [8, 9], [1, 2])
            rig.settle()
        except EndFailed:
            pass
        assert rig.has({})
        rig.connect()
        number = rig.expect([5])
        rig.push(number, [4], [5])
        rig.until_delivered(number, 1)
        assert rig.has({5: 4})

    def test_a_receiver_that_dies_in_mid_push_leaves_nothing_read_and_its_next_life_is_not_written(
        self, rig: Rig
    ) -> None:
        old = rig.hello["endpoint"]
        number = rig.expect(range(_BIG))
        rig.receiver.freeze()
        rig.push(number, range(_BIG), range(_BIG))
        time.sleep(0.1)
        rig.restart_receiver()
        rig.sender.do("close")
        rig.until(lambda: not rig.sender.do("status", number=number)["is_reading"], "nothing is read", 30.0)
        # somebody who still knows the old endpoint
        rig.expect_again(number, range(_BIG))
        try:
            rig.open(old)
            rig.push(number, range(8), range(8))
            rig.settle()
        except EndFailed:
            pass
        assert rig.has({})
        assert rig.arrived(number) == []
        rig.connect()
        number = rig.expect([3, 1])
        rig.push(number, [0, 1], [3, 1])
        rig.until_delivered(number, 2)
        assert rig.has({3: 0, 1: 1})
