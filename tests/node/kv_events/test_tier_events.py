"""What is said about the blocks of tiers: the same of each medium as a reader could see for itself."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from baton.engine.cache.block_changes import BlockChanges
from baton.node.kv_events import tier_events
from baton.node.kv_events.events import BlockCounters, BlockRemoved, BlockStored, Event, EventBatch, PoolEvents
from baton.node.kv_events.tier_events import TierEvents
from tests.node.kv_events.reader import View
from tests.node.kv_events.test_events import PLAIN, SIZE, hash_of, run_of, told


class World:
    """A reader of what is told of a pool and two tiers."""

    def __init__(self, max_homeless: int = 100) -> None:
        self.view = View()
        self.pool = PoolEvents(SIZE, {})
        self.host, self.disk = BlockChanges(), BlockChanges()
        self.counters = BlockCounters()
        self.events = TierEvents({"CPU": self.host, "STORAGE": self.disk}, max_homeless, self.counters)

    def tell(self, first: int = 0, count: int = 0, removed: Sequence[int] = ()) -> list[Event]:
        """These blocks came into the pool, and those left it; what is told of the tiers."""
        pool_events = told(self.pool, *[run_of(first, count)] * bool(count), removed=[*map(hash_of, removed)])
        behind = self.events.behind(pool_events)
        self.view.apply(msgspec.msgpack.encode(EventBatch(1.0, [*pool_events, *behind])))
        return behind

    def seen(self, medium: str) -> list[int]:
        return sorted(self.view.media[medium])


def test_a_block_that_goes_down_is_told_of_with_its_tokens_and_its_parent() -> None:
    world = World()
    world.tell(0, 3)
    world.tell(removed=[0, 1, 2])
    assert world.seen("GPU") == []
    world.host.came([hash_of(1)])
    world.tell()
    world.disk.came([hash_of(2)])
    world.tell()
    assert (world.seen("CPU"), world.seen("STORAGE")) == ([1], [2])
    for medium, number in (("CPU", 1), ("STORAGE", 2)):
        block = world.view.media[medium][number]
        assert (block.parent, block.token_ids) == (number - 1, PLAIN.token_ids[number * SIZE : (number + 1) * SIZE])
    world.host.left([hash_of(1)])
    world.tell()
    assert world.seen("CPU") == []
    assert (world.counters.num_stored, world.counters.num_removed) == (2, 1)


def test_a_block_on_its_way_from_tier_to_tier_is_known_behind_it() -> None:
    world = World()
    world.tell(0, 1)
    world.host.came([hash_of(0)])
    world.tell(removed=[0])
    world.host.left([hash_of(0)])
    world.tell()
    world.disk.came([hash_of(0)])
    world.tell()
    assert (world.seen("GPU"), world.seen("CPU"), world.seen("STORAGE")) == ([], [], [0])


def test_of_what_was_never_in_the_pool_nobody_is_told_until_it_is() -> None:
    world = World()
    world.disk.came([hash_of(0), hash_of(1)])
    assert world.tell() == []
    world.disk.left([hash_of(1)])
    assert world.tell() == []
    assert [type(each) for each in world.tell(0, 2)] == [BlockStored]
    assert world.seen("STORAGE") == [0]
    assert world.tell(removed=[0, 1]) == []
    world.tell(0, 1)  # it is told of once, however often it comes back
    assert world.counters.num_stored == 1


def test_no_more_than_a_pool_of_blocks_is_waited_for() -> None:
    world = World(max_homeless=2)
    world.tell(0, 4)
    world.tell(removed=[0, 1, 2, 3])
    world.host.came([hash_of(0), hash_of(3)])  # what was waited for too long is not told of, and not said to have left
    world.tell()
    assert world.seen("CPU") == [3]
    world.host.left([hash_of(0), hash_of(3)])
    assert world.tell() == [BlockRemoved([3], "CPU")]


def test_what_came_into_a_tier_is_not_among_those_on_their_way() -> None:
    world = World(max_homeless=1)
    world.tell(0, 3)
    world.tell(removed=[0])
    world.host.came([hash_of(0)])
    world.tell()
    world.tell(removed=[1, 2])
    world.host.left([hash_of(0)])
    assert world.tell() == [BlockRemoved([0], "CPU")]


def test_a_folder_that_is_large_is_told_of_bit_by_bit() -> None:
    world = World()
    world.disk.came(map(hash_of, range(tier_events.MOST_AT_ONCE)))
    world.disk.came(map(hash_of, range(10_000, 10_002)))
    world.tell()
    assert world.disk.take(10) == [(hash_of(10_000), True), (hash_of(10_001), True)]


def test_whatever_comes_and_leaves_a_reader_knows_it_of_each_medium() -> None:
    draw, world = random.Random(3), World()
    world.tell(0, 5)
    held: dict[str, set[int]] = {"GPU": {*range(5)}, "CPU": set(), "STORAGE": set()}
    tiers = {"CPU": world.host, "STORAGE": world.disk}
    for _ in range(2_000):
        number, medium = draw.randrange(5), draw.choice([*held])
        has_come = number not in held[medium]
        held[medium] ^= {number}
        if medium != "GPU":
            (tiers[medium].came if has_come else tiers[medium].left)([hash_of(number)])
        elif has_come:
            world.tell(number, 1)
        else:
            world.tell(removed=[number])
        if draw.random() < 0.5:
            world.tell()
            assert {each: world.seen(each) for each in held} == {each: sorted(held[each]) for each in held}
