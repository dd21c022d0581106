"""Several stores as one: from where each block comes, where it goes, and which of them is left alone."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from baton.engine.cache.block_changes import BlockChanges
from baton.engine.cache.host_tier import HostTier
from baton.engine.cache.store import LATENCY_S, REST_S, KvStore, Landing, TierCounters
from baton.engine.cache.tiers import Tier, Tiers
from baton.testing.kv_stores import BLOCK_BYTES, Collected, KvStoreSuite, block_of, hash_of
from tests.engine.cache.disk.tiers_on_disk import Opened
from tests.engine.scheduler.stores import Clock, TestStore


class Landed(Collected):
    """A landing that somebody may have given up."""

    def __init__(self, most: int = 2**30) -> None:
        super().__init__(most)
        self.is_given_up = False

    @property
    def is_over(self) -> bool:
        return self.is_given_up or super().is_over

    @property
    def numbers(self) -> list[int]:
        return [each.block_hash[1] for each in self.blocks]


class World:
    """Three stores that do what a test says, as tiers."""

    def __init__(self, *holdings: Sequence[int]) -> None:
        self.clock = Clock()
        self.stores = [TestStore({hash_of(each): block_of(each) for each in held}) for held in holdings]
        self.each = [
            Tier(name, store, TierCounters(), self.clock) for name, store in zip("abc", self.stores, strict=False)
        ]
        self.tiers = Tiers(self.each)

    def lookup(self, *numbers: int) -> int:
        return len(self.tiers.names([hash_of(each) for each in numbers]))

    def load(self, *numbers: int, most: int = 2**30) -> Landed:
        landing = Landed(most)
        self.tiers.load([hash_of(each) for each in numbers], landing)
        return landing

    def finish(self) -> None:
        while any(store.orders for store in self.stores):
            for store in self.stores:
                store.finish()


class AsOne(Tiers):
    """Tiers as if they were one store."""

    def lookup(self, hashes: Sequence[bytes]) -> int:
        return len(self.names(hashes))


class TestHostOverDisk(KvStoreSuite):
    """As every store."""

    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path) -> None:
        self.path = tmp_path

    def open(self) -> KvStore:
        disk_tier = Opened(self.path)
        disk = Tier("disk", disk_tier, disk_tier.counters)
        host = HostTier(np.zeros((2, BLOCK_BYTES), dtype=np.uint8), disk.put)
        return cast("KvStore", AsOne([Tier("host", host, TierCounters()), disk]))


def test_each_block_comes_from_the_first_tier_that_has_it_and_all_in_order() -> None:
    world = World([1, 4, 5], [2, 3, 4], [6, 1])
    assert world.lookup(1, 2, 3, 4, 5, 6) == 6
    landing = world.load(1, 2, 3, 4, 5, 6)
    world.finish()
    assert landing.is_over
    assert landing.numbers == [1, 2, 3, 4, 5, 6]
    assert [store.num_loads for store in world.stores] == [2, 1, 1]
    assert [tier.counters.num_loaded_blocks for tier in world.each] == [3, 2, 1]


def test_blocks_count_up_to_the_first_that_no_tier_has() -> None:
    world = World([1], [2, 4], [])
    assert world.lookup(1, 2, 3, 4) == 2
    assert world.lookup(3) == world.lookup() == 0
    landing = world.load(1, 2, 3, 4)
    world.finish()
    assert (landing.is_over, landing.numbers) == (True, [1, 2])


def test_what_comes_from_below_is_kept_in_the_first_tier() -> None:
    world = World([1], [2])
    world.load(1, 2)
    world.finish()
    assert list(world.stores[0].blocks) == [hash_of(1), hash_of(2)]
    assert hash_of(1) not in world.stores[1].blocks


def test_a_block_that_is_put_is_in_the_first_tier_only_until_that_evicts_it() -> None:
    below = Tier("disk", store := TestStore(), TierCounters())
    host = HostTier(np.zeros((2, BLOCK_BYTES), dtype=np.uint8), below.put)
    tiers = Tiers([Tier("host", host, TierCounters()), below])
    for number in (1, 2):
        tiers.put(block_of(number))
    assert store.num_puts == 0
    tiers.put(block_of(3))
    (found,) = store.blocks.values()
    assert (found.block_hash, found.checksum) == block_of(1)[:2]
    assert found.content.tobytes() == block_of(1).content.tobytes()
    assert tiers.names([hash_of(number) for number in (1, 2, 3)]) == ["disk", "host", "host"]
    assert [tier.counters.num_stored_blocks for tier in tiers.tiers] == [3, 1]
    tiers.close()


def test_a_block_that_has_gone_down_meanwhile_comes_from_there() -> None:
    world = World([1, 2], [3])
    landing = world.load(1, 2, 3)
    (order,) = world.stores[0].orders
    world.stores[0].give(order)
    world.stores[0].end(order)
    world.stores[1].blocks[hash_of(2)] = block_of(2)
    (order,) = world.stores[0].orders
    world.stores[0].end(order)
    world.finish()
    assert (landing.is_over, landing.numbers) == (True, [1, 2, 3])


def test_a_landing_that_wants_no_more_is_ended() -> None:
    world = World([1], [2, 3], [4])
    landing = world.load(1, 2, 3, 4, most=2)
    world.finish()
    assert (landing.is_over, landing.numbers) == (True, [1, 2])
    assert world.stores[2].num_loads == 0


def test_a_tier_that_ends_early_is_asked_again_until_it_gives_nothing() -> None:
    world = World([1, 2, 3])
    landing = world.load(1, 2, 3)
    (order,) = world.stores[0].orders
    world.stores[0].give(order)
    world.stores[0].end(order)
    (order,) = world.stores[0].orders
    assert order.hashes == [hash_of(2), hash_of(3)]
    world.stores[0].end(order)
    assert (landing.is_over, landing.numbers, world.stores[0].orders) == (True, [1], [])


@pytest.mark.parametrize("fails", ["lookup", "put", "load"])
def test_a_tier_that_fails_is_left_alone_and_no_other(fails: str) -> None:
    world = World([1], [2])
    world.stores[1].fails = frozenset([fails])
    if fails == "put":
        assert not world.each[1].put(block_of(9))
    else:
        landing = world.load(1, 2)
        world.finish()
        assert (landing.is_over, landing.numbers) == (True, [1])
    assert [tier.counters.num_failures for tier in world.each] == [0, 1]
    world.stores[1].fails = frozenset()
    assert world.lookup(1, 2) == 1
    world.clock.now_s += REST_S
    assert world.lookup(1, 2) == 2


def test_a_block_goes_to_the_next_tier_while_the_first_is_left_alone() -> None:
    world = World([], [])
    world.stores[0].fails = frozenset(["put"])
    for number in (1, 2):
        world.tiers.put(block_of(number))
    assert [store.num_puts for store in world.stores] == [0, 2]
    world.stores[1].fails = frozenset(["put"])
    assert not world.tiers.put(block_of(3))


def test_a_tier_that_is_late_is_left_alone_and_no_other() -> None:
    world = World([1, 3], [2])
    late = world.load(1, 2)
    world.stores[0].finish()
    assert world.lookup(3, 2) == 2
    late.is_given_up = True
    assert world.lookup(3, 2) == 2, "it was slower than computing, and may still come"
    world.clock.now_s += LATENCY_S
    assert world.lookup(3, 2) == 1
    assert [tier.counters.num_silent_loads for tier in world.each] == [0, 1]
    assert world.lookup(1, 3) == 2
    world.clock.now_s += REST_S
    assert world.lookup(2) == 1


def test_a_tier_that_was_wrong_is_left_alone_and_no_other() -> None:
    world = World([1], [2, 4], [3])
    world.load(1, 2, 3, most=2)
    world.finish()
    for store in world.stores:
        store.blocks.setdefault(hash_of(2), block_of(2))
    world.tiers.forget(hash_of(2))
    assert [tier.counters.num_damaged_blocks for tier in world.each] == [0, 1, 0]
    assert [world.lookup(number) for number in (1, 2, 3, 4)] == [1, 0, 1, 0]


def test_a_store_that_raises_after_it_has_begun_gives_nothing_more() -> None:
    class Half(TestStore):
        def load(self, hashes: Sequence[bytes], landing: Landing) -> None:
            super().load(hashes, landing)
            raise TimeoutError

    world = World([1])
    half = Half({hash_of(1): block_of(1)})
    tiers = Tiers([Tier("half", half, TierCounters(), world.clock), *world.each])
    landing = Landed()
    tiers.load([hash_of(1)], landing)
    world.finish()
    assert landing.numbers == [1]
    half.finish()
    assert (landing.numbers, landing.num_after_the_end) == ([1], 0)


def test_a_store_that_loads_at_once_is_a_tier_too() -> None:
    class AtOnce(TestStore):
        def load(self, hashes: Sequence[bytes], landing: Landing) -> None:
            super().load(hashes, landing)
            self.finish()

    world = World([1, 3], [2, 4])
    stores = [AtOnce(store.blocks) for store in world.stores]
    landing = Landed()
    Tiers([Tier("a", store, TierCounters()) for store in stores]).load([hash_of(each) for each in range(1, 6)], landing)
    assert (landing.numbers, landing.is_over) == ([1, 2, 3, 4], True)


def test_all_tiers_are_closed_also_those_that_rest() -> None:
    world = World([], [])
    world.stores[1].fails = frozenset(["lookup"])
    world.lookup(1)
    world.tiers.close()
    assert all(store.is_closed for store in world.stores)


def test_usage_is_that_of_the_emptiest() -> None:
    world = World([], [])
    world.stores[0].usage, world.stores[1].usage = 1.0, 0.25
    assert world.tiers.usage == 0.25


@pytest.mark.parametrize(("said", "usage"), [(-0.5, 0.0), (0.5, 0.5), (1.5, 1.0)])
def test_usage_is_a_share_whatever_a_store_says(said: float, usage: float) -> None:
    world = World([])
    world.stores[0].usage = said
    assert world.each[0].usage == usage
    world.stores[0].fails = frozenset(["lookup"])
    world.lookup(1)
    assert world.each[0].usage == 0.0, "it is left alone"


def test_a_tier_tells_what_it_has_if_it_can_and_is_not_left_alone() -> None:
    host = HostTier(np.zeros((2, BLOCK_BYTES), dtype=np.uint8))
    host.put(block_of(1))
    tier, changes = Tier("host", host, TierCounters()), BlockChanges()
    assert tier.follow(changes)
    assert changes.take(10) == [(hash_of(1), True)]
    tier.gave(Landed(), block_of(1), is_wanted=False)
    tier.forget(hash_of(1))
    assert not tier.follow(changes)
    assert not World([]).each[0].follow(changes)
    tier.close()


@pytest.mark.parametrize("fails", ["lookup", "put", "load"])
def test_a_tier_that_fails_for_long_is_said_once_to_fail_and_once_to_work(
    fails: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    world = World([1])

    def use() -> None:
        world.clock.now_s += REST_S
        world.lookup(1)
        world.each[0].put(block_of(1))
        world.load(1)
        world.finish()

    world.stores[0].fails = frozenset([fails])
    for _ in range(20):
        use()
    assert (len(caplog.messages), world.each[0].counters.num_rests) == (1, 20)
    world.stores[0].fails = frozenset()
    use()
    use()
    assert caplog.messages[1:] == ["the KV store a works again"]


def test_a_tier_that_gives_nothing_works_again_when_it_gives_something(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    world = World([1])
    for _ in range(5):
        late = world.load(1)
        late.is_given_up = True
        world.clock.now_s += LATENCY_S
        assert world.lookup(1) == 0
        world.clock.now_s += REST_S
        assert world.lookup(1) == 1
    assert (len(caplog.messages), world.each[0].counters.num_rests) == (1, 5)
    world.load(1)
    world.finish()
    assert caplog.messages[1:] == ["the KV store a works again"]
