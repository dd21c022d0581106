"""The blocks that are held for handoffs and belong to no request: KV that another node still reads, or will write.

Owns which blocks are held under which key, and which of them wait for their KV. Does not know for how long, which is
the caller's lease, or where the blocks come from and go to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from baton.engine.cache.block_log import PublishedRun
from baton.engine.cache.block_pool import BlockPool, BlockTable, pack_blocks
from baton.wire.prompt import Prompt
from baton.wire.request_key import RequestKey


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks held for KV that another node will write.

    `block_table` covers all tokens; the blocks of its first `num_cached_tokens` tokens hold their KV already. The
    others, with their generations, are in `missing_block_ids` and `missing_generations`, in sequence order. `hashes`:
    of all full blocks.
    """

    key: RequestKey
    block_table: BlockTable
    num_cached_tokens: int
    missing_block_ids: tuple[int, ...]
    missing_generations: tuple[int, ...]
    hashes: Sequence[bytes] = ()


class HeldBlocks:
    """Block tables by key, each with an owner of its own in `pool`. `on_published`: hears of published blocks."""

    def __init__(self, pool: BlockPool) -> None:
        self.on_published: Callable[[PublishedRun], None] | None = None
        self._pool = pool
        self._tables: dict[RequestKey, BlockTable] = {}
        self._reserved: set[RequestKey] = set()  # of those, the ones whose KV is still to come
        self._counts: Counter[int] = Counter()  # in how many tables a block is

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._tables

    @property
    def is_awaited(self) -> bool:
        """Whether the KV of some of them is still to come."""
        return bool(self._reserved)

    @property
    def num_blocks(self) -> int:
        """How many blocks there are in all tables; one that several handoffs share counts once."""
        return len(self._counts)

    @property
    def tables(self) -> Iterable[BlockTable]:
        """All of them."""
        return self._tables.values()

    def table(self, key: RequestKey) -> BlockTable | None:
        """The blocks that are held under `key`."""
        return self._tables.get(key)

    def has_block(self, block_id: int) -> bool:
        """Whether this block is in one of them."""
        return block_id in self._counts

    def hold(self, key: RequestKey, block_table: BlockTable) -> None:
        """Hold blocks whose KV is here; their owner from now on is this."""
        self._tables[key] = block_table
        self._counts.update(block_table)

    def reserve(
        self, key: RequestKey, block_table: BlockTable, num_cached: int, block_size: int, hashes: Sequence[bytes] = ()
    ) -> Reservation:
        """As `hold`; the KV behind the first `num_cached` tokens is still to come."""
        self.hold(key, block_table)
        self._reserved.add(key)
        missing = tuple(block_table[num_cached // block_size :])
        generations = tuple(self._pool.generation(block_id) for block_id in missing)
        return Reservation(key, block_table, num_cached, missing, generations, hashes)

    def lend(self, key: RequestKey, hashes: Sequence[bytes]) -> BlockTable | None:
        """Hold the blocks of the longest prefix of `hashes` that is cached. None when nothing of it is."""
        cached = pack_blocks(self._pool.lookup(hashes))
        if not cached:
            return None
        self._pool.share(cached)
        self.hold(key, cached)
        return cached

    def publish(self, reservation: Reservation, prompt: Prompt, blocks: range, block_size: int) -> None:
        """The KV of these full blocks of a reservation for `prompt` has come: they can be found, and stay held."""
        first, end, hashes = blocks.start, blocks.stop, reservation.hashes
        for place in blocks:
            self._pool.publish(reservation.block_table[place], hashes[place])
        if self.on_published is not None:
            parent = hashes[first - 1] if first else None
            token_ids = prompt.token_ids[first * block_size : end * block_size]
            self.on_published(PublishedRun(prompt, first, parent, hashes[first:end], token_ids))

    def give(self, key: RequestKey) -> BlockTable | None:
        """The blocks of `key`, which the caller owns now; None when there are none."""
        self._reserved.discard(key)
        block_table = self._tables.pop(key, None)
        for block_id in block_table or ():
            self._counts[block_id] -= 1
            if not self._counts[block_id]:
                del self._counts[block_id]
        return block_table

    def release(self, key: RequestKey) -> bool:
        """Release the blocks of `key`. False when there are none."""
        block_table = self.give(key)
        if block_table is not None:
            self._pool.release(block_table)
        return block_table is not None
