"""What a receiver that writes its own pool may write: blocks that a grant announced, each once.

Owns the announced blocks of every live grant, which of them have arrived, and the arrivals nobody has asked for yet.
Where several ranks of a sender have parts of a block (`baton.kvtransfer.parts`), each part is written once, and the
block has arrived with the last of them. Knows no sockets and no bytes.

What comes may have overtaken what allows it: the order to expect the blocks, or to expect them anew because some
arrived damaged and are sent again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TypeAlias

from baton.kvtransfer.transports.base import BlocksArrived
from baton.kvtransfer.write_proof import WriteProof
from baton.wire.kv_shard import WHOLE_BLOCK, KvShard
from baton.wire.request_key import RequestKey

_NOTHING: AbstractSet[int] = frozenset()
_MAX_OVER = 1024
Look: TypeAlias = Callable[[Callable[[], bool]], None]
"""Takes grants that have come and were not read; waits for those on their way, until what it is given holds."""


@dataclass(slots=True)
class _Grant:
    block_ids: tuple[int, ...]
    generations: tuple[int, ...]
    arrived: dict[KvShard, set[int]] = field(default_factory=dict)
    news: list[BlocksArrived] = field(default_factory=list)
    was_looked_past: bool = False

    def has_any(self, source: KvShard, first_index: int, last_index: int) -> bool:
        """Whether one of these blocks has arrived from `source`."""
        return not self.arrived.get(source, _NOTHING).isdisjoint(range(first_index, last_index))


class AnnouncedBlocks:
    """The blocks that are on their way to one pool.

    `look` is called when something comes for an unknown handoff, or a block for the second time: its announcement may
    have come too, or come soon. It is not called again for handoffs that are over, or never came, and once only for
    doubled blocks of a grant.
    """

    def __init__(self) -> None:
        self.look: Look = _nothing
        self._over: deque[RequestKey] = deque(maxlen=_MAX_OVER)
        self._grants: dict[RequestKey, _Grant] = {}
        self._with_news: set[RequestKey] = set()

    def expect(self, key: RequestKey, block_ids: Sequence[int], generations: Sequence[int]) -> None:
        """Accept these blocks from now on, each once. Arrivals of an earlier time that were not taken are not arrivals
        any more."""
        self._grants[key] = _Grant(tuple(block_ids), tuple(generations))

    def forget(self, key: RequestKey) -> None:
        """Accept no blocks for this handoff any more, and remember that it is over."""
        if self._grants.pop(key, None) is not None:
            self._over.append(key)
        self._with_news.discard(key)

    def may_write(
        self,
        key: RequestKey,
        first_index: int,
        block_ids: tuple[int, ...],
        generations: tuple[int, ...],
        source: KvShard = WHOLE_BLOCK,
    ) -> bool:
        """Whether these are the blocks granted at `first_index` and following, and none of them has arrived from
        `source`."""
        last_index = first_index + len(block_ids)
        self._look_for(key, source, first_index, last_index)
        grant = self._grants.get(key)
        return (
            grant is not None
            and len(block_ids) > 0
            and grant.block_ids[first_index:last_index] == block_ids
            and grant.generations[first_index:last_index] == generations
            and not grant.has_any(source, first_index, last_index)
        )

    def _look_for(self, key: RequestKey, source: KvShard, first_index: int, last_index: int) -> None:
        grant = self._grants.get(key)
        if grant is None:
            self.look(lambda: key in self._grants or key in self._over)
            if key not in self._grants and key not in self._over:
                self._over.append(key)
        elif grant.has_any(source, first_index, last_index) and not grant.was_looked_past:
            grant.was_looked_past = True
            self.look(lambda: self._grants.get(key) is not grant)

    def arrived(
        self,
        key: RequestKey,
        first_index: int,
        count: int,
        source: KvShard = WHOLE_BLOCK,
        sources: Collection[KvShard] = (WHOLE_BLOCK,),
    ) -> None:
        """The bytes that `source` has of these blocks, which `may_write` allowed, are in the pool now. `sources`: all
        that have a part of them."""
        grant = self._grants[key]
        grant.arrived.setdefault(source, set()).update(range(first_index, first_index + count))
        self._with_news.add(key)
        if len(sources) == 1:
            grant.news.append(BlocksArrived(key, first_index, count))
            return
        by_source = [grant.arrived.get(each, _NOTHING) for each in sources]
        for index in range(first_index, first_index + count):
            if all(index in indexes for indexes in by_source):
                grant.news.append(BlocksArrived(key, index, 1))

    def take_arrivals(self) -> Sequence[BlocksArrived]:
        """The blocks that have arrived since the last call, of all grants."""
        arrivals: list[BlocksArrived] = []
        for key in self._with_news:
            arrivals += self._grants[key].news
            self._grants[key].news = []
        self._with_news.clear()
        return arrivals


def _nothing(is_known: Callable[[], bool]) -> None:
    """Nothing else can have come."""


class GrantedWriter:
    """The common part of receivers that write their pool themselves, as a grant allows (see `Receiver`). `num_refused`
    counts messages that changed nothing."""

    write_proof = WriteProof.OWN_HANDS
    is_silent = False
    is_ready = True

    def __init__(self) -> None:
        self.num_refused = 0
        self._announced = AnnouncedBlocks()

    def expect(self, key: RequestKey, block_ids: Sequence[int], generations: Sequence[int]) -> None:
        """Accept these blocks of a grant from now on, each once."""
        self._announced.expect(key, block_ids, generations)

    def look_by(self, look: Look) -> None:
        """Set what is called when something comes for a handoff that is not known here."""
        self._announced.look = look

    def forget(self, key: RequestKey) -> None:
        """Accept no blocks for this handoff any more."""
        self._announced.forget(key)

    def take_arrivals(self) -> Sequence[BlocksArrived]:
        """The blocks that have arrived since the last call."""
        return self._announced.take_arrivals()

    def is_writing(self, key: RequestKey) -> bool:
        """False: this thread writes by itself, and only in `poll`."""
        return False

    def fence(self) -> bool:
        """True: nobody but this receiver writes the pool, and it writes nothing that was forgotten."""
        return True
