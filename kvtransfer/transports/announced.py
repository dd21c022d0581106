"""What a receiver that writes its own pool may write: blocks that a grant announced, each once.

Owns the announced blocks of every live grant and which of them have arrived. Knows no sockets and no bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtransfer.messages import HandoffKey


@dataclass(slots=True)
class _Grant:
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]
    arrived: set[int] = field(default_factory=set)


class AnnouncedBlocks:
    """The blocks that are on their way to one pool."""

    def __init__(self) -> None:
        self._grants: dict[HandoffKey, _Grant] = {}

    def expect(self, key: HandoffKey, block_ids: Sequence[int], generations: Sequence[int]) -> None:
        """See `Receiver.expect`."""
        self._grants[key] = _Grant(tuple(block_ids), tuple(generations))

    def forget(self, key: HandoffKey) -> None:
        """See `Receiver.forget`."""
        self._grants.pop(key, None)

    def num_missing(self, key: HandoffKey) -> int:
        """See `Receiver.num_missing`."""
        grant = self._grants.get(key)
        return 0 if grant is None else len(grant.block_ids) - len(grant.arrived)

    def may_write(
        self, key: HandoffKey, first_index: int, block_ids: tuple[int, ...], generations: tuple[int, ...]
    ) -> bool:
        """Whether these are the blocks granted at `first_index` and following, and none of them has arrived."""
        grant, last_index = self._grants.get(key), first_index + len(block_ids)
        return (
            grant is not None
            and len(block_ids) > 0
            and grant.block_ids[first_index:last_index] == block_ids
            and grant.generations[first_index:last_index] == generations
            and grant.arrived.isdisjoint(range(first_index, last_index))
        )

    def arrived(self, key: HandoffKey, first_index: int, count: int) -> None:
        """These blocks are in the pool now."""
        self._grants[key].arrived.update(range(first_index, first_index + count))
