"""The blocks of a request: how many it needs, where they come from, and when they are published in the prefix cache.

Owns the step from tokens to blocks, on both sides: taking them from the block pool, and publishing full ones in the
prefix cache. It is the only place that decides where the KV of a prompt's beginning comes from: first from this node's
prefix cache, and what comes behind that from the KV store, if there is one. Knows nothing of batches, budgets or the
order of requests.

Invariant: the blocks of a request with a `load` are released only after that was closed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from baton.engine.cache.block_log import PublishedRun
from baton.engine.cache.block_pool import BlockPool, BlockTable, pack_blocks
from baton.engine.cache.hashing import extend_hashes
from baton.engine.cache.offload import KvOffload
from baton.engine.scheduler.request import BlockCopy, Request
from baton.engine.scheduler.step import Step
from baton.wire.tiers import TierTokens


class RequestBlocks:
    """Takes blocks of `block_size` tokens from `pool` for requests, and releases them. `has_states`: see
    `SchedulerLimits`. `offload`: where the pool's evicted blocks go. `on_published`: hears of published blocks."""

    def __init__(self, pool: BlockPool, block_size: int, *, has_states: bool, offload: KvOffload | None = None) -> None:
        self._pool = pool
        self._offload = offload
        self.block_size = block_size
        self._has_states = has_states
        self.on_published: Callable[[PublishedRun], None] | None = None

    @property
    def num_available(self) -> int:
        """Blocks that can be taken now."""
        return self._pool.num_available

    @property
    def num_loads(self) -> int:
        """Requests that wait for KV."""
        return 0 if self._offload is None else self._offload.num_loads

    def take(self, hashes: Sequence[bytes], max_cached_tokens: int, num_tokens: int) -> tuple[BlockTable, int] | None:
        """Blocks for `num_tokens` tokens: (block table, tokens whose KV is already in it), or None when out of blocks.

        `hashes`: of the full blocks, as far as they are known. At most `max_cached_tokens` tokens come from the prefix
        cache (a request that needs logits computes one token at least).
        """
        cached = self._pool.lookup(hashes[: max_cached_tokens // self.block_size])
        num_missing = self._num_blocks(num_tokens) - len(cached)
        if self._pool.num_available_beside(cached) < num_missing:
            return None
        self._pool.share(cached)
        return pack_blocks(cached + self._pool.allocate(num_missing)), len(cached) * self.block_size

    def take_for(self, request: Request) -> bool:
        """Give a request without blocks those for all its tokens. False when they do not fit now. It waits for KV then
        if the store has some, see `Request.load`."""
        self._extend_hashes(request, request.token_ids)
        taken = self.take(request.block_hashes, request.num_reusable_tokens, len(request.token_ids))
        if taken is None:
            return False
        request.block_table, num_cached_tokens = taken
        request.num_computed_tokens = num_cached_tokens
        request.num_published_blocks = num_cached_tokens // self.block_size
        self._begin_load(request)
        if request.load is None:
            self._count_cached(request)
        return True

    def _begin_load(self, request: Request) -> None:
        first, end = request.num_published_blocks, request.num_reusable_tokens // self.block_size
        if self._offload is None or first >= end:
            return
        plan = self._offload.plan(request.block_hashes[first:end], request.num_computed_tokens, len(request.token_ids))
        if plan is not None:
            wanted = slice(first, first + len(plan.tiers))
            request.load = self._offload.load(plan, request.block_hashes[wanted], request.block_table[wanted])

    def end_load(self, request: Request) -> None:
        """If `request` waits for KV it does not any longer: what has come is its own, the rest is to be computed."""
        if request.load is not None:
            self._count_cached(request, self._close_load(request))

    def _close_load(self, request: Request) -> Sequence[str]:
        """For each block that has come of a load, the tier that had it."""
        load, request.load = request.load, None
        if self._offload is None or load is None:
            return ()
        tiers = self._offload.end(load)
        request.num_computed_tokens += len(tiers) * self.block_size
        self.publish(request, request.num_computed_tokens)
        return tiers

    def _count_cached(self, request: Request, tiers: Sequence[str] = ()) -> None:
        """Note how much of its prompt was there, the last blocks of which came from `tiers`."""
        # what is found again after a preemption was computed by this request itself
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
            if tiers:
                request.tiers = self._tokens_by_tier(request, tiers)

    def _tokens_by_tier(self, request: Request, tiers: Sequence[str]) -> tuple[TierTokens, ...]:
        counts: Counter[str] = Counter()
        first = request.num_computed_tokens - len(tiers) * self.block_size
        for place, tier in enumerate(tiers):
            start = first + place * self.block_size
            counts[tier] += max(0, min(self.block_size, request.num_prompt_tokens - start))
        return tuple([TierTokens(tier, count) for tier, count in counts.items() if count])

    def before(self, step: Step) -> None:
        """`step` is about to be launched: save what its blocks hold."""
        if self._offload is not None and self._offload.has_unsaved:
            size = self.block_size
            for share in step.requests:
                written = share.block_table[share.start // size : -(-share.context_len // size)]
                self._offload.overwriting(written)

    def give_away(self, block_ids: Sequence[int]) -> None:
        """Another node is about to write into these blocks."""
        if self._offload is not None:
            self._offload.give_away(block_ids)

    def has_room_beside(self, request: Request, num_tokens: int) -> bool:
        """Whether blocks for so many tokens can be taken now, and those that `request` lacks as well."""
        return self.num_missing(request) + self._num_blocks(num_tokens) <= self._pool.num_available

    def has_room(self, request: Request) -> bool:
        """Whether the blocks of `request` have a slot for each of its tokens."""
        return len(request.block_table) * self.block_size >= len(request.token_ids)

    def num_missing(self, request: Request) -> int:
        """Blocks that `request` lacks for its tokens."""
        return self._num_blocks(len(request.token_ids)) - len(request.block_table)

    def num_slots_behind(self, request: Request) -> int:
        """Slots behind the tokens of `request`, in its blocks and in all that can be taken now."""
        return (len(request.block_table) + self.num_available) * self.block_size - len(request.token_ids)

    def extend(self, request: Request, num_behind: int = 0) -> None:
        """Give `request` the blocks that it lacks for its tokens and `num_behind` slots more. Raises `NoFreeBlocks`."""
        num_blocks = self._num_blocks(len(request.token_ids) + num_behind)
        request.block_table.extend(self._pool.allocate(num_blocks - len(request.block_table)))

    def trim(self, request: Request, num_behind: int = 0) -> None:
        """Release the blocks of `request` behind those that have its tokens and `num_behind` slots more. No step writes
        into them."""
        num_blocks = self._num_blocks(len(request.token_ids) + num_behind)
        if excess := request.block_table[num_blocks:]:
            self._pool.release(excess)
            del request.block_table[num_blocks:]

    def fork(self, request: Request, source: Request, num_computed_tokens: int) -> None:
        """Give `request`, which has none, the blocks of `source` that hold the KV of their first `num_computed_tokens`
        tokens: full blocks are shared, the last one becomes a copy if it is not full (see `Request.block_copy`).

        Without room for the copy `request` gets no blocks: it is computed as any other, and finds the full blocks in
        the prefix cache. So it is where blocks hold states, because `source` may have gone on in the last one.
        """
        num_full, num_partial = divmod(num_computed_tokens, self.block_size)
        if num_partial and (self._has_states or not self._pool.num_available):
            return
        shared = source.block_table[:num_full]
        self._pool.share(shared)
        if num_partial:
            request.block_copy = BlockCopy(source.block_table[num_full], *self._pool.allocate(1))
            self._pool.share((request.block_copy.source,))
            shared.append(request.block_copy.target)
        request.block_table = shared
        request.num_computed_tokens = num_computed_tokens
        request.block_hashes = source.block_hashes[:num_full]
        request.num_published_blocks = min(source.num_published_blocks, num_full)

    def end_copy(self, request: Request) -> None:
        """The copy of `request` is made: release its source."""
        if request.block_copy is not None:
            self._pool.release((request.block_copy.source,))
            request.block_copy = None

    def publish(self, request: Request, num_computed_tokens: int) -> None:
        """Publish the blocks that `num_computed_tokens` tokens fill, so that other requests find them in the prefix
        cache."""
        num_full = num_computed_tokens // self.block_size
        if num_full == request.num_published_blocks:
            return
        if num_full > len(request.block_hashes):
            self._extend_hashes(request, request.token_ids[: num_full * self.block_size])
        for index in range(request.num_published_blocks, num_full):
            self._pool.publish(request.block_table[index], request.block_hashes[index])
        if self.on_published is not None:
            self.on_published(self._run_of(request, request.num_published_blocks, num_full))
        request.num_published_blocks = num_full

    def _run_of(self, request: Request, first: int, end: int) -> PublishedRun:
        hashes, token_ids = request.block_hashes, request.token_ids[first * self.block_size : end * self.block_size]
        return PublishedRun(request.prompt, first, hashes[first - 1] if first else None, hashes[first:end], token_ids)

    def _extend_hashes(self, request: Request, known: Sequence[int]) -> None:
        extend_hashes(request.block_hashes, known, self.block_size, request.hash_root, request.prompt.media)

    def release_all(self, request: Request) -> None:
        """Release the blocks of `request`; it has nothing computed any more."""
        self._close_load(request)
        self._pool.release(request.held_blocks)
        request.block_table, request.block_copy = pack_blocks(()), None
        request.num_computed_tokens = request.num_published_blocks = 0

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
