"""The host tier: a store like any, and which blocks give way when its memory is full."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from baton.engine.cache import host_tier
from baton.engine.cache.block_changes import BlockChanges
from baton.engine.cache.host_tier import HostTier
from baton.engine.cache.store import KvStore, StoredBlock, TierCounters
from baton.testing.kv_stores import BLOCK_BYTES, Collected, KvStoreSuite, block_of, hash_of


def tier_of(num_slots: int) -> HostTier:
    return HostTier(np.zeros((num_slots, BLOCK_BYTES), dtype=np.uint8))


class TestHostTier(KvStoreSuite):
    """As every store."""

    def open(self) -> KvStore:
        return tier_of(16)


class Held(Collected):
    """A landing in which the store's thread stays until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.is_there, self.may_go = threading.Event(), threading.Event()

    def arrived(self, block: StoredBlock) -> bool:
        self.is_there.set()
        assert self.may_go.wait(10.0)
        return super().arrived(block)


def known(tier: HostTier, *numbers: int) -> list[int]:
    """Those of the blocks that are there; asking uses none of them, as far as it matters."""
    return [number for number in numbers if hash_of(number) in tier._slots]


def test_it_knows_what_it_has_without_a_load() -> None:
    tier = tier_of(3)
    tier.put(block_of(1))
    assert tier.lookup([hash_of(1), hash_of(2)]) == 1
    tier.close()


def test_the_block_that_was_not_used_for_longest_gives_way() -> None:
    tier = tier_of(3)
    for number in (1, 2, 3):
        tier.put(block_of(number))
    assert tier.usage == 1.0
    assert tier.lookup([hash_of(1)]) == 1
    tier.put(block_of(4))
    assert known(tier, 1, 2, 3, 4) == [1, 3, 4]
    tier.close()


def test_no_number_of_blocks_that_are_used_once_displaces_what_was_used_again() -> None:
    tier = tier_of(8)
    for number in (1, 2, 3, 4):
        tier.put(block_of(number))
    assert tier.lookup([hash_of(number) for number in (1, 2, 3)]) == 3
    for number in range(10, 60):
        tier.put(block_of(number))
    assert known(tier, *range(60)) == [1, 2, 3, 55, 56, 57, 58, 59]
    tier.close()


def test_what_was_used_again_gives_way_when_more_was_used_since() -> None:
    tier = tier_of(4)
    for number in (1, 2, 3, 4):
        tier.put(block_of(number))
        assert tier.lookup([hash_of(number)]) == 1
    for number in (5, 6):
        tier.put(block_of(number))
    assert known(tier, *range(9)) == [3, 4, 5, 6]
    tier.close()


def test_of_what_was_used_again_that_gives_way_first_that_was_not_used_for_longest() -> None:
    tier = tier_of(4)
    for number in (1, 2, 3, 4):
        tier.put(block_of(number))
    for number in (1, 2, 1, 3):
        assert tier.lookup([hash_of(number)]) == 1
    for number in (5, 6):
        tier.put(block_of(number))
    assert known(tier, *range(9)) == [1, 3, 5, 6]
    tier.close()


def test_a_block_that_was_used_again_can_be_forgotten() -> None:
    tier = tier_of(2)
    tier.put(block_of(1))
    assert tier.lookup([hash_of(1)]) == 1
    tier.forget(hash_of(1))
    for number in (2, 3):
        tier.put(block_of(number))
    assert known(tier, 1, 2, 3) == [2, 3]
    tier.close()


def test_of_a_prompt_the_end_gives_way_before_the_beginning() -> None:
    tier = tier_of(3)
    for number in (1, 2, 3):
        tier.put(block_of(number))
    assert tier.lookup([hash_of(1), hash_of(2), hash_of(3)]) == 3
    tier.put(block_of(4))
    assert known(tier, 1, 2, 3, 4) == [1, 2, 4]
    tier.close()


