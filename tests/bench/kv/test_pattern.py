from __future__ import annotations

import numpy as np
from bench.kv.pattern import fill, wrong_blocks


def test_a_single_wrong_byte_and_a_swapped_block_are_found() -> None:
    blocks = np.zeros((6, 256), dtype=np.uint8)
    fill(blocks)
    assert wrong_blocks(blocks, 0, 6) == []
    blocks[1, 17] ^= 1
    blocks[[3, 4]] = blocks[[4, 3]]
    assert wrong_blocks(blocks, 0, 6) == [1, 3, 4]
    assert wrong_blocks(blocks, 2, 2) == [3]
