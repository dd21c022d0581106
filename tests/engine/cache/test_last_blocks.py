"""Which blocks are kept before the end: those that were used again first, wherever they are, and each once."""

from __future__ import annotations

from functools import partial

from baton.engine.cache.last_blocks import LastBlock, LastBlocks, in_order
from baton.testing.kv_stores import block_of, hash_of


def last(*numbers: int) -> list[LastBlock]:
    return [LastBlock(hash_of(number), partial(block_of, number)) for number in numbers]


def test_blocks_that_were_used_again_come_first_and_each_once() -> None:
    blocks = in_order([LastBlocks(last(1, 2), last(3)), LastBlocks(), LastBlocks(last(4, 3), last(5, 1))])
    assert [each.block_hash[1] for each in blocks] == [1, 2, 4, 3, 5]
