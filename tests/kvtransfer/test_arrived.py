from __future__ import annotations

import math

import numpy as np
import pytest

from kvtransfer.arrived import ArrivedBlocks
from kvtransfer.integrity import block_checksum
from kvtransfer.transports.base import Blocks

_BLOCK_IDS = (7, 2, 5, 0)


@pytest.fixture
def blocks() -> Blocks:
    return np.random.default_rng(2).integers(0, 256, (8, 64), dtype=np.uint8)


def sent(blocks: Blocks) -> list[int]:
    return [block_checksum(blocks[block_id]) for block_id in _BLOCK_IDS]


def test_blocks_arrive_in_any_order_and_each_counts_once(blocks: Blocks) -> None:
    arrived = ArrivedBlocks(4, checksums=True)
    arrived.note([2])
    arrived.note([2, 0])
    assert arrived.num_missing == 2
    arrived.note_rest()
    assert arrived.num_missing == 0
    assert not arrived.is_hashed
    arrived.hash(blocks, _BLOCK_IDS, math.inf)
    assert arrived.is_hashed
    assert arrived.damaged(sent(blocks)) == []


def test_a_slice_of_time_hashes_at_least_one_block(blocks: Blocks) -> None:
    arrived = ArrivedBlocks(4, checksums=True)
    arrived.note_rest()
    for _ in range(3):
        arrived.hash(blocks, _BLOCK_IDS, 0.0)
        assert not arrived.is_hashed
    arrived.hash(blocks, _BLOCK_IDS, 0.0)
    assert arrived.is_hashed


def test_damage_is_named_by_its_place_in_the_grant(blocks: Blocks) -> None:
    arrived, checksums = ArrivedBlocks(4, checksums=True), sent(blocks)
    arrived.note_rest()
    blocks[5, 10] ^= 1
    arrived.hash(blocks, _BLOCK_IDS, math.inf)
    assert arrived.damaged(checksums) == [2]
    assert arrived.damaged([checksums[1], checksums[0], *checksums[2:]]) == [0, 1, 2]


def test_what_is_sent_again_is_missing_until_it_has_come_and_hashed_anew(blocks: Blocks) -> None:
    arrived, checksums = ArrivedBlocks(4, checksums=True), sent(blocks)
    blocks[5, 10] ^= 1
    arrived.note_rest()
    arrived.hash(blocks, _BLOCK_IDS, math.inf)
    arrived.miss([2])
    assert arrived.num_missing == 1
    blocks[5, 10] ^= 1
    arrived.note([2])
    arrived.hash(blocks, _BLOCK_IDS, math.inf)
    assert arrived.damaged(checksums) == []


def test_a_block_that_arrives_again_is_hashed_again(blocks: Blocks) -> None:
    arrived, checksums = ArrivedBlocks(4, checksums=True), sent(blocks)
    arrived.note_rest()
    arrived.hash(blocks, _BLOCK_IDS, math.inf)
    blocks[0] = 0
    assert arrived.damaged(checksums) == []
    arrived.note([3])
    arrived.hash(blocks, _BLOCK_IDS, math.inf)
    assert arrived.damaged(checksums) == [3]


def test_without_checksums_what_arrives_is_taken(blocks: Blocks) -> None:
    arrived = ArrivedBlocks(4, checksums=False)
    arrived.note_rest()
    assert arrived.is_hashed
    assert arrived.damaged([0] * 4) == []


@pytest.mark.parametrize("index", [-1, 4])
def test_a_place_that_the_grant_does_not_have_is_refused(index: int) -> None:
    with pytest.raises(IndexError, match="of a grant of 4"):
        ArrivedBlocks(4, checksums=True).note([index])
