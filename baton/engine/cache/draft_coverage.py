"""Which tokens have KV of a draft in the pool's blocks, beside that of the model.

Owns one number for each use of a block: how many of its slots, from the first on, are filled. Whoever finds the block,
in the prefix cache or as a fork, finds them filled. A block that came from elsewhere has nothing of a draft unless
somebody says so. Knows no requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.engine.cache.block_pool import BlockPool


def _nobody(block_id: int) -> bool:
    return False


class DraftCoverage:
    """Of the blocks of `pool`. `is_read`: whether others read a block, so that nothing of it must change."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.is_read: Callable[[int], bool] = _nobody
        self._pool = pool
        self._block_size = block_size
        self._filled = [0] * pool.num_blocks
        self._generations = [0] * pool.num_blocks  # of a block that was never allocated

    def of(self, block_table: Sequence[int], num_tokens: int) -> int:
        """How many of the first `num_tokens` tokens of a sequence have draft KV, and all before them."""
        size = self._block_size
        for place in range(-(-num_tokens // size)):
            filled = self._filled_of(block_table[place])
            if filled < size:
                return min(num_tokens, place * size + filled)
        return num_tokens

    def fill(self, block_table: Sequence[int], first: int, end: int) -> None:
        """The tokens from place `first` to before `end` have draft KV, as have all before them."""
        size = self._block_size
        for place in range(first // size, -(-end // size)):
            block_id = block_table[place]
            self._filled[block_id] = min(size, end - place * size)
            self._generations[block_id] = self._pool.generation(block_id)

    def uses(self, block_table: Sequence[int], first: int, end: int) -> list[tuple[int, int]]:
        """The blocks of these tokens, each with its generation: what names this use of it."""
        block_ids = block_table[first // self._block_size : -(-end // self._block_size)]
        return [(block_id, self._pool.generation(block_id)) for block_id in block_ids]

    def can_fill(self, block_table: Sequence[int], first: int, end: int) -> bool:
        """Whether nobody reads the blocks of these tokens."""
        size = self._block_size
        return not any(self.is_read(block_id) for block_id in block_table[first // size : -(-end // size)])

    def _filled_of(self, block_id: int) -> int:
        is_same = self._generations[block_id] == self._pool.generation(block_id)
        return self._filled[block_id] if is_same else 0
