"""What is kept of a node's KV before a planned end: which blocks there are, and who keeps them.

Owns the contract between those who have blocks that end with the process, and a store that outlives it. The blocks that
were used again come first, whoever has them; what there is no time or room for is lost with the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

from baton.engine.cache.store import StoredBlock

TimeLeft: TypeAlias = Callable[[], float]
"""The seconds until all has to be over; asked again and again, for somebody may want it sooner."""


class LastBlock(NamedTuple):
    """A block that ends with the process. `read`: its bytes, which hold until the next block is read."""

    block_hash: bytes
    read: Callable[[], StoredBlock]


@dataclass(frozen=True, slots=True)
class LastBlocks:
    """Blocks of one place, each part in the order of worth. `reused`: those that were found again."""

    reused: Sequence[LastBlock] = field(default=())
    others: Sequence[LastBlock] = field(default=())


@runtime_checkable
class PassingStore(Protocol):
    """What a store may have beside the calls of `KvStore`: its blocks end with the process."""

    def last_blocks(self) -> LastBlocks:
        """All that it has. Nothing is put any more."""
        ...


@runtime_checkable
class LastingStore(Protocol):
    """What a store may have beside the calls of `KvStore`: its blocks outlive the process."""

    def keep_last(self, blocks: Sequence[LastBlock], time_left_s: TimeLeft) -> None:
        """Keep these, the first ones first, as far as there is time and room. Waits. Only `close` comes after it, and
        is over by then as well."""
        ...


def in_order(places: Iterable[LastBlocks]) -> list[LastBlock]:
    """The blocks of several places, those that were used again first, and each once."""
    each_place = list(places)
    blocks = chain(*(each.reused for each in each_place), *(each.others for each in each_place))
    by_hash: dict[bytes, LastBlock] = {}
    for block in blocks:
        by_hash.setdefault(block.block_hash, block)
    return list(by_hash.values())
