"""Where a receiver puts what a sender has, which may be whole blocks or the part of each block that one rank stores.

Owns the contract, and the case that nodes have one pool each. Which bytes a part is, and where they go, is the
knowledge of `baton.kvtransfer.transports.part_inlets`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from baton.kvtransfer.pools.base import BlockSink
from baton.wire.kv_shard import WHOLE_BLOCK, KvShard


@dataclass(frozen=True, slots=True)
class Inlet:
    """The place where the bytes of one rank of a sender are written. `sources`: all ranks of that sender that have some
    of a block."""

    sink: BlockSink
    source: KvShard = WHOLE_BLOCK
    sources: tuple[KvShard, ...] = (WHOLE_BLOCK,)


class Inlets(Protocol):
    """Knows the inlet of each rank of any sender."""

    def of(self, source: KvShard | None) -> Inlet | None:
        """The inlet of a rank, or of a sender that has whole blocks; None: it has nothing for this pool."""
        ...


@dataclass(frozen=True, slots=True)
class WholeOnly:
    """The inlet of a node whose senders all have whole blocks."""

    sink: BlockSink

    def of(self, source: KvShard | None) -> Inlet | None:
        """The pool for a sender of whole blocks, None for a rank."""
        return Inlet(self.sink) if source is None else None
