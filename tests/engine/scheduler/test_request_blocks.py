"""Blocks of a request: how many it takes, which of them hold what is computed, and what it gives back."""

from __future__ import annotations

import numpy as np
import pytest

from baton.engine.cache.block_log import PublishedRun
from baton.engine.cache.block_pool import BlockPool
from baton.engine.cache.hashing import extend_hashes
from baton.engine.cache.offload import KvOffload
from baton.engine.cache.store import StoredBlock, TierCounters, checksum_of
from baton.engine.cache.tiered_pool import TieredPool
from baton.engine.cache.tiers import Tier, Tiers
from baton.engine.scheduler.request import BlockCopy, Request
from baton.engine.scheduler.request_blocks import RequestBlocks
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey
from baton.wire.sampling import DecodingParams
from baton.wire.tiers import TierTokens
from tests.engine.scheduler.simulation import Device
from tests.engine.scheduler.stores import Clock, SlotBytes, TestStore
from tests.request_keys import A, B


def request(num_tokens: int, key: RequestKey = A, first: int = 100) -> Request:
    return Request(key, Prompt.of(range(first, first + num_tokens)), DecodingParams(), b"root", 999)


def blocks_of(num_blocks: int, *, has_states: bool = False) -> tuple[RequestBlocks, BlockPool]:
    pool = BlockPool(num_blocks)
    return RequestBlocks(pool, 4, has_states=has_states), pool


def computed(blocks: RequestBlocks, num_tokens: int, key: RequestKey = A) -> Request:
    """A request that has taken its blocks, computed and published them."""
    found = request(num_tokens, key)
    assert blocks.take_for(found)
    blocks.publish(found, num_tokens)
    return found


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1), (4, 1), (5, 2), (8, 2)])
def test_a_request_takes_a_block_for_each_four_tokens_that_are_begun(num_tokens: int, num_blocks: int) -> None:
    blocks, pool = blocks_of(num_blocks)
    found = request(num_tokens)
    assert blocks.num_missing(found) == num_blocks
    assert not blocks.has_room(found)
    assert blocks.take_for(found)
    assert (len(found.block_table), blocks.num_available, blocks.num_missing(found)) == (num_blocks, 0, 0)
    assert (blocks.has_room(found), found.num_computed_tokens, found.num_cached_tokens) == (True, 0, 0)
    blocks, _ = blocks_of(num_blocks - 1)
    assert not blocks.take_for(other := request(num_tokens))
    assert (len(other.block_table), other.num_cached_tokens) == (0, None)
    assert pool.num_held == num_blocks


def test_what_is_published_is_found_again_but_for_the_last_token() -> None:
    blocks, pool = blocks_of(8)
    first = computed(blocks, 9)
    assert first.num_published_blocks == 2
    again = request(8, B)
    assert blocks.take_for(again)
    assert (again.num_computed_tokens, again.num_cached_tokens, again.num_published_blocks) == (4, 4, 1)
    assert (again.block_table[0], len(again.block_table)) == (first.block_table[0], 2)
    pool.check(dict.fromkeys([*first.block_table, *again.block_table], 1) | {again.block_table[0]: 2})


def test_a_log_hears_of_published_blocks_with_their_tokens_and_the_block_before_them() -> None:
    blocks, _ = blocks_of(8)
    runs: list[PublishedRun] = []
    blocks.on_published = runs.append
    found = request(13)
    assert blocks.take_for(found)
    for num_computed in (3, 4, 5, 13):
        blocks.publish(found, num_computed)
    hashes = found.block_hashes
    assert runs == [
        PublishedRun(found.prompt, 0, None, hashes[:1], [*range(100, 104)]),
        PublishedRun(found.prompt, 1, hashes[0], hashes[1:3], [*range(104, 112)]),
    ]


def test_a_request_that_was_preempted_keeps_the_count_of_its_first_admission() -> None:
    blocks, pool = blocks_of(8)
    first = computed(blocks, 9)
    blocks.release_all(first)
    assert (list(first.block_table), first.num_computed_tokens, first.num_published_blocks) == ([], 0, 0)
    assert pool.num_held == 0
    assert blocks.take_for(first)
    assert (first.num_computed_tokens, first.num_cached_tokens) == (8, 0)


def test_tokens_of_an_earlier_output_are_no_cached_prompt() -> None:
    blocks, _ = blocks_of(8)
    computed(blocks, 9)
    resumed = Request(B, Prompt.of(range(100, 106)), DecodingParams(), b"root", 999, range(106, 109))
    assert blocks.take_for(resumed)
    assert (resumed.num_computed_tokens, resumed.num_cached_tokens) == (8, 6)


