"""One load, and the time that it is given. What becomes of requests is in `tests/engine/scheduler`."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from baton.engine.cache.block_pool import BlockPool
from baton.engine.cache.last_blocks import LastBlock, TimeLeft
from baton.engine.cache.load_choice import LEAST_BYTES_PER_S, LoadPlan
from baton.engine.cache.offload import KvOffload
from baton.engine.cache.store import LATENCY_S, BlockBytes, TierCounters
from baton.engine.cache.tiered_pool import MOST_AT_ONCE_BYTES, Load, OffloadCounters, TieredPool
from baton.engine.cache.tiers import Tier, Tiers
from baton.testing.kv_stores import BLOCK_BYTES, block_of, hash_of
from tests.engine.scheduler.stores import Clock, TestStore


class Pool:
    """Blocks of zeros, into which one can only write when a test lets it. See `PoolBytes`."""

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self.block_bytes = block_bytes
        self.blocks = np.zeros((4, BLOCK_BYTES), dtype=np.uint8)
        self.is_writing, self.may_write = threading.Event(), threading.Event()
        self.may_write.set()

    def read(self, block_id: int) -> BlockBytes:
        block: BlockBytes = self.blocks[block_id]
        return block

    def write(self, block_id: int, content: BlockBytes) -> BlockBytes:
        self.is_writing.set()
        assert self.may_write.wait(10.0)
        self.blocks[block_id] = content
        return self.read(block_id)


def offload_of(pool: Pool, clock: Clock | None = None, *stores: TestStore) -> KvOffload:
    """The engine's side of these stores, or of one; what computing takes is not known."""
    clock = clock or Clock()
    tiers = [Tier(str(place), store, TierCounters(), clock) for place, store in enumerate(stores or [TestStore()])]
    return KvOffload(TieredPool(Tiers(tiers), pool), 4, 64, lambda: None, clock)


def load_of(offload: KvOffload, numbers: Sequence[int], block_ids: Sequence[int]) -> Load:
    plan, hashes = LoadPlan(["test"] * len(numbers), 0.0, 0.0), [hash_of(each) for each in numbers]
    load = offload.load(plan, hashes, block_ids)
    assert isinstance(load, Load)
    return load


def test_a_block_that_came_is_not_written_again_whatever_the_store_says() -> None:
    pool = Pool()
    load = load_of(offload_of(pool), [1, 2], [3, 0])
    assert load.arrived(block_of(1))
    assert load.arrived(block_of(5)._replace(block_hash=hash_of(1)))
    assert load.arrived(block_of(7))
    assert pool.blocks[3].tobytes() == block_of(1).content.tobytes()
    assert not pool.blocks[:3].any()
    assert load.close() == 1


def test_who_closes_a_load_waits_for_the_block_that_is_being_written() -> None:
    pool = Pool()
    load = load_of(offload_of(pool), [1, 2], [0, 1])
    pool.may_write.clear()
    giving = threading.Thread(target=load.arrived, args=(block_of(1),))
    counted: list[int] = []
    closing = threading.Thread(target=lambda: counted.append(load.close()))
    giving.start()
    assert pool.is_writing.wait(10.0)
    closing.start()
    closing.join(0.2)
    assert counted == []
    pool.may_write.set()
    for thread in (giving, closing):
        thread.join(10.0)
    assert counted == [1]
    assert not load.arrived(block_of(2))
    assert not pool.blocks[1].any()


def test_a_load_has_time_for_its_bytes_and_for_those_of_the_loads_before_it() -> None:
    clock = Clock()
    store = TestStore({hash_of(each): block_of(each) for each in (1, 2, 3)})
    offload = offload_of(Pool(LEAST_BYTES_PER_S), clock, store)
    first = load_of(offload, [1, 2], [0, 1])
    second = load_of(offload, [3], [2])
    assert offload.num_loads == 2
    begun_s = clock.now_s
    for passed_s, are_over in ((1.9, (False, False)), (2.1, (True, False)), (2.9, (True, False)), (3.1, (True, True))):
        clock.now_s = begun_s + LATENCY_S + passed_s
        assert (first.is_over, second.is_over) == are_over
    assert offload.num_loads == 0
    assert (offload.end(first), offload.end(second)) == ([], [])
    assert offload.counters.num_late_loads == 2


