from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.engine.cache.block_pool import BlockPool, NoFreeBlocks


def block_hash(number: int) -> bytes:
    return number.to_bytes(16, "little")


class BlockPoolMachine(RuleBasedStateMachine):
    """Drives a pool and a model of it that is as simple as can be: a list in eviction order and a few dicts."""

    @initialize(num_blocks=st.integers(1, 12))
    def begin(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.eviction_order = list(range(num_blocks))
        self.owners = [0] * num_blocks
        self.generations = [0] * num_blocks
        self.hash_of: dict[int, bytes] = {}
        self.sequences: list[list[int]] = []
        self.reported: set[bytes] = set()

    @rule(count=st.integers(0, 6))
    def allocate(self, count: int) -> None:
        if count > len(self.eviction_order):
            with pytest.raises(NoFreeBlocks):
                self.pool.allocate(count)
            return
        num_oldest = max(count, len(self.eviction_order) // 4) if count > 1 else count
        oldest = self.eviction_order[:num_oldest]
        taken = self.pool.allocate(count)
        assert len(taken) == count
        assert taken == sorted(set(taken) & set(oldest))
        self.eviction_order = [block_id for block_id in self.eviction_order if block_id not in taken]
        for block_id in taken:
            self.hash_of.pop(block_id, None)
            self.owners[block_id] = 1
            self.generations[block_id] += 1
        self.sequences.append(taken)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        sequence = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        self.pool.release(sequence)
        for block_id in reversed(sequence):
            self.owners[block_id] -= 1
            if self.owners[block_id] == 0:
                place = len(self.eviction_order) if block_id in self.hash_of else 0
                self.eviction_order.insert(place, block_id)

    @precondition(lambda self: any(self.sequences))
    @rule(data=st.data(), number=st.integers(0, 6))
    def publish(self, data: st.DataObject, number: int) -> None:
        block_id = data.draw(st.sampled_from([block_id for sequence in self.sequences for block_id in sequence]))
        self.pool.publish(block_id, block_hash(number))
        if block_id not in self.hash_of and block_hash(number) not in self.hash_of.values():
            self.hash_of[block_id] = block_hash(number)

    @rule(numbers=st.lists(st.integers(0, 6), max_size=4, unique=True))
    def reuse_a_prefix(self, numbers: list[int]) -> None:
        leads_to = {found: block_id for block_id, found in self.hash_of.items()}
        expected = []
        for number in numbers:
            if block_hash(number) not in leads_to:
                break
            expected.append(leads_to[block_hash(number)])
        assert self.pool.lookup([block_hash(number) for number in numbers]) == expected
        available = [block_id for block_id in self.eviction_order if block_id not in expected]
        assert self.pool.num_available_beside(expected) == len(available)
        self.pool.share(expected)
        self.eviction_order = available
        for block_id in expected:
            self.owners[block_id] += 1
        self.sequences.append(expected)

    @rule()
    def report(self) -> None:
        changes = self.pool.take_changes()
        assert not set(changes.stored) & set(changes.removed)
        self.reported |= set(changes.stored)
        self.reported -= set(changes.removed)
        assert self.reported == set(self.pool.published_hashes())

    @invariant()
    def counts_add_up(self) -> None:
        self.pool.check()
        pool = self.pool
        assert pool.num_free + pool.num_cached + pool.num_held == pool.num_blocks
        assert pool.num_available == len(self.eviction_order)
        assert pool.num_held == sum(owners > 0 for owners in self.owners)
        assert pool.num_cached == sum(block_id in self.hash_of for block_id in self.eviction_order)
        assert [pool.generation(block_id) for block_id in range(pool.num_blocks)] == self.generations
        assert set(pool.published_hashes()) == set(self.hash_of.values())


BlockPoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, database=None)
TestBlockPoolAgainstItsModel = BlockPoolMachine.TestCase


def cached_prompt(pool: BlockPool, first_number: int, num_blocks: int) -> list[int]:
    """A prompt of some blocks, computed, published and released."""
    blocks = pool.allocate(num_blocks)
    for offset, block_id in enumerate(blocks):
        pool.publish(block_id, block_hash(first_number + offset))
    pool.release(blocks)
    return blocks


def test_the_tail_of_a_prompt_is_evicted_before_its_head() -> None:
    pool = BlockPool(4)
    cached_prompt(pool, 0, 4)
    pool.allocate(3)
    assert pool.lookup([block_hash(number) for number in range(4)]) == [0]


def test_the_least_recently_used_prompt_is_evicted_first() -> None:
    pool = BlockPool(4)
    old, new = cached_prompt(pool, 0, 2), cached_prompt(pool, 10, 2)
    pool.share(old)
    pool.release(old)
    pool.allocate(2)
    assert pool.lookup([block_hash(0), block_hash(1)]) == old
    assert pool.lookup([block_hash(10)]) == []
    assert new != old


def num_runs(block_ids: list[int]) -> int:
    return 1 + sum(1 for left, right in pairwise(block_ids) if right != left + 1)


def test_an_allocation_takes_neighbours_where_it_can() -> None:
    pool = BlockPool(64)
    singles = [pool.allocate(1) for _ in range(64)]
    for number, single in enumerate(singles):
        pool.publish(single[0], block_hash(number))
    # 0 .. 15 are evicted first, in an order that scatters them
    for block_id in [0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15, *range(16, 64)]:
        pool.release([block_id])
    first = pool.allocate(8)
    assert num_runs(first) == 1
    assert set(first) < set(range(16)), "only the oldest quarter is looked at"
    pool.check()


def test_in_churn_prompts_come_in_few_runs() -> None:
    chance, pool = random.Random(1), BlockPool(1024)
    live: list[list[int]] = []
    found: list[int] = []
    next_hash = itertools.count()
    for _ in range(800):
        while len(live) > 14:
            pool.release(live.pop(chance.randrange(len(live))))
        prompt = pool.allocate(chance.choice((4, 8, 16, 32, 32, 64)))
        found.append(num_runs(prompt))
        for block_id in prompt[:-1]:
            pool.publish(block_id, block_hash(next(next_hash)))
        live.append(prompt + pool.allocate(chance.randrange(3)))
    assert sum(found[200:]) / len(found[200:]) < 4
    pool.check()


def test_blocks_without_content_are_taken_before_cached_ones() -> None:
    pool = BlockPool(3)
    unnamed = pool.allocate(1)
    cached_prompt(pool, 0, 2)
    pool.release(unnamed)
    assert pool.allocate(1) == unnamed
    assert pool.num_cached == 2


def test_an_allocation_that_does_not_fit_takes_nothing() -> None:
    pool = BlockPool(2)
    with pytest.raises(NoFreeBlocks, match="3 blocks"):
        pool.allocate(3)
    assert pool.num_free == 2


def test_a_second_block_with_the_same_content_stays_unnamed() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.publish(first, block_hash(1))
    pool.publish(second, block_hash(1))
    pool.release([second])
    assert pool.lookup([block_hash(1)]) == [first]
    assert pool.num_free == 1


def test_without_prefix_caching_nothing_is_findable() -> None:
    pool = BlockPool(2, prefix_caching=False)
    cached_prompt(pool, 0, 2)
    assert pool.lookup([block_hash(0)]) == []
    assert pool.num_free == 2


def test_a_hash_stored_and_evicted_between_two_reports_is_not_reported() -> None:
    pool = BlockPool(1)
    cached_prompt(pool, 0, 1)
    assert pool.allocate(1)
    changes = pool.take_changes()
    assert (changes.stored, changes.removed) == ([], [])


def test_a_hash_evicted_and_computed_again_is_reported_as_findable() -> None:
    pool = BlockPool(1)
    cached_prompt(pool, 7, 1)
    pool.take_changes()
    pool.release(pool.allocate(1))
    cached_prompt(pool, 7, 1)
    assert block_hash(7) not in pool.take_changes().removed


def test_releasing_what_is_not_held_is_an_error() -> None:
    pool = BlockPool(1)
    with pytest.raises(RuntimeError, match="released more often"):
        pool.release([0])


def test_of_two_blocks_the_neighbours_are_taken_although_another_would_be_evicted_first() -> None:
    pool = BlockPool(64)
    held = pool.allocate(64)
    for number, block_id in enumerate(held):
        pool.publish(block_id, block_hash(number))
    for block_id in [1, 9, *range(20, 64)]:
        pool.release([block_id])
    assert pool.allocate(2) == [27, 28], "the end of the oldest quarter"


def test_a_hash_that_was_told_and_is_evicted_is_told_as_removed() -> None:
    pool = BlockPool(1)
    cached_prompt(pool, 0, 1)
    assert pool.take_changes().stored == [block_hash(0)]
    pool.allocate(1)
    assert pool.take_changes().removed == [block_hash(0)]


def no_owner(pool: BlockPool) -> None:
    pool._references[0] = 0


def a_free_block_with_an_owner(pool: BlockPool) -> None:
    pool._references[3] = 1


def one_owner_too_few(pool: BlockPool) -> None:
    pool._references[0] = -1


def a_hash_of_two_blocks(pool: BlockPool) -> None:
    pool._hashes[1] = pool._hashes[0]


def a_hash_that_leads_to_no_block_of_it(pool: BlockPool) -> None:
    pool._index[block_hash(9)] = 1


def a_cached_block_that_is_not_counted(pool: BlockPool) -> None:
    pool._num_cached -= 1


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (no_owner, "block 0: 0 references, on free list: False"),
        (a_free_block_with_an_owner, "block 3: 1 references, on free list: True"),
        (one_owner_too_few, "block 0: -1 references, on free list: False"),
        (a_hash_of_two_blocks, "block 1 carries a hash that leads elsewhere"),
        (a_hash_that_leads_to_no_block_of_it, "cached blocks counted"),
        (a_cached_block_that_is_not_counted, "1 cached blocks counted, 0 recorded"),
    ],
)
def test_what_is_wrong_in_a_pool_is_found(damage: Callable[[BlockPool], None], found: str) -> None:
    pool = BlockPool(4)
    first, _, third = pool.allocate(3)
    pool.publish(first, block_hash(0))
    pool.publish(third, block_hash(1))
    pool.release([third])
    pool.check()
    damage(pool)
    with pytest.raises(RuntimeError, match=found):
        pool.check()


