"""Bytes that both ends know: what block i of the prefill node's pool holds."""

from __future__ import annotations

import numpy as np

from kvtransfer.transports.base import Blocks

_SEED = 20_211


def pattern(block_id: int, block_bytes: int) -> Blocks:
    """[block_bytes] of block `block_id`. Different in every block, and never all alike."""
    return np.random.default_rng((_SEED, block_id)).integers(0, 256, block_bytes, dtype=np.uint8)


def fill(blocks: Blocks) -> None:
    """Write its pattern into every block of a pool [num_blocks, block_bytes]."""
    for block_id, block in enumerate(blocks):
        block[:] = pattern(block_id, blocks.shape[1])


def wrong_blocks(blocks: Blocks, first: int, count: int) -> list[int]:
    """Blocks of `first` .. `first + count - 1` that do not hold their pattern."""
    ids = range(first, first + count)
    return [block_id for block_id in ids if not np.array_equal(blocks[block_id], pattern(block_id, blocks.shape[1]))]
