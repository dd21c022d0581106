"""The tiers of a node whose ranks have pools of their own: every rank has tiers below its own pool, for its own part of
each block, and the driver alone decides what they do.

Owns the loads as all ranks together see them. What happens to a block here is told to all other ranks, over the channel
by which they are told of steps. So every rank does the same between the same two steps:

- `Evicted` comes before anything that may overwrite those blocks, and `Save` before the step that does. Each rank saves
  what *it* holds unsaved: a load that was cut short may have written into a block at one rank and not at another.
- A block of a load is here when every rank has found its part of it right, and the load goes on as far as the slowest
  one. A part that is missing, damaged or late at one rank is missing at all: that block and those behind it are
  computed. Ranks that have the block lose nothing by that.
- No step uses a block before the driver has closed its load, and `EndLoad` comes before that step.
- What ranks keep need not be the same. The driver asks its own tiers what there is, and a rank that lacks it says so at
  once (`Came`). Computing the block again makes it whole, since each rank puts what it has not.

Another node's writes are in no order with these orders. So what a handoff overwrites is dropped, not saved, and blocks
that a rank may still save or load are waited for, which are those of a step or a load that was given up. A rank that is
gone ends the node, whatever is going on here.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import count
from typing import Protocol

from baton.device.base import STEP_TIMEOUT_S, DeviceFailed
from baton.engine.cache.last_blocks import TimeLeft
from baton.engine.cache.tiered_pool import Load, Progress, TieredPool
from baton.ranks.executor.messages import BeginLoad, Came, Drop, EndLoad, Evicted, Order, Save, Saved, SaveLast
from baton.ranks.executor.part_progress import PartProgress

_LOOK_S = 0.2


class OtherRanks(Protocol):
    """The driver's way to the other ranks. `Ranks` is one."""

    def tell_all(self, order: Order) -> None:
        """Send an order to all of them. Raises `DeviceFailed`."""
        ...

    def hear(self, of_tiers: Callable[[int, Came | Saved], None]) -> None:
        """Have `of_tiers` called with what a rank reports, and its number from 1 on."""
        ...

    def require_alive(self) -> None:
        """Raise `DeviceFailed` when a rank has ended."""
        ...

    def within(self, limit_s: float) -> AbstractContextManager[None]:
        """A context for calls with the ranks, after which they are ended. Raises `DeviceFailed`."""
        ...


class LeadingTiers:
    """The pools and tiers of `num_ranks` ranks, of which this one's are `own`. See `PoolTiers`."""

    def __init__(self, own: TieredPool, ranks: OtherRanks, num_ranks: int) -> None:
        self.tiers, self.counters, self.block_bytes = own.tiers, own.counters, own.block_bytes
        self._own = own
        self._ranks = ranks
        self._num_ranks = num_ranks
        self._unsaved: set[int] = set()  # at any rank
        self._untold: dict[int, bytes] = {}
        self._numbers = count(1)
        self._loads: dict[int, RanksLoad] = {}
        self._saves: dict[int, BlocksInUse] = {}
        ranks.hear(self._heard)

    @property
    def has_unsaved(self) -> bool:
        """Whether a rank may hold what the prefix cache has forgotten and its tiers have not."""
        return bool(self._unsaved)

    def evicted(self, blocks: Iterable[tuple[int, bytes]]) -> None:
        """These blocks and hashes are not found any more, and each block has an owner."""
        evicted = dict(blocks)
        self._own.evicted(evicted.items())
        self._untold |= evicted
        self._unsaved.update(evicted)

    def save(self, block_ids: Iterable[int]) -> None:
        """A step is about to write into these blocks."""
        if unsaved := self._take_unsaved(block_ids):
            number = next(self._numbers)
            self._saves[number] = BlocksInUse(unsaved, range(1, self._num_ranks))
            self._tell(Save(number, unsaved))
            self._own.save(unsaved)

    def give_away(self, block_ids: Iterable[int]) -> None:
        """Another node is about to write into these blocks: wait until no rank uses them any more, and save nothing."""
        block_ids = set(block_ids)
        if dropped := self._take_unsaved(block_ids):
            self._tell(Drop(dropped))
            self._own.drop(dropped)
        for in_use in (*list(self._saves.values()), *[load.in_use for load in list(self._loads.values())]):
            if not in_use.is_over and not in_use.block_ids.isdisjoint(block_ids):
                self._wait_for(in_use)

    def load(self, hashes: Sequence[bytes], block_ids: Sequence[int], progress: Progress) -> RanksLoad:
        """Have all ranks load blocks. Nobody else writes into `block_ids` until the load was closed."""
        number = next(self._numbers)
        load = self._loads[number] = RanksLoad(block_ids, progress, self._num_ranks, lambda: self._close(number))
        self._tell(BeginLoad(number, tuple(hashes), tuple(block_ids)))
        load.begin(self._own, hashes, block_ids)
        return load

    def save_last(
        self, reused: Sequence[tuple[int, bytes]], others: Sequence[tuple[int, bytes]], time_left_s: TimeLeft
    ) -> None:
        """Before a planned end: have the tiers of all ranks keep these blocks, while there is time. Waits."""
        number, blocks = next(self._numbers), (*reused, *others)
        in_use = self._saves[number] = BlocksInUse((), range(1, self._num_ranks))
        block_ids, hashes = tuple([each for each, _ in blocks]), tuple([each for _, each in blocks])
        self._tell(SaveLast(number, time_left_s(), block_ids, hashes, len(reused)))
        self._own.save_last(reused, others, time_left_s)
        with contextlib.suppress(DeviceFailed):  # whoever is gone saves nothing
            while (left_s := time_left_s()) > 0 and not in_use.wait(min(left_s, _LOOK_S)):
                self._ranks.require_alive()

    def close(self) -> None:
        """End the tiers of this rank; the others end theirs when they are told to stop."""
        self._own.close()

    def _take_unsaved(self, block_ids: Iterable[int]) -> tuple[int, ...]:
        taken = tuple([block_id for block_id in block_ids if block_id in self._unsaved])
        self._unsaved.difference_update(taken)
        return taken

    def _tell(self, order: Order) -> None:
        untold, self._untold = self._untold, {}
        with contextlib.suppress(DeviceFailed):  # a rank that is gone ends the node where it looks
            if untold:
                self._ranks.tell_all(Evicted(tuple(untold), tuple(untold.values())))
            self._ranks.tell_all(order)

    def _close(self, number: int) -> None:
        self._tell(EndLoad(number))
        self._forget(number)

    def _heard(self, rank: int, report: Came | Saved) -> None:
        """A rank reports, on another thread."""
        if isinstance(report, Saved):
            if (in_use := self._saves.get(report.number)) is not None and in_use.done_by(rank):
                del self._saves[report.number]
        elif (load := self._loads.get(report.load)) is not None:
            load.part(rank, report.num_blocks, report.has_ended, report.is_damaged)
            self._forget(report.load)

    def _forget(self, number: int) -> None:
        load = self._loads.get(number)
        if load is not None and load.is_closed and load.in_use.is_over:
            self._loads.pop(number, None)  # the other thread may have come first

    def _wait_for(self, in_use: BlocksInUse) -> None:
        with self._ranks.within(STEP_TIMEOUT_S):
            while not in_use.wait(_LOOK_S):
                self._ranks.require_alive()


