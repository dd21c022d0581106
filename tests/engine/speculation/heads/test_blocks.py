"""A head writes into blocks that are its request's alone, and after what they held was saved."""

from __future__ import annotations

from baton.engine.attention.base import SequenceShare
from baton.engine.cache.block_pool import BlockPool
from baton.engine.speculation.heads.blocks import HeadBlocks

_BLOCK_SIZE = 4


class Offload:
    """Notes what is saved."""

    has_unsaved = True

    def __init__(self) -> None:
        self.saved: list[int] = []

    def overwriting(self, block_ids: list[int]) -> None:
        self.saved += block_ids


def test_slots_are_stored_from_the_first_block_on_that_nobody_else_has() -> None:
    pool = BlockPool(8)
    table = pool.allocate(4)
    blocks = HeadBlocks(pool, _BLOCK_SIZE, None)
    assert blocks.first_own(table, 3, 10) == 3
    pool.share([table[1]])
    assert blocks.first_own(table, 3, 10) == 8
    assert blocks.first_own(table, 9, 10) == 9
    assert blocks.first_own(table, 5, 8) == 8
    assert blocks.first_own(table, 5, 7) == 7  # nothing is left of it
    pool.release([table[1]])
    assert blocks.first_own(table, 3, 10) == 3


def test_what_blocks_held_is_saved_before_they_are_written() -> None:
    offload = Offload()
    blocks = HeadBlocks(BlockPool(8), _BLOCK_SIZE, offload)  # type: ignore[arg-type]  # all that is asked for
    blocks.writing([SequenceShare(3, 2, (5, 6, 7)), SequenceShare(8, 1, (1, 2, 3))])
    assert offload.saved == [5, 6, 3]
    offload.has_unsaved = False
    blocks.writing([SequenceShare(0, 1, (4,))])
    assert offload.saved == [5, 6, 3]