def test_a_block_that_is_being_read_does_not_give_way() -> None:
    tier, landing = tier_of(2), Held()
    tier.put(block_of(1))
    tier.put(block_of(2))
    tier.load([hash_of(1), hash_of(2)], landing)
    assert landing.is_there.wait(10.0)
    tier.put(block_of(3))
    assert known(tier, 1, 2, 3) == [1, 3]
    landing.may_go.set()
    (found,) = landing.wait()
    assert found.content.tobytes() == block_of(1).content.tobytes()
    tier.put(block_of(4))
    assert known(tier, 1, 3, 4) == [3, 4]
    tier.close()


def test_a_tier_of_one_block_keeps_what_is_being_read() -> None:
    tier, landing = tier_of(1), Held()
    tier.put(block_of(1))
    tier.load([hash_of(1)], landing)
    assert landing.is_there.wait(10.0)
    tier.put(block_of(2))
    assert known(tier, 1, 2) == [1]
    landing.may_go.set()
    landing.wait()
    tier.put(block_of(2))
    assert known(tier, 1, 2) == [2]
    tier.close()


def test_loads_beyond_those_that_may_wait_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tier, "_MAX_WAITING", 1)
    tier, held, waiting, refused = tier_of(2), Held(), Collected(), Collected()
    tier.put(block_of(1))
    tier.load([hash_of(1)], held)
    assert held.is_there.wait(10.0)
    tier.load([hash_of(1)], waiting)
    tier.load([hash_of(1)], refused)
    assert refused.wait() == []
    held.may_go.set()
    assert len(waiting.wait()) == 1
    tier.close()


def test_a_landing_that_raises_ends_its_own_load_only(caplog: pytest.LogCaptureFixture) -> None:
    class Raising(Collected):
        def arrived(self, block: StoredBlock) -> bool:
            raise RuntimeError("no place")

    tier, raising, other = tier_of(2), Raising(), Collected()
    tier.put(block_of(1))
    tier.load([hash_of(1)], raising)
    tier.load([hash_of(1)], other)
    assert raising.wait() == []
    assert len(other.wait()) == 1
    assert "no place" in caplog.text
    tier.close()


def test_closing_waits_for_the_block_that_is_being_read_and_reads_no_other() -> None:
    tier, held, waiting = tier_of(2), Held(), Collected()
    tier.put(block_of(1))
    tier.put(block_of(2))
    tier.load([hash_of(1), hash_of(2)], held)
    tier.load([hash_of(1)], waiting)
    assert held.is_there.wait(10.0)
    closing = threading.Thread(target=tier.close)
    closing.start()
    assert waiting.wait() == []
    held.may_go.set()
    closing.join(10.0)
    assert not closing.is_alive()
    assert len(held.wait()) == 1


def test_it_tells_which_blocks_come_and_leave() -> None:
    tier, changes = tier_of(2), BlockChanges()
    tier.put(block_of(1))
    tier.follow(changes)
    assert changes.take(9) == [(hash_of(1), True)]
    for number in (1, 2, 3):
        tier.put(block_of(number))
    tier.forget(hash_of(2))
    tier.forget(hash_of(2))
    assert changes.take(9) == [(hash_of(1), False), (hash_of(3), True)]  # the second has come and left
    tier.close()


def test_before_the_end_those_come_first_that_would_give_way_last() -> None:
    tier = tier_of(8)
    for number in (1, 2, 3, 4, 5):
        tier.put(block_of(number))
    for number in (4, 2):
        tier.lookup([hash_of(number)])
    last = tier.last_blocks()
    assert [[each.block_hash[1] for each in part] for part in (last.reused, last.others)] == [[2, 4], [5, 3, 1]]
    read = last.reused[0].read()
    assert (read.checksum, read.content.tobytes()) == (block_of(2).checksum, block_of(2).content.tobytes())
    tier.close()


def test_a_block_that_nobody_below_takes_is_lost_and_counted() -> None:
    takes, counters = [True, False], TierCounters()
    tier = HostTier(np.zeros((1, BLOCK_BYTES), dtype=np.uint8), lambda block: takes.pop(0), counters)
    for number in (1, 2, 3):
        tier.put(block_of(number))
    assert (known(tier, 1, 2, 3), counters.num_dropped_blocks) == ([3], 1)
    tier.close()