def test_tokens_of_an_earlier_output_are_no_prompt_of_a_tier_either() -> None:
    resumed = Request(B, Prompt.of(range(100, 106)), DecodingParams(), b"root", 999, range(106, 114))
    stores, clock = [TestStore(), TestStore()], Clock()
    tiers = Tiers([Tier(str(place), store, TierCounters(), clock) for place, store in enumerate(stores)])
    offload = KvOffload(TieredPool(tiers, SlotBytes(Device(4))), 4, 64, lambda: None, clock)
    blocks = RequestBlocks(BlockPool(8, on_evicted=offload.evicted), 4, has_states=False, offload=offload)
    hashes: list[bytes] = []
    extend_hashes(hashes, resumed.token_ids, 4, b"root", ())
    for block_hash, tier in zip(hashes, (0, 1, 1), strict=False):
        content = np.zeros(32, dtype=np.uint8)
        stores[tier].blocks[block_hash] = StoredBlock(block_hash, checksum_of(block_hash, content), content)
    assert blocks.take_for(resumed)
    for store in (*stores, stores[0]):
        store.finish()
    blocks.end_load(resumed)
    assert (resumed.num_computed_tokens, resumed.num_cached_tokens) == (12, 6)
    assert resumed.tiers == (TierTokens("0", 4), TierTokens("1", 2))


def test_blocks_are_published_as_they_are_filled_and_each_once() -> None:
    blocks, pool = blocks_of(8)
    found = request(12)
    assert blocks.take_for(found)
    for num_computed, num_published in ((3, 0), (4, 1), (7, 1), (12, 3)):
        blocks.publish(found, num_computed)
        assert found.num_published_blocks == num_published
        assert list(pool.lookup(found.block_hashes[:num_published])) == list(found.block_table[:num_published])
    grown = request(6)
    assert blocks.take_for(grown)
    grown.token_ids += range(6)
    blocks.extend(grown)
    blocks.publish(grown, 12)
    assert (len(grown.block_hashes), len(grown.block_table), grown.num_published_blocks) == (3, 3, 3)


def test_a_fork_shares_full_blocks_and_copies_the_last() -> None:
    blocks, pool = blocks_of(4)
    source, fork = computed(blocks, 10), request(11, B)
    blocks.fork(fork, source, 10)
    assert list(fork.block_table[:2]) == list(source.block_table[:2])
    assert fork.block_copy == BlockCopy(source.block_table[2], fork.block_table[2])
    assert (fork.num_computed_tokens, fork.num_published_blocks, len(fork.block_hashes)) == (10, 2, 2)
    shared, (last,) = source.block_table[:2], source.block_table[2:]
    owners = dict.fromkeys(shared, 2) | {last: 2, fork.block_table[2]: 1}
    pool.check(owners)
    blocks.end_copy(fork)
    assert fork.block_copy is None
    pool.check(owners | {last: 1})
    blocks.end_copy(fork)
    pool.check(owners | {last: 1})


def test_a_fork_knows_no_more_published_blocks_than_its_source() -> None:
    blocks, _ = blocks_of(4)
    source, fork = request(8), request(9, B)
    assert blocks.take_for(source)
    blocks.publish(source, 4)
    blocks.fork(fork, source, 8)
    assert (fork.num_published_blocks, source.num_published_blocks) == (1, 1)


@pytest.mark.parametrize(("num_blocks", "has_states"), [(3, False), (4, True)])
def test_without_room_for_a_copy_and_where_blocks_hold_states_a_fork_gets_none(
    num_blocks: int, has_states: bool
) -> None:
    blocks, pool = blocks_of(num_blocks, has_states=has_states)
    source, fork = computed(blocks, 10), request(11, B)
    blocks.fork(fork, source, 10)
    assert (list(fork.block_table), fork.block_copy, fork.num_computed_tokens) == ([], None, 0)
    pool.check(dict.fromkeys(source.block_table, 1))


def test_a_request_that_leaves_gives_back_the_source_of_its_copy_too() -> None:
    blocks, pool = blocks_of(4)
    source, fork = computed(blocks, 10), request(11, B)
    blocks.fork(fork, source, 10)
    blocks.release_all(fork)
    assert fork.block_copy is None
    pool.check(dict.fromkeys(source.block_table, 1))
