"""The block pool: every block of the KV pool, its owners, its generation, and the prefix it holds.

Owns block ids, reference counts, generations, the free list and the prefix index. Knows no tensors, requests or nodes.

A block is *held* while its reference count is above zero. A block without references is on the free list, whose order
is the eviction order: allocation takes from the front (least recently used), a released block joins at the end and
stays findable by its hash until it is taken for something else. Callers release a sequence's blocks in order; the pool
puts the last one in front, so that the beginnings of prompts survive longest.

Neighbouring blocks move between nodes as one run. An allocation of several therefore looks at a few more candidates
for eviction than it needs (never beyond the oldest quarter of the free list) and takes those that lie together: in the
steady churn of 1,024 blocks a prompt of 26 comes in 2 runs, where eviction order alone makes it 20.

Blocks may get their memory late: those from `num_given` on have none yet. They are free, and join the free list in the
order of their ids: when an allocation would have to evict without them, or when there is time (`grow`).

Invariants (checked by `check`):
- free + cached + held == num_blocks, where cached means on the free list with a hash;
- a block without memory has never had an owner;
- a hash leads to exactly one block and that block carries the hash;
- the generation of a block rises each time it is allocated, so (block id, generation) names one use of it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import TypeAlias

from baton.wire.errors import Overloaded

_MAX_EXTRA = 64

BlockTable: TypeAlias = "array[int]"
"""The blocks of a sequence, in order. Packed, because attention needs those of a whole batch as one array each step."""


OnEvicted: TypeAlias = "Callable[[Sequence[tuple[int, bytes]]], None]"
"""Called once for an allocation that evicts, with each block and its hash: nobody finds it from now on, and its new
owner has not written into it yet."""
GiveMemory: TypeAlias = "Callable[[int, int], None]"
"""Called with the first of some neighbouring blocks and the one behind the last, before anybody owns them."""


class NoFreeBlocks(Overloaded):
    """The pool has fewer free blocks than were asked for."""

    code = "no_free_blocks"


def pack_blocks(block_ids: Iterable[int]) -> BlockTable:
    """A block table of these blocks, 32 bits each."""
    return array("i", block_ids)


@dataclass(frozen=True, slots=True)
class CacheChanges:
    """Hashes that became findable and hashes that no longer are, since the last `take_changes`. None is in both."""

    stored: list[bytes]
    removed: list[bytes]


def _in_fewest_runs(candidates: Sequence[int], count: int) -> list[int]:
    """`count` of the ascending block ids in `candidates` in as few runs as possible, in ascending order.

    Of a run that is longer than needed, the end is taken: it holds the later blocks of a prompt, and the beginning of a
    prompt is more likely to be used again.
    """
    edges = [0, *(i for i in range(1, len(candidates)) if candidates[i] != candidates[i - 1] + 1), len(candidates)]
    runs = sorted((end - begin, end) for begin, end in pairwise(edges))
    for length, end in runs:
        if length >= count:
            return list(candidates[end - count : end])
    taken: list[int] = []
    for length, end in reversed(runs):
        size = min(length, count - len(taken))
        taken.extend(candidates[end - size : end])
        if len(taken) == count:
            break
    return sorted(taken)


class BlockPool:
    """Hands out, shares and takes back blocks 0 .. num_blocks - 1. `give_memory`: None: all have theirs."""

    def __init__(
        self,
        num_blocks: int,
        *,
        prefix_caching: bool = True,
        on_evicted: OnEvicted | None = None,
        give_memory: GiveMemory | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.num_given = num_blocks if give_memory is None else 0
        self.prefix_caching = prefix_caching
        self._give_memory = give_memory
        self._on_evicted = on_evicted
        self._references = [0] * num_blocks
        self._generations = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._is_reused = bytearray(num_blocks)
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(self.num_given))
        self._index: dict[bytes, int] = {}
        self._num_cached = 0
        self._stored: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    @property
    def num_available(self) -> int:
        """Blocks an allocation can take: free ones and cached ones without an owner."""
        return len(self._free) + self.num_blocks - self.num_given

    @property
    def num_cached(self) -> int:
        """Blocks without an owner that still hold a findable prefix."""
        return self._num_cached

    @property
    def num_free(self) -> int:
        """Blocks without an owner and without cached content."""
        return self.num_available - self._num_cached

    @property
    def num_held(self) -> int:
        """Blocks with at least one owner."""
        return self.num_given - len(self._free)

    def grow(self, count: int) -> bool:
        """Give `count` more blocks memory, or as many as have none. Whether there were any."""
        first, end = self.num_given, min(self.num_given + count, self.num_blocks)
        if self._give_memory is None or first >= end:
            return False
        self._give_memory(first, end)
        self.num_given = end
        for block_id in reversed(range(first, end)):
            self._free[block_id] = None
            self._free.move_to_end(block_id, last=False)
        return True

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, evicting among the least recently used. Raises `NoFreeBlocks`, taking nothing."""
        if count > self.num_available:
            raise NoFreeBlocks(f"{count} blocks wanted, {self.num_available} of {self.num_blocks} available")
        self.grow(count - len(self._free) + self._num_cached)
        num_candidates = max(count, min(2 * count + _MAX_EXTRA, len(self._free) // 4)) if count > 1 else count
        taken = _in_fewest_runs(sorted(islice(self._free, num_candidates)), count)
        if self._on_evicted is not None:
            evicted = [(each, known) for each in taken if (known := self._hashes[each]) is not None]
            if evicted:
                self._on_evicted(evicted)
        for block_id in taken:
            del self._free[block_id]
            self._forget(block_id)
            self._references[block_id] = 1
            self._generations[block_id] += 1
        return taken

    def share(self, block_ids: Iterable[int]) -> None:
        """Add an owner to each block; blocks on the free list leave it with their content intact."""
        for block_id in block_ids:
            if self._references[block_id] == 0:
                del self._free[block_id]
                if self._hashes[block_id] is not None:
                    self._num_cached -= 1
            self._references[block_id] += 1
            self._is_reused[block_id] = True

    def release(self, block_ids: Sequence[int]) -> None:
        """Remove an owner from each block of a sequence, given in sequence order."""
        for block_id in reversed(block_ids):
            if self._references[block_id] <= 0:
                raise RuntimeError(f"block {block_id} was released more often than it was taken")
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                self._free[block_id] = None
                if self._hashes[block_id] is None:
                    self._free.move_to_end(block_id, last=False)
                else:
                    self._num_cached += 1

    def publish(self, block_id: int, block_hash: bytes) -> None:
        """Make a held, completely computed block findable. The first block with a hash keeps it."""
        if not self.prefix_caching or block_hash in self._index or self._hashes[block_id] is not None:
            return
        self._index[block_hash] = block_id
        self._hashes[block_id] = block_hash
        if block_hash in self._removed:
            del self._removed[block_hash]
        else:
            self._stored[block_hash] = None

    def lookup(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the longest known prefix of `hashes`. Takes no reference: call `share` before anything else."""
        found: list[int] = []
        for block_hash in hashes:
            block_id = self._index.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def num_owners(self, block_id: int) -> int:
        """How many hold this block."""
        return self._references[block_id]

    def generation(self, block_id: int) -> int:
        """How often this block has been allocated."""
        return self._generations[block_id]

    def num_available_beside(self, block_ids: Iterable[int]) -> int:
        """Blocks an allocation could take after `share(block_ids)`."""
        return self.num_available - sum(1 for block_id in block_ids if self._references[block_id] == 0)

    def published_hashes(self) -> list[bytes]:
        """Every findable hash: the snapshot a router starts from."""
        return list(self._index)

    def findable_blocks(self) -> tuple[list[tuple[int, bytes]], list[tuple[int, bytes]]]:
        """All findable blocks with their hashes: those that were shared, and the others. Those come first that would be
        evicted last."""
        by_use = [*(block_id for block_id, owners in enumerate(self._references) if owners), *reversed(self._free)]
        found = [(block_id, known) for block_id in by_use if (known := self._hashes[block_id]) is not None]
        reused = [each for each in found if self._is_reused[each[0]]]
        return reused, [each for each in found if not self._is_reused[each[0]]]

    def take_changes(self) -> CacheChanges:
        """The net effect of what was stored and evicted since the last call, each in order of events."""
        changes = CacheChanges(list(self._stored), list(self._removed))
        self._stored, self._removed = {}, {}
        return changes

    def check(self, owners: Mapping[int, int] | None = None) -> None:
        """Raise `RuntimeError` when an invariant of this module does not hold, or when a block has another number of
        owners than in `owners`. O(num_blocks): for tests."""
        cached = 0
        for block_id, references in enumerate(self._references):
            if owners is not None and references != owners.get(block_id, 0):
                raise RuntimeError(f"block {block_id} has {owners.get(block_id, 0)} owners, {references} are counted")
            is_free = references == 0 and block_id < self.num_given
            if references < 0 or is_free != (block_id in self._free) or (references and block_id >= self.num_given):
                raise RuntimeError(f"block {block_id}: {references} references, on free list: {block_id in self._free}")
            block_hash = self._hashes[block_id]
            if block_hash is not None and self._index.get(block_hash) != block_id:
                raise RuntimeError(f"block {block_id} carries a hash that leads elsewhere")
            cached += references == 0 and block_hash is not None
        if cached != self._num_cached or len(self._index) != sum(h is not None for h in self._hashes):
            raise RuntimeError(f"{cached} cached blocks counted, {self._num_cached} recorded")

    def _forget(self, block_id: int) -> None:
        block_hash = self._hashes[block_id]
        self._is_reused[block_id] = False
        if block_hash is not None:
            self._hashes[block_id] = None
            self._num_cached -= 1
            del self._index[block_hash]
            if block_hash in self._stored:
                del self._stored[block_hash]
            else:
                self._removed[block_hash] = None
