"""A rank that is not the first does with its blocks what it is told, and says what of a load is there and right."""

from __future__ import annotations

import numpy as np
import pytest

from baton.engine.cache.store import TierCounters
from baton.engine.cache.tiered_pool import TieredPool
from baton.engine.cache.tiers import Tier, Tiers
from baton.ranks.executor import following_tiers
from baton.ranks.executor.following_tiers import FollowingTiers
from baton.ranks.executor.messages import BeginLoad, Came, Compute, Drop, EndLoad, Evicted, Report, Save, Saved
from baton.runtime.channel import ChannelBroken
from baton.testing.kv_stores import block_of, hash_of
from tests.engine.cache.test_offload import Pool
from tests.engine.scheduler.stores import TestStore

LOAD = BeginLoad(5, (hash_of(1), hash_of(2)), (3, 0))


class Rank:
    """A rank whose store has the blocks 1 and 2, and what it has said."""

    def __init__(self) -> None:
        self.store = TestStore({hash_of(each): block_of(each) for each in (1, 2)})
        self.pool = Pool()
        self.said: list[Report] = []
        tiers = Tiers([Tier("test", self.store, TierCounters())])
        self.tiers = FollowingTiers(TieredPool(tiers, self.pool), self.said.append)


def test_evicted_blocks_are_saved_or_dropped_as_the_driver_says() -> None:
    rank = Rank()
    rank.pool.blocks[1] = 7
    assert rank.tiers.take(Evicted((1, 2), (hash_of(7), hash_of(8))))
    assert rank.tiers.take(Drop((2,)))
    assert rank.tiers.take(Save(4, (1, 2)))
    assert rank.said == [Saved(4)]
    assert (rank.store.blocks[hash_of(7)].content == 7).all()
    assert hash_of(8) not in rank.store.blocks
    assert not rank.tiers.take(Compute((), b"", (), b""))


def test_what_a_load_overwrites_is_saved_before() -> None:
    rank = Rank()
    rank.pool.blocks[3] = 7
    rank.tiers.take(Evicted((3, 0), (hash_of(7), hash_of(8))))
    rank.tiers.take(LOAD)
    rank.store.give(rank.store.orders[0])
    assert (rank.store.blocks[hash_of(7)].content == 7).all()
    rank.tiers.take(EndLoad(5))
    rank.tiers.take(Save(6, (3, 0)))
    assert not rank.store.blocks[hash_of(8)].content.any()
    assert (rank.store.blocks[hash_of(7)].content == 7).all(), "the block of a load is not what was evicted"


def test_of_a_load_it_says_what_is_there_and_once_that_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following_tiers, "_TELLS_S", 0.0)
    rank = Rank()
    rank.tiers.take(LOAD)
    rank.store.finish()
    rank.tiers.take(EndLoad(5))
    assert rank.said == [Came(5, 1, False, False), Came(5, 2, False, False), Came(5, 2, True, False)]
    assert rank.pool.blocks[3].tobytes() == block_of(1).content.tobytes()
    assert rank.pool.blocks[0].tobytes() == block_of(2).content.tobytes()


def test_blocks_that_come_together_are_told_together() -> None:
    rank = Rank()
    rank.tiers.take(LOAD)
    rank.store.finish()
    assert rank.said[-1] == Came(5, 2, True, False)


def test_after_the_end_of_a_load_nothing_is_written_for_it() -> None:
    rank = Rank()
    rank.tiers.take(LOAD)
    order = rank.store.orders[0]
    rank.tiers.take(EndLoad(5))
    assert rank.said == [Came(5, 0, True, False)]
    assert not rank.store.give(order)
    rank.store.end(order)
    assert not rank.pool.blocks.any()
    assert rank.said == [Came(5, 0, True, False)]


def test_a_damaged_block_ends_its_load_and_is_forgotten() -> None:
    rank = Rank()
    damaged = block_of(2).content.copy()
    damaged[3] ^= 16
    rank.store.blocks[hash_of(2)] = block_of(2)._replace(content=np.asarray(damaged))
    rank.tiers.take(LOAD)
    rank.store.finish()
    assert rank.said[-1] == Came(5, 1, True, True)
    rank.tiers.take(EndLoad(5))
    assert rank.store.forgotten == [hash_of(2)]


def test_the_end_closes_what_is_open() -> None:
    rank = Rank()
    rank.tiers.take(LOAD)
    rank.tiers.close()
    assert (rank.said, rank.store.is_closed) == ([Came(5, 0, True, False)], True)


def test_the_end_of_an_unknown_load_ends_the_rank() -> None:
    with pytest.raises(ChannelBroken, match="has not begun"):
        Rank().tiers.take(EndLoad(1))
