"""What is said about the blocks of a node's KV pool, in the form of vLLM 0.32.

Owns the events and their encoding, and which blocks are spoken of. Knows no sockets and no numbers of batches.

A hash goes out as its last 64 bits. All indexers read numbers, some no bytes; vLLM sends the same by default. Blocks of
a prompt with a salt are never told: no reader could ask for them without the salt, and its tokens are nobody's
business. Media are told apart by `extra_keys`, as nothing else of their tokens does.

Invariant: with every event in order, a reader knows exactly the findable blocks whose prompt has no salt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

import msgspec

from baton.engine.cache.block_log import PublishedRun
from baton.engine.cache.block_pool import CacheChanges

POOL = "GPU"
"""The medium of a KV pool, wherever that is: vLLM's build for CPUs says the same."""
_ENGINE = 0
"""The data-parallel rank: each node is an engine of its own, with a sequence of its own."""
_ExtraKeys: TypeAlias = list[tuple[tuple[str, int], ...] | None]


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, frozen=True, gc=False):
    """Neighbouring blocks can be found. `extra_keys`: of each, its media, with their places relative to the block."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: Sequence[int]
    block_size: int
    lora_id: None
    medium: str
    lora_name: str | None
    extra_keys: _ExtraKeys | None = None


class BlockRemoved(msgspec.Struct, tag=True, frozen=True, gc=False):
    """Blocks can no longer be found."""

    block_hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, tag=True, frozen=True, gc=False):
    """No block can be found."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What is sent at once: the wall clock's time, and what has happened since the batch before."""

    ts: float
    events: Sequence[Event]
    data_parallel_rank: int = _ENGINE


@dataclass(slots=True)
class BlockCounters:
    """Blocks since the start: those that were told of, in whatever medium, and those that nobody is told of because of
    their salt."""

    num_stored: int = 0
    num_removed: int = 0
    num_private: int = 0


class PoolEvents:
    """Makes events of what a `BlockLog` hears. `adapters`: names by digest, for prompts with one."""

    def __init__(self, block_size: int, adapters: Mapping[bytes, str]) -> None:
        self.counters = BlockCounters()
        self._block_size = block_size
        self._adapters: dict[bytes, str | None] = {b"": None, **adapters}
        self._runs: list[PublishedRun] = []
        self._told: set[bytes] = set()

    def published(self, run: PublishedRun) -> None:
        """Keep what is known of these blocks until the pool's changes are."""
        if not run.prompt.cache_salt and run.prompt.adapter in self._adapters:
            self._runs.append(run)

    def changed(self, changes: CacheChanges) -> list[Event]:
        """What these changes are to others."""
        fresh = set(changes.stored)
        events: list[Event] = [event for run in self._runs for event in self._stored(run, fresh)]
        self._runs.clear()
        self.counters.num_private += len(fresh)
        if removed := [each for each in changes.removed if each in self._told]:
            self._told.difference_update(removed)
            self.counters.num_removed += len(removed)
            events.append(BlockRemoved([*map(as_int, removed)], POOL))
        return events

    def _stored(self, run: PublishedRun, fresh: set[bytes]) -> Iterator[BlockStored]:
        """The parts of `run` that are `fresh`, which they are no longer."""
        told = fresh.intersection(run.hashes)
        for begin, end in _spans(run.hashes, told):
            yield self._event(run, begin, end)
        fresh -= told
        self._told |= told
        self.counters.num_stored += len(told)

    def _event(self, run: PublishedRun, begin: int, end: int) -> BlockStored:
        parent = run.hashes[begin - 1] if begin else run.parent
        return BlockStored(
            [*map(as_int, run.hashes[begin:end])],
            None if parent is None else as_int(parent),
            run.token_ids[begin * self._block_size : end * self._block_size],
            self._block_size,
            None,
            POOL,
            self._adapters[run.prompt.adapter],
            self._extra_keys(run, begin, end) if run.prompt.media else None,
        )

    def _extra_keys(self, run: PublishedRun, begin: int, end: int) -> _ExtraKeys:
        return [self._media_at(run, (run.first + place) * self._block_size) for place in range(begin, end)]

    def _media_at(self, run: PublishedRun, start: int) -> tuple[tuple[str, int], ...] | None:
        stop = start + self._block_size
        media = [medium for medium in run.prompt.media if medium.start < stop and medium.stop > start]
        return tuple((medium.digest.hex(), medium.start - start) for medium in media) or None


def _spans(hashes: Sequence[bytes], told: set[bytes]) -> Iterator[tuple[int, int]]:
    """Where those that are told stand together: begins and ends."""
    if len(told) == len(hashes):  # nearly always, and quicker
        yield 0, len(hashes)
        return
    for is_told, places in groupby(range(len(hashes)), lambda place: hashes[place] in told):
        if is_told:
            first, *others = places
            yield first, first + len(others) + 1


def as_int(block_hash: bytes) -> int:
    """A hash as it is published."""
    return int.from_bytes(block_hash[-8:], "big")
