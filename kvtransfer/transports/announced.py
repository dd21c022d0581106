"""What a receiver that writes its own pool may write: blocks that a grant announced, each once.

Owns the announced blocks of every live grant, which of them have arrived, and the arrivals nobody has asked for yet.
Knows no sockets and no bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtransfer.transports.base import BlocksArrived
from kvtransfer.write_proof import WriteProof
from wire.request_key import RequestKey


@dataclass(slots=True)
class _Grant:
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]
    arrived: set[int] = field(default_factory=set)
    news: list[BlocksArrived] = field(default_factory=list)


class AnnouncedBlocks:
    """The blocks that are on their way to one pool."""

    def __init__(self) -> None:
        self._grants: dict[RequestKey, _Grant] = {}
        self._with_news: set[RequestKey] = set()

    def expect(self, key: RequestKey, block_ids: Sequence[int], generations: Sequence[int]) -> None:
        """See `Receiver.expect`. Arrivals of an earlier time that were not taken are not arrivals any more."""
        self._grants[key] = _Grant(tuple(block_ids), tuple(generations))

    def forget(self, key: RequestKey) -> None:
        """See `Receiver.forget`."""
        self._grants.pop(key, None)
        self._with_news.discard(key)

    def may_write(
        self, key: RequestKey, first_index: int, block_ids: tuple[int, ...], generations: tuple[int, ...]
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

    def arrived(self, key: RequestKey, first_index: int, count: int) -> None:
        """These blocks, which `may_write` allowed, are in the pool now."""
        grant = self._grants[key]
        grant.arrived.update(range(first_index, first_index + count))
        grant.news.append(BlocksArrived(key, first_index, count))
        self._with_news.add(key)

    def take_arrivals(self) -> Sequence[BlocksArrived]:
        """See `Receiver.take_arrivals`."""
        arrivals: list[BlocksArrived] = []
        for key in self._with_news:
            arrivals += self._grants[key].news
            self._grants[key].news = []
        self._with_news.clear()
        return arrivals


class GrantedWriter:
    """What receivers have in common that write their pool themselves, as a grant allows (see `Receiver`).

    `num_refused` counts messages that changed nothing.
    """

    write_proof = WriteProof.OWN_HANDS
    is_silent = False
    is_ready = True

    def __init__(self) -> None:
        self.num_refused = 0
        self._announced = AnnouncedBlocks()

    def expect(self, key: RequestKey, block_ids: Sequence[int], generations: Sequence[int]) -> None:
        """See `Receiver.expect`."""
        self._announced.expect(key, block_ids, generations)

    def forget(self, key: RequestKey) -> None:
        """See `Receiver.forget`."""
        self._announced.forget(key)

    def take_arrivals(self) -> Sequence[BlocksArrived]:
        """See `Receiver.take_arrivals`."""
        return self._announced.take_arrivals()

    def fence(self) -> bool:
        """Nobody but this receiver writes the pool, and it writes nothing that was forgotten."""
        return True
