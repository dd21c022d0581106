from __future__ import annotations

import math

import numpy as np
import pytest

from baton.kvtransfer.arrived import ArrivedBlocks
from baton.kvtransfer.integrity import DOT64, XXH3
from baton.kvtransfer.pools.base import Checksums
from baton.kvtransfer.pools.host import HostPool
from baton.kvtransfer.transports.base import Blocks
from tests.kvtransfer.late_stream import late_pool

_BLOCK_IDS = (7, 2, 5, 0)


@pytest.fixture
def blocks() -> Blocks:
    return np.random.default_rng(2).integers(0, 256, (8, 64), dtype=np.uint8)


def sent(blocks: Blocks, kind: str = XXH3) -> list[int]:
    return list(HostPool(blocks).checksums(kind).begin(_BLOCK_IDS).take() or ())


def hashed(blocks: Blocks) -> Checksums:
    return HostPool(blocks).checksums(XXH3)


def hash_all(arrived: ArrivedBlocks, computer: Checksums) -> int:
    """Hash until everything is hashed; returns how many calls that took."""
    for number in range(1, 100):
        arrived.hash(computer, _BLOCK_IDS, math.inf)
        if arrived.is_hashed:
            return number
    raise AssertionError("checksums never come")


def test_blocks_arrive_in_any_order_and_each_counts_once(blocks: Blocks) -> None:
    arrived = ArrivedBlocks(4, checksums=True)
    arrived.note([2])
    arrived.note([2, 0])
    assert arrived.num_missing == 2
    arrived.note_rest()
    assert arrived.num_missing == 0
    assert not arrived.is_hashed
    arrived.hash(hashed(blocks), _BLOCK_IDS, math.inf)
    assert arrived.is_hashed
    assert arrived.damaged(sent(blocks)) == []


def test_a_slice_of_time_hashes_at_least_one_block(blocks: Blocks) -> None:
    arrived = ArrivedBlocks(4, checksums=True)
    arrived.note_rest()
    for _ in range(3):
        arrived.hash(hashed(blocks), _BLOCK_IDS, 0.0)
        assert not arrived.is_hashed
    arrived.hash(hashed(blocks), _BLOCK_IDS, 0.0)
    assert arrived.is_hashed


def test_damage_is_named_by_its_place_in_the_grant(blocks: Blocks) -> None:
    arrived, checksums = ArrivedBlocks(4, checksums=True), sent(blocks)
    arrived.note_rest()
    blocks[5, 10] ^= 1
    arrived.hash(hashed(blocks), _BLOCK_IDS, math.inf)
    assert arrived.damaged(checksums) == [2]
    assert arrived.damaged([checksums[1], checksums[0], *checksums[2:]]) == [0, 1, 2]


def test_a_block_that_is_sent_again_is_missing_until_it_arrives_and_is_hashed_again(blocks: Blocks) -> None:
    arrived, checksums = ArrivedBlocks(4, checksums=True), sent(blocks)
    blocks[5, 10] ^= 1
    arrived.note_rest()
    arrived.hash(hashed(blocks), _BLOCK_IDS, math.inf)
    arrived.expect_again([2])
    assert arrived.num_missing == 1
    blocks[5, 10] ^= 1
    arrived.note([2])
    arrived.hash(hashed(blocks), _BLOCK_IDS, math.inf)
    assert arrived.damaged(checksums) == []


def test_a_block_that_arrives_again_is_hashed_again(blocks: Blocks) -> None:
    arrived, checksums = ArrivedBlocks(4, checksums=True), sent(blocks)
    arrived.note_rest()
    arrived.hash(hashed(blocks), _BLOCK_IDS, math.inf)
    blocks[0] = 0
    assert arrived.damaged(checksums) == []
    arrived.note([3])
    arrived.hash(hashed(blocks), _BLOCK_IDS, math.inf)
    assert arrived.damaged(checksums) == [3]


def test_without_checksums_blocks_are_not_verified(blocks: Blocks) -> None:
    arrived = ArrivedBlocks(4, checksums=False)
    arrived.note_rest()
    assert arrived.is_hashed
    assert arrived.damaged([0] * 4) == []


@pytest.mark.parametrize("index", [-1, 4])
def test_an_index_outside_the_grant_is_refused(index: int) -> None:
    with pytest.raises(IndexError, match="of a grant of 4"):
        ArrivedBlocks(4, checksums=True).note([index])


def test_a_device_hashes_what_arrives_meanwhile_in_the_next_batch(blocks: Blocks) -> None:
    computer, checksums = late_pool(blocks).checksums(DOT64), sent(blocks, DOT64)
    arrived = ArrivedBlocks(4, checksums=True)
    arrived.note([0])
    arrived.hash(computer, _BLOCK_IDS, math.inf)
    arrived.note_rest()
    assert (arrived.is_hashed, arrived.is_waiting) == (False, True)
    num_looks = hash_all(arrived, computer)
    assert num_looks < 10, "the other three were one batch"
    assert arrived.damaged(checksums) == []
    assert arrived.damaged([0] * 4) == [0, 1, 2, 3]


@pytest.mark.parametrize("how", ["missed and sent again", "arrived again"])
def test_a_checksum_of_bytes_that_were_replaced_meanwhile_does_not_count(blocks: Blocks, how: str) -> None:
    pool = late_pool(blocks)
    computer, checksums = pool.checksums(DOT64), sent(blocks, DOT64)
    arrived = ArrivedBlocks(4, checksums=True)
    true = blocks[5].copy()
    blocks[5] = 0
    arrived.note_rest()
    arrived.hash(computer, _BLOCK_IDS, math.inf)
    assert arrived.is_waiting
    pool.settle()  # the device has hashed the wrong bytes; the values have not been collected
    blocks[5] = true
    if how == "missed and sent again":
        arrived.expect_again([2])
    arrived.note([2])
    hash_all(arrived, computer)
    assert arrived.damaged(checksums) == []


def test_a_block_that_is_missing_again_drops_the_checksum_that_is_being_computed(blocks: Blocks) -> None:
    computer, checksums = late_pool(blocks).checksums(DOT64), sent(blocks, DOT64)
    arrived = ArrivedBlocks(4, checksums=True)
    blocks[5] = 0
    arrived.note_rest()
    arrived.hash(computer, _BLOCK_IDS, math.inf)
    arrived.expect_again([2])
    hash_all(arrived, computer)
    assert arrived.num_missing == 1
    assert arrived.damaged(checksums) == []