def test_a_block_with_another_number_of_owners_than_expected_is_found() -> None:
    pool = BlockPool(2)
    (block_id,) = pool.allocate(1)
    pool.check({block_id: 1})
    with pytest.raises(RuntimeError, match="block 0 has 2 owners, 1 are counted"):
        pool.check({block_id: 2})
    with pytest.raises(RuntimeError, match="block 0 has 0 owners, 1 are counted"):
        pool.check({})


def test_who_wants_to_know_is_told_once_of_all_that_an_allocation_evicts_while_it_can_be_read() -> None:
    told: list[list[tuple[int, bytes]]] = []

    def note(evicted: Sequence[tuple[int, bytes]]) -> None:
        told.append(list(evicted))

    pool = BlockPool(4, on_evicted=note)
    blocks = cached_prompt(pool, 0, 3)
    pool.allocate(1)
    assert told == []
    pool.allocate(2)
    assert told == [[(blocks[1], block_hash(1)), (blocks[2], block_hash(2))]]
    with pytest.raises(NoFreeBlocks):
        pool.allocate(2)
    assert len(told) == 1
    pool.check()


def test_findable_blocks_are_in_the_order_of_worth() -> None:
    pool = BlockPool(8)
    first, second = pool.allocate(3), pool.allocate(2)
    for number, block_id in enumerate([*first[:2], *second]):
        pool.publish(block_id, block_hash(number))
    pool.release(first)
    pool.release(second)
    hashes = [block_hash(number) for number in range(4)]
    by_hash = dict(zip(hashes, [*first[:2], *second], strict=True))
    assert pool.findable_blocks() == ([], [(by_hash[hashes[number]], hashes[number]) for number in (2, 3, 0, 1)])
    pool.share([by_hash[hashes[1]], by_hash[hashes[3]]])
    pool.release([by_hash[hashes[1]]])  # the other one has an owner still
    reused, others = pool.findable_blocks()
    assert [known for _, known in reused] == [hashes[3], hashes[1]]
    assert [known for _, known in others] == [hashes[2], hashes[0]]
    pool.release([by_hash[hashes[3]]])
    taken = pool.allocate(8)  # all are evicted, and what was used again before is not so any more
    for number, block_id in enumerate(taken):
        pool.publish(block_id, block_hash(number))
    reused, others = pool.findable_blocks()
    assert (len(reused), len(others)) == (0, 8)