def test_of_several_tiers_only_that_is_left_alone_which_was_late() -> None:
    clock, stores = Clock(), [TestStore({hash_of(each): block_of(each)}) for each in (1, 2)]
    offload = offload_of(Pool(), clock, *stores)
    late = load_of(offload, [2], [0])
    clock.now_s += 2 * LATENCY_S
    assert late.is_over
    assert offload.end(late) == []
    assert offload.plan([hash_of(1)], 0, 5) is not None
    assert offload.plan([hash_of(2)], 0, 5) is None
    assert (offload.counters.num_late_loads, offload.tiers[1].counters.num_silent_loads) == (1, 1)


def test_what_is_overwritten_is_saved_once_unless_a_tier_has_it() -> None:
    stores = [TestStore(), TestStore({hash_of(2): block_of(2)})]
    offload = offload_of(Pool(), None, *stores)
    assert offload.counters == OffloadCounters(*[0] * 10)
    offload.evicted([(0, hash_of(1)), (1, hash_of(2))])
    offload.overwriting([0, 1])
    offload.overwriting([0, 1])
    assert (offload.counters.num_stored_blocks, offload.counters.num_dropped_blocks) == (1, 0)
    assert list(stores[0].blocks) == [hash_of(1)]
    stores[0].fails = stores[1].fails = frozenset(["put"])
    offload.evicted([(0, hash_of(3))])
    offload.overwriting([0])
    assert (offload.counters.num_stored_blocks, offload.counters.num_dropped_blocks) == (1, 1)


def test_nothing_is_saved_behind_the_end() -> None:
    offload = offload_of(Pool(), None, store := TestStore())
    offload.evicted([(0, hash_of(1))])
    offload.close()
    offload.overwriting([0])
    assert (store.is_closed, store.num_puts, offload.has_unsaved) == (True, 0, False)


def test_before_the_end_what_was_used_again_is_kept_first() -> None:
    class Lasting(TestStore):
        def keep_last(self, blocks: Sequence[LastBlock], time_left_s: TimeLeft) -> None:
            kept.extend(each.read().block_hash for each in blocks)

    kept: list[bytes] = []
    blocks = BlockPool(4)
    for number, block_id in enumerate(blocks.allocate(3)):
        blocks.publish(block_id, hash_of(number))
        blocks.release([block_id])
    blocks.share(found := blocks.lookup([hash_of(1)]))
    blocks.release(found)
    offload_of(Pool(), None, Lasting()).save(blocks, lambda: 1.0)
    assert kept == [hash_of(each) for each in (1, 2, 0)]


def test_of_large_blocks_that_are_given_away_one_is_saved() -> None:
    offload = offload_of(Pool(2 * MOST_AT_ONCE_BYTES), None, store := TestStore())
    offload.evicted([(number, hash_of(number)) for number in range(3)])
    offload.give_away([0, 1, 2])
    assert list(store.blocks) == [hash_of(0)]
    assert (offload.counters.num_stored_blocks, offload.counters.num_dropped_blocks) == (1, 2)
    assert not offload.has_unsaved


def test_tokens_that_are_asked_for_and_found_are_those_of_whole_blocks() -> None:
    offload = offload_of(Pool(), None, TestStore({hash_of(1): block_of(1)}))
    hashes = [hash_of(each) for each in (1, 2, 3)]
    plan = offload.plan(hashes, 0, 13)
    assert plan is not None
    load = offload.load(plan, hashes[:1], [0])
    assert isinstance(load, Load)
    assert load.arrived(block_of(1))
    load.ended()
    assert offload.end(load) == ["0"]
    assert (offload.counters.num_queried_tokens, offload.counters.num_loaded_tokens) == (12, 4)