class BlocksInUse:
    """Blocks that some ranks may still read or write by what they were told."""

    def __init__(self, block_ids: Iterable[int], ranks: Iterable[int]) -> None:
        self.block_ids = frozenset(block_ids)
        self.ranks = set(ranks)
        self._news = threading.Condition()

    @property
    def is_over(self) -> bool:
        """Whether no rank uses them any more."""
        return not self.ranks

    def done_by(self, rank: int) -> bool:
        """That rank does not use them any more; whether none does."""
        with self._news:
            self.ranks.discard(rank)
            self._news.notify_all()
            return self.is_over

    def wait(self, timeout_s: float) -> bool:
        """Wait until no rank uses them; whether that is so."""
        with self._news:
            return self._news.wait_for(lambda: self.is_over, timeout_s)


class RanksLoad:
    """A load by `num_ranks` ranks into `block_ids`. `progress`: hears of what has come at all of them; `on_closed`: is
    called when this rank takes nothing any more."""

    def __init__(
        self, block_ids: Sequence[int], progress: Progress, num_ranks: int, on_closed: Callable[[], None]
    ) -> None:
        self.in_use = BlocksInUse(block_ids, range(num_ranks))
        self.is_closed = False
        self._progress = progress
        self._on_closed = on_closed
        self._lock = threading.Lock()
        self._num_blocks = [0] * num_ranks
        self._num_whole = 0
        self._own: Load | None = None
        self._own_part = PartProgress(partial(self.part, 0))

    @property
    def is_over(self) -> bool:
        """Whether nobody need wait for it any longer."""
        return self._progress.is_over

    def begin(self, own: TieredPool, hashes: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Begin this rank's part."""
        self._own = own.load(hashes, block_ids, self._own_part)

    def part(self, rank: int, num_blocks: int, has_ended: bool, is_damaged: bool) -> None:
        """A rank has so many blocks, from the first one on. Called from any thread."""
        with self._lock:
            self._num_blocks[rank] = num_blocks
            if has_ended:
                self.in_use.done_by(rank)
            if not self.is_closed:
                self._note(is_damaged=is_damaged)

    def _note(self, *, is_damaged: bool) -> None:
        if is_damaged:
            self._progress.damaged()
        while self._num_whole < min(self._num_blocks):
            self._progress.arrived(self._num_whole)
            self._num_whole += 1
        ended = [count for rank, count in enumerate(self._num_blocks) if rank not in self.in_use.ranks]
        if ended and self._num_whole >= min(ended):
            self._progress.ended()  # one rank has no more, and no other need go on

    def close(self) -> int:
        """Take nothing any more. How many blocks, from the first one on, are there at all ranks."""
        with self._lock:
            self.is_closed = True
        if self._own is not None:
            self._own.close()
        self._own_part.ended()
        self._on_closed()
        return self._num_whole
