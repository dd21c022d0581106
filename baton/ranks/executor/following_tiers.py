"""The pool of a rank that is not the first, and the tiers below it: they do what the driver says of its own.

Owns the loads that the driver has begun and not ended. Decides nothing but what depends on this rank's bytes: whether
its tiers have a block, and whether that is right. Orders come in the order of steps (see `leading_tiers`), so a block
was saved before a step writes into it, and nothing of an ended load is written into a step's blocks.

`Came` tells of blocks at most every `_TELLS_S`, and always of the end of a load.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from baton.engine.cache.tiered_pool import Load, TieredPool
from baton.ranks.executor.messages import BeginLoad, Came, Drop, EndLoad, Evicted, Order, Report, Save, Saved, SaveLast
from baton.ranks.executor.part_progress import PartProgress
from baton.runtime.channel import ChannelBroken

_TELLS_S = 0.001


class FollowingTiers:
    """Does with `pool` what the driver orders. `say`: tells the driver, from any thread; raises `ChannelBroken`."""

    def __init__(self, pool: TieredPool, say: Callable[[Report], None]) -> None:
        self._pool = pool
        self._say = say
        self._loads: dict[int, tuple[Load, PartProgress]] = {}

    def take(self, order: Order | Report) -> bool:
        """Carry out an order; False: it is about something else. Raises `ChannelBroken` for one that contradicts
        others."""
        match order:
            case Evicted():
                self._pool.evicted(zip(order.block_ids, order.hashes, strict=True))
            case Save():
                self._pool.save(order.block_ids)
                self._say(Saved(order.number))
            case SaveLast():
                self._save_last(order)
            case Drop():
                self._pool.drop(order.block_ids)
            case BeginLoad():
                self._begin(order)
            case EndLoad():
                self._end(order.load)
            case _:
                return False
        return True

    def close(self) -> None:
        """End all loads, then the tiers."""
        for number in list(self._loads):
            self._end(number)
        self._pool.close()

    def _save_last(self, order: SaveLast) -> None:
        for number in list(self._loads):
            self._end(number)
        until_s = time.monotonic() + order.seconds
        blocks = list(zip(order.block_ids, order.hashes, strict=True))
        reused, others = blocks[: order.num_reused], blocks[order.num_reused :]
        self._pool.save_last(reused, others, lambda: until_s - time.monotonic())
        self._say(Saved(order.number))

    def _begin(self, order: BeginLoad) -> None:
        progress = PartProgress(_Telling(order.load, self._say).tell)
        self._loads[order.load] = self._pool.load(order.hashes, order.block_ids, progress), progress

    def _end(self, number: int) -> None:
        if number not in self._loads:
            raise ChannelBroken("the driver ends a load that it has not begun")
        load, progress = self._loads.pop(number)
        load.close()
        progress.ended()


class _Telling:
    """Tells the driver of one load."""

    def __init__(self, load: int, say: Callable[[Report], None]) -> None:
        self._load = load
        self._say = say
        self._next_s = 0.0

    def tell(self, num_blocks: int, has_ended: bool, is_damaged: bool) -> None:
        """Say what has come, unless that was said just now."""
        now_s = time.monotonic()
        if has_ended or now_s >= self._next_s:
            self._next_s = now_s + _TELLS_S
            with contextlib.suppress(ChannelBroken):  # noticed where orders are read
                self._say(Came(self._load, num_blocks, has_ended, is_damaged))