class GrowingPool:
    """A pool whose blocks get their memory late, and which have it."""

    def __init__(self, num_blocks: int) -> None:
        self.given: list[int] = []
        self.pool = BlockPool(num_blocks, give_memory=lambda first, end: self.given.extend(range(first, end)))


def test_blocks_get_their_memory_in_order_and_before_they_are_handed_out() -> None:
    growing = GrowingPool(12)
    pool = growing.pool
    assert (pool.num_free, pool.num_available, pool.num_held) == (12, 12, 0)
    assert pool.grow(2)
    assert growing.given == [0, 1]
    assert pool.allocate(3) == growing.given == [0, 1, 2]
    assert (pool.num_free, pool.num_available, pool.num_held) == (9, 9, 3)
    pool.release([0, 1, 2])
    assert sorted(pool.allocate(2)) != growing.given == [0, 1, 2]
    assert pool.num_available_beside([0, 1, 2]) == 9
    pool.check()
    assert pool.grow(100)
    assert growing.given == list(range(12))
    assert not pool.grow(1)
    with pytest.raises(NoFreeBlocks):
        pool.allocate(11)
    assert len(pool.allocate(10)) == 10
    pool.check()


def test_a_block_gets_memory_before_a_cached_one_is_evicted() -> None:
    pool = GrowingPool(4).pool
    cached = pool.allocate(2)
    for block_id in cached:
        pool.publish(block_id, block_hash(block_id))
    pool.release(cached)
    assert (pool.num_cached, pool.num_free) == (2, 2)
    assert pool.allocate(1) == [2]
    assert pool.lookup([block_hash(0), block_hash(1)]) == [0, 1]
    pool.allocate(2)
    assert (pool.num_cached, pool.num_given) == (1, 4)
    pool.check()


def test_an_owner_of_a_block_without_memory_is_found() -> None:
    pool = GrowingPool(4).pool
    pool.allocate(2)
    pool.num_given = 1
    with pytest.raises(RuntimeError):
        pool.check()
