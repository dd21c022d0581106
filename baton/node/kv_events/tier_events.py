"""What is said about the blocks of the tiers below a node's KV pool: in which medium they are.

Owns what is known of the blocks that anybody was told of, for as long as they are in the pool, in a tier, or on their
way between these. A tier knows hashes only, and an indexer may have forgotten a block that left the pool. So each event
has the tokens, as if the block were new: vLLM's with `self_describing_kv_events` have them too.

A block that lay in a tier before this node had it in its pool is told of when it comes into the pool. Until then nobody
knows its tokens. The keys of a server belong to no node, so nothing is told of them.

Invariant: with every event in order, a reader knows exactly those blocks of each medium that this node has had in its
pool, and whose prompt has no salt.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

from msgspec.structs import replace

from baton.engine.cache.block_changes import BlockChanges
from baton.engine.cache.tiers import Tier
from baton.node.kv_events.events import POOL, BlockCounters, BlockRemoved, BlockStored, Event, as_int

MEDIA = {"host": "CPU", "disk": "STORAGE"}
"""vLLM's names of media, by those of our tiers."""
MOST_AT_ONCE = 1024
"""Changes of a medium in one batch. A folder may have a hundred thousand blocks, and the engine's thread tells them."""


def follow(tiers: Sequence[Tier]) -> dict[str, BlockChanges]:
    """The changes of the tiers that have a medium and tell, by medium."""
    media = {MEDIA[tier.name]: (tier, BlockChanges()) for tier in tiers if tier.name in MEDIA}
    return {medium: changes for medium, (tier, changes) in media.items() if tier.follow(changes)}


class TierEvents:
    """Makes events of what changes in tiers. `max_homeless`: blocks that may be on their way down, as many as the pool
    has. `counters`: of the blocks that were told of."""

    def __init__(self, changes: Mapping[str, BlockChanges], max_homeless: int, counters: BlockCounters) -> None:
        self._changes = changes
        self._max_homeless = max_homeless
        self._counters = counters
        self._known: dict[int, tuple[BlockStored, int]] = {}
        self._blocks: dict[str, set[int]] = {medium: set() for medium in (POOL, *changes)}
        self._homeless: OrderedDict[int, None] = OrderedDict()

    def behind(self, pool_events: Sequence[Event]) -> list[Event]:
        """What has changed in the tiers, to be told behind what has changed in the pool."""
        events: list[Event] = []
        for event in pool_events:
            if isinstance(event, BlockStored):
                events += self._in_pool(event)
            elif isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    self._left(block_hash, POOL)
        for medium, changes in self._changes.items():
            events += self._in_tier(medium, changes.take(MOST_AT_ONCE))
        return events

    def _in_pool(self, event: BlockStored) -> Iterator[BlockStored]:
        """Blocks came into the pool; those tiers are told of that have had them while nobody knew their tokens."""
        run = replace(event, token_ids=array("i", event.token_ids))  # a few bytes for each
        for place, block_hash in enumerate(event.block_hashes):
            self._came(block_hash, POOL)
            if block_hash not in self._known:
                self._known[block_hash] = run, place
                for medium in self._changes:
                    if block_hash in self._blocks[medium]:
                        yield self._stored(block_hash, medium)

    def _in_tier(self, medium: str, changes: Sequence[tuple[bytes, bool]]) -> list[Event]:
        events: list[Event] = []
        gone: list[int] = []
        for block_hash, has_come in ((as_int(each), has_come) for each, has_come in changes):
            if has_come:
                self._came(block_hash, medium)
                if block_hash in self._known:
                    events.append(self._stored(block_hash, medium))
            else:
                if block_hash in self._known:
                    gone.append(block_hash)
                self._left(block_hash, medium)
        if gone:
            self._counters.num_removed += len(gone)
            events.append(BlockRemoved(gone, medium))
        return events

    def _came(self, block_hash: int, medium: str) -> None:
        self._blocks[medium].add(block_hash)
        self._homeless.pop(block_hash, None)

    def _left(self, block_hash: int, medium: str) -> None:
        self._blocks[medium].discard(block_hash)
        if block_hash in self._known and not any(block_hash in blocks for blocks in self._blocks.values()):
            self._homeless[block_hash] = None
            if len(self._homeless) > self._max_homeless:
                oldest, _ = self._homeless.popitem(last=False)
                del self._known[oldest]

    def _stored(self, block_hash: int, medium: str) -> BlockStored:
        self._counters.num_stored += 1
        run, place = self._known[block_hash]
        return replace(
            run,
            block_hashes=[block_hash],
            parent_block_hash=run.block_hashes[place - 1] if place else run.parent_block_hash,
            token_ids=list(run.token_ids[place * run.block_size : (place + 1) * run.block_size]),
            medium=medium,
            extra_keys=run.extra_keys and run.extra_keys[place : place + 1],
        )
