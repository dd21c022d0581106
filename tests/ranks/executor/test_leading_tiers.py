"""What the driver tells other ranks of blocks and loads, and what it makes of their reports."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import pytest

from baton.device.base import DeviceFailed
from baton.engine.cache.store import TierCounters
from baton.engine.cache.tiered_pool import TieredPool
from baton.engine.cache.tiers import Tier, Tiers
from baton.ranks.executor.leading_tiers import LeadingTiers, RanksLoad
from baton.ranks.executor.messages import BeginLoad, Came, Drop, EndLoad, Evicted, Order, Save, Saved
from baton.testing.kv_stores import block_of, hash_of
from tests.engine.cache.test_offload import Pool
from tests.engine.scheduler.stores import TestStore

_WAIT_S = 30.0


class Others:
    """The other ranks of a node, as its driver sees them. `orders`: what they were told."""

    def __init__(self) -> None:
        self.orders: list[Order] = []
        self.report: Callable[[int, Came | Saved], None] = lambda number, report: None
        self.is_waited_for = threading.Event()
        self.failure = ""

    def tell_all(self, order: Order) -> None:
        if self.failure:
            raise DeviceFailed(self.failure)
        self.orders.append(order)

    def hear(self, of_tiers: Callable[[int, Came | Saved], None]) -> None:
        self.report = of_tiers

    def require_alive(self) -> None:
        if self.failure:
            raise DeviceFailed(self.failure)

    def within(self, limit_s: float) -> AbstractContextManager[None]:
        self.is_waited_for.set()
        return nullcontext()


class Noted:
    """See `Progress`: what a load has told."""

    def __init__(self) -> None:
        self.places: list[int] = []
        self.is_over = self.is_damaged = False

    def arrived(self, place: int) -> None:
        self.places.append(place)

    def damaged(self) -> None:
        self.is_damaged = True

    def ended(self) -> None:
        self.is_over = True


class Driver:
    """The tiers of three ranks, of which this one's store has the blocks 1 to 3, and what happens to them."""

    def __init__(self) -> None:
        self.store = TestStore({hash_of(each): block_of(each) for each in (1, 2, 3)})
        self.pool = Pool()
        self.others = Others()
        own = TieredPool(Tiers([Tier("test", self.store, TierCounters())]), self.pool)
        self.tiers = LeadingTiers(own, self.others, 3)
        self.progress = Noted()

    def load(self, block_ids: Sequence[int] = (0, 1, 2)) -> RanksLoad:
        return self.tiers.load([hash_of(each + 1) for each in range(len(block_ids))], block_ids, self.progress)

    def came(self, rank: int, num_blocks: int, *, has_ended: bool = False, is_damaged: bool = False) -> None:
        self.others.report(rank, Came(1, num_blocks, has_ended, is_damaged))


def test_ranks_hear_of_evicted_blocks_before_these_are_saved_and_of_others_not() -> None:
    driver = Driver()
    driver.tiers.evicted([(0, hash_of(7)), (1, hash_of(8))])
    assert driver.tiers.has_unsaved
    driver.tiers.save([1, 3])
    driver.tiers.save([1, 3])
    driver.tiers.give_away([0, 2])
    assert not driver.tiers.has_unsaved
    assert driver.others.orders == [Evicted((0, 1), (hash_of(7), hash_of(8))), Save(1, (1,)), Drop((0,))]
    assert (hash_of(8) in driver.store.blocks, hash_of(7) in driver.store.blocks) == (True, False)


def test_what_a_load_has_written_over_here_may_be_unsaved_at_another_rank() -> None:
    driver = Driver()
    driver.tiers.evicted([(0, hash_of(7))])
    load = driver.load()
    driver.store.finish()
    assert load.close() == 0
    driver.tiers.save([0])
    assert driver.others.orders == [
        Evicted((0,), (hash_of(7),)),
        BeginLoad(1, tuple(hash_of(each) for each in (1, 2, 3)), (0, 1, 2)),
        EndLoad(1),
        Save(2, (0,)),
    ]
    assert driver.store.blocks[hash_of(7)].content.any() == 0


def test_a_load_comes_as_far_as_at_the_slowest_rank() -> None:
    driver = Driver()
    load = driver.load()
    driver.came(1, 2)
    driver.store.finish()
    assert (driver.progress.places, load.is_over) == ([], False)
    driver.came(2, 1)
    assert driver.progress.places == [0]
    driver.came(2, 3, has_ended=True)
    assert (driver.progress.places, load.is_over) == ([0, 1], False)
    driver.came(1, 3, has_ended=True)
    assert (driver.progress.places, load.is_over, load.in_use.is_over) == ([0, 1, 2], True, True)
    assert load.close() == 3


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_load_is_over_when_one_rank_has_no_more(is_damaged: bool) -> None:
    driver = Driver()
    load = driver.load()
    driver.store.give(driver.store.orders[0], 2)
    driver.came(1, 1, has_ended=True, is_damaged=is_damaged)
    assert not load.is_over
    driver.came(2, 2)
    assert (load.is_over, load.in_use.is_over, driver.progress.is_damaged) == (True, False, is_damaged)
    assert load.close() == 1
    driver.came(2, 3, has_ended=True)
    assert (driver.progress.places, load.close()) == ([0], 1), "what comes after the end does not count"


def test_blocks_go_to_another_node_when_no_rank_writes_into_them() -> None:
    driver = Driver()
    load = driver.load()
    load.close()
    driver.came(1, 0, has_ended=True)
    driver.tiers.give_away([3])
    assert not driver.others.is_waited_for.is_set()
    giving = threading.Thread(target=driver.tiers.give_away, args=([1],))
    giving.start()
    assert driver.others.is_waited_for.wait(_WAIT_S)
    giving.join(0.05)
    assert giving.is_alive()
    driver.came(2, 0, has_ended=True)
    giving.join(_WAIT_S)
    assert not giving.is_alive()


def test_blocks_go_to_another_node_when_every_rank_has_saved_them() -> None:
    driver = Driver()
    driver.tiers.evicted([(0, hash_of(7)), (1, hash_of(8))])
    driver.tiers.save([0])
    driver.others.report(1, Saved(1))
    giving = threading.Thread(target=driver.tiers.give_away, args=([0],))
    giving.start()
    assert driver.others.is_waited_for.wait(_WAIT_S)
    giving.join(0.05)
    assert giving.is_alive()
    driver.others.report(2, Saved(1))
    giving.join(_WAIT_S)
    assert not giving.is_alive()


def test_nobody_waits_for_a_rank_that_is_gone() -> None:
    driver = Driver()
    driver.load().close()
    driver.others.failure = "rank 1 of 3 was killed"
    with pytest.raises(DeviceFailed, match="rank 1 of 3 was killed"):
        driver.tiers.give_away([1])
    driver.tiers.evicted([(0, hash_of(7))])
    driver.tiers.save([0])  # the node ends where it looks at its ranks
