"""What somebody hears who follows the prefix cache: which tokens fill which blocks, and what became of them.

Owns the contract between the engine and such a listener. The block pool knows hashes only, so the tokens behind them
are told when a request publishes its blocks, before the pool's changes are. Whether a block became findable is said by
the changes alone: another one may have had its hash already, and one that is evicted at once is in none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from baton.engine.cache.block_pool import CacheChanges
from baton.wire.prompt import Prompt


class PublishedRun(NamedTuple):
    """Neighbouring blocks of a sequence that begins with `prompt`, filled by `token_ids`. `first`: the number of the
    first one in its sequence. `parent`: the hash of the block before it, None at the beginning."""

    prompt: Prompt
    first: int
    parent: bytes | None
    hashes: Sequence[bytes]
    token_ids: Sequence[int]


class BlockLog(Protocol):
    """Follows the prefix cache. Called by the engine's thread, between steps: it has to return at once."""

    def published(self, run: PublishedRun) -> None:
        """A request has published these blocks."""
        ...

    def changed(self, changes: CacheChanges) -> None:
        """The changes of the prefix cache since the last call. What they store was `published` before."""
        ...
