"""KV stores: where blocks go that the block pool forgets, and from where they come back.

Owns the contract between the engine and a store. A store keeps bytes by the hashes of blocks; it knows no pool, no
layout and no request, so host memory, a folder or a server can be one. What must not go wrong is the engine's part
(`baton.engine.cache.offload`): a store never touches the pool, and nothing that it returns is served unless its
checksum is right.

A store may be slow, full, wrong or gone: then the blocks are computed, as if there were none. What it may not do is
block a call, because the engine's thread makes them. Work that takes time belongs into a thread of the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt
import xxhash

from baton.engine.cache.block_changes import BlockChanges

KIND_BYTES = 16
LATENCY_S = 0.5
"""A store that gives nothing for so long seems to be gone."""
REST_S = 5.0
"""For so long a store that has failed, seems to be gone or was wrong is left alone."""
BlockBytes: TypeAlias = npt.NDArray[np.uint8]
"""The bytes of one block over all layers, [block_bytes]."""


@dataclass(frozen=True, slots=True)
class BlockKind:
    """What all blocks of an engine have in common. `digest`, of `KIND_BYTES`, is another one wherever the same hash
    could mean other bytes: another model, layout or type, or other kernels."""

    block_bytes: int
    digest: bytes


class StoredBlock(NamedTuple):
    """One block as stores keep it. `checksum`: see `checksum_of`; the engine makes it, and looks at it again."""

    block_hash: bytes
    checksum: int
    content: BlockBytes


def checksum_of(block_hash: bytes, content: BlockBytes) -> int:
    """64 bits of xxh3 of a block's bytes. The hash is the seed, so that the bytes of another block are wrong too."""
    return xxhash.xxh3_64_intdigest(content.data, seed=int.from_bytes(block_hash[:8], "little"))


class Landing(Protocol):
    """Where a store puts the blocks of one load. Its calls may come from any thread."""

    def arrived(self, block: StoredBlock) -> bool:
        """Give one of the blocks, whose content is read before this returns. False: no more of them are wanted."""
        ...

    def ended(self) -> None:
        """No more blocks come, whether all have arrived or not."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for it any longer: it has ended, or its time is over."""
        ...


@dataclass(slots=True)
class TierCounters:
    """Of one store among several, since the start. Stored blocks were given to it, and those dropped are among them:
    it had no room or no time for them. A damaged one was read, or its file was, and was not served. Rests: how often it
    was left alone after a fault. Several threads count without a lock, so one of a great many may be missing."""

    num_stored_blocks: int = 0
    num_loaded_blocks: int = 0
    num_dropped_blocks: int = 0
    num_damaged_blocks: int = 0
    num_failures: int = 0
    num_silent_loads: int = 0
    num_rests: int = 0


class KvStore(Protocol):
    """Keeps the bytes of KV blocks by their hashes. Its calls may come from several threads. Whatever a call raises
    counts as a fault of the store, and it is left alone for `REST_S`."""

    @property
    def usage(self) -> float:
        """How full it is, 0 to 1. 0 where nobody can say."""
        ...

    def lookup(self, hashes: Sequence[bytes]) -> int:
        """How many of these blocks it can load, counted from the first one to the first that is missing. They are in
        use by that, where it decides what to keep. Returns at once: a store that would have to ask somebody takes what
        it does not know for there, and its load ends early."""
        ...

    def holds(self, block_hash: bytes) -> bool:
        """Whether it is sure to have this block, which need not be put then. The block is in use by that."""
        ...

    def put(self, block: StoredBlock) -> None:
        """Keep a block, or decide not to. `content` is the pool's own memory: when this returns it was read."""
        ...

    def load(self, hashes: Sequence[bytes], landing: Landing) -> None:
        """Begin to give these blocks to `landing`, the first ones first, and end it in any case. Returns at once."""
        ...

    def forget(self, block_hash: bytes) -> None:
        """This block came back wrong: never give it again, unless it is put again."""
        ...

    def close(self) -> None:
        """End everything that is running. No other call comes after it."""
        ...


@runtime_checkable
class FollowedStore(Protocol):
    """What a store may have beside the calls of `KvStore`: it tells which blocks it has."""

    def follow(self, changes: BlockChanges) -> None:
        """Tell `changes` of the blocks that are there, and from now on of each that comes or leaves."""
        ...
