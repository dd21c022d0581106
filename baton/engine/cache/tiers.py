"""The KV stores of an engine: each block is taken from the first that has it, and is put into the first that takes it.

Owns the order of the stores, the parts of a load by where its blocks are, and which store is left alone. What one of
them evicts it gives to the next by itself (`HostTier`, `DiskTier`: `on_evicted`). Knows no pool and no request.

Invariants:
- a store that raises, gives nothing for `LATENCY_S` or was wrong is left alone for `REST_S`, and the others are asked
  meanwhile;
- the blocks of a load come in order, from one store at a time;
- a block that comes from a store below the first is put into the first, because it is used again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from baton.engine.cache.block_changes import BlockChanges
from baton.engine.cache.fault_log import FaultLog
from baton.engine.cache.last_blocks import LastBlock, LastBlocks, LastingStore, PassingStore, TimeLeft, in_order
from baton.engine.cache.store import (
    LATENCY_S,
    REST_S,
    FollowedStore,
    KvStore,
    Landing,
    StoredBlock,
    TierCounters,
)

_T = TypeVar("_T")
_GIVE = "give"
"""What a tier fails at that gives nothing, or something wrong."""


class Tier:
    """One store of several, and how long its last fault is remembered. No call raises. `counters`: of its blocks; the
    store may count there what only it knows."""

    def __init__(
        self, name: str, store: KvStore, counters: TierCounters, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = name
        self.counters = counters
        self._store = store
        self._clock = clock
        self._rests_until_s = clock()
        self._open: dict[Landing, float] = {}
        self._refused: bytes | None = None
        self._faults = FaultLog(f"the KV store {name}", clock)

    @property
    def usage(self) -> float:
        """How full it is, 0 to 1; 0 while it is left alone."""
        return self._asked("usage", lambda: min(1.0, max(0.0, self._store.usage)), 0.0)

    def follow(self, changes: BlockChanges) -> bool:
        """Have it tell which blocks it has; whether it does."""
        store = self._store
        return isinstance(store, FollowedStore) and self._does("follow", lambda: store.follow(changes))

    def lookup(self, hashes: Sequence[bytes]) -> int:
        """How many of these blocks it has, from the first one on."""
        self._look_for_late_loads()
        return self._asked("lookup", lambda: min(len(hashes), max(0, self._store.lookup(hashes))), 0)

    def holds(self, block_hash: bytes) -> bool:
        """Whether it is sure to have a block."""
        return self._asked("holds", lambda: self._store.holds(block_hash), False)

    def put(self, block: StoredBlock) -> bool:
        """Have it keep a block; whether it was asked to."""
        if not self._does("put", lambda: self._store.put(block)):
            return False
        self.counters.num_stored_blocks += 1
        return True

    def load(self, hashes: Sequence[bytes], landing: Landing) -> bool:
        """Begin to give these blocks to `landing`. False: it will not."""
        self._open[landing] = self._clock()
        if self._does("load", lambda: self._store.load(hashes, landing)):
            return True
        self._open.pop(landing, None)
        return False

    def gave(self, landing: Landing, block: StoredBlock, *, is_wanted: bool) -> None:
        """It has given a block to a landing, which took it or wants no more."""
        if landing in self._open:
            self._open[landing] = self._clock()
        self.counters.num_loaded_blocks += is_wanted
        self._refused = None if is_wanted else block.block_hash
        if is_wanted:
            self._faults.worked(_GIVE)

    def ended(self, landing: Landing) -> None:
        """It gives this landing no more blocks."""
        self._open.pop(landing, None)

    def forget(self, block_hash: bytes) -> None:
        """This block came back wrong, from this tier or from another."""
        self._does("forget", lambda: self._store.forget(block_hash))
        if self._refused == block_hash:
            self.counters.num_damaged_blocks += 1
            self._leave_alone(_GIVE, "gave a block with wrong bytes")

    def last_blocks(self) -> LastBlocks:
        """What it has and what ends with this process."""
        store = self._store
        return self._asked("last", store.last_blocks, LastBlocks()) if isinstance(store, PassingStore) else LastBlocks()

    def save(self, blocks: Sequence[LastBlock], time_left_s: TimeLeft) -> bool:
        """Have it keep blocks before the end, if it outlives this process; whether it was asked to. Waits."""
        store = self._store
        return isinstance(store, LastingStore) and self._does("save", lambda: store.keep_last(blocks, time_left_s))

    def close(self) -> None:
        """End everything that is running."""
        self._rests_until_s = 0.0
        self._does("close", self._store.close)

    def _look_for_late_loads(self) -> None:
        silent_s = self._clock() - LATENCY_S
        late = [landing for landing, since_s in list(self._open.items()) if since_s <= silent_s and landing.is_over]
        if late:
            self.counters.num_silent_loads += len(late)
            self._leave_alone(_GIVE, "gave nothing for too long")
        for landing in late:
            self._open.pop(landing, None)

    def _asked(self, what: str, call: Callable[[], _T], otherwise: _T) -> _T:
        answers: list[_T] = []
        return answers[0] if self._does(what, lambda: answers.append(call())) else otherwise

    def _does(self, what: str, call: Callable[[], None]) -> bool:
        """Have the store do something; whether it did."""
        if self._clock() < self._rests_until_s:
            return False
        try:
            call()
        except Exception as error:  # a store is nothing that a node depends on
            self.counters.num_failures += 1
            self._leave_alone(what, f"failed: {type(error).__name__}: {error}")
            return False
        self._faults.worked(what)
        return True

    def _leave_alone(self, what: str, reason: str) -> None:
        self._rests_until_s = self._clock() + REST_S
        self.counters.num_rests += 1
        self._faults.failed(what, f"is not asked for {REST_S:g} s after each fault: it {reason}")


class Tiers:
    """One store or several, the fastest first. No call raises."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self.tiers = tiers

    @property
    def usage(self) -> float:
        """That of the emptiest."""
        return min(tier.usage for tier in self.tiers)

    def names(self, hashes: Sequence[bytes]) -> list[str]:
        """For each of these blocks the tier that it would come from, up to the first that no tier has."""
        names: list[str] = []
        while len(names) < len(hashes):
            rest = hashes[len(names) :]
            run = next(([tier.name] * found for tier in self.tiers if (found := tier.lookup(rest))), None)
            if run is None:
                break
            names += run
        return names

    def holds(self, block_hash: bytes) -> bool:
        """Whether any tier is sure to have a block."""
        return any(tier.holds(block_hash) for tier in self.tiers)

    def put(self, block: StoredBlock) -> bool:
        """Have the first tier that is not left alone keep a block; whether there is one."""
        return any(tier.put(block) for tier in self.tiers)

    def load(self, hashes: Sequence[bytes], landing: Landing) -> None:
        """Give these blocks to `landing` in order, from wherever each of them is."""
        _TieredLoad(self.tiers, hashes, landing).go_on()

    def forget(self, block_hash: bytes) -> None:
        """No tier gives this block again."""
        for tier in self.tiers:
            tier.forget(block_hash)

    def save(self, of_pool: LastBlocks, time_left_s: TimeLeft) -> None:
        """Before the end: have a tier that outlives this process keep the blocks of the pool and of the others."""
        blocks = in_order([of_pool, *[tier.last_blocks() for tier in self.tiers]])
        any(tier.save(blocks, time_left_s) for tier in self.tiers)

    def close(self) -> None:
        """End all tiers, the first one first."""
        for tier in self.tiers:
            tier.close()


class _TieredLoad:
    """A load, of which the blocks of `hashes` are still to come. One run of it is open at a time."""

    def __init__(self, tiers: Sequence[Tier], hashes: Sequence[bytes], landing: Landing) -> None:
        self._tiers = tiers
        self._hashes = hashes
        self._landing = landing
        self._empty: tuple[Tier, ...] = ()  # these had the next block and did not give it: it may have gone down

    def go_on(self) -> None:
        """Begin the next run with the first tier that has the next block; without one, the load has ended."""
        for place, tier in enumerate(self._tiers if self._hashes else ()):
            hashes = () if tier in self._empty else self._hashes[: tier.lookup(self._hashes)]
            if hashes and self._begin_run(tier, _before_any_has(self._tiers[:place], hashes)):
                return
        self._landing.ended()

    def _begin_run(self, tier: Tier, hashes: Sequence[bytes]) -> bool:
        """Have `tier` load these blocks. False: it could not begin, and what it still gives is not taken."""
        run = _Run(self, tier, self._landing)
        return tier.load(hashes, run) or not run.cancel()

    def has_run(self, tier: Tier, num_arrived: int, *, is_wanted: bool) -> None:
        """A run has ended, after so many blocks. After none, the next block is looked for in other tiers."""
        self._empty = () if num_arrived else (*self._empty, tier)
        self._hashes = self._hashes[num_arrived:] if is_wanted else ()
        self.go_on()

    def came_from(self, tier: Tier, block: StoredBlock) -> None:
        """A block came: what is used again belongs into the first tier."""
        if tier is not self._tiers[0]:
            self._tiers[0].put(block)


class _Run:
    """The blocks of a load that one tier gives, one after another. See `Landing`."""

    def __init__(self, load: _TieredLoad, tier: Tier, landing: Landing) -> None:
        self._load = load
        self._tier = tier
        self._landing = landing
        self._num_arrived = 0
        self._is_wanted = True
        self._has_ended = False

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for the load any longer."""
        return self._landing.is_over

    def cancel(self) -> bool:
        """Take nothing of it; False when it has ended already."""
        was_open, self._has_ended = not self._has_ended, True
        return was_open

    def arrived(self, block: StoredBlock) -> bool:
        """The tier has the next block."""
        if self._has_ended:
            return False
        self._is_wanted = self._landing.arrived(block)
        self._tier.gave(self, block, is_wanted=self._is_wanted)
        if self._is_wanted:
            self._num_arrived += 1
            self._load.came_from(self._tier, block)
        return self._is_wanted

    def ended(self) -> None:
        """The tier gives no more."""
        if not self._has_ended:
            self._has_ended = True
            self._tier.ended(self)
            self._load.has_run(self._tier, self._num_arrived, is_wanted=self._is_wanted)


def _before_any_has(tiers: Sequence[Tier], hashes: Sequence[bytes]) -> Sequence[bytes]:
    """The first of these blocks, and those behind it up to one that any of `tiers` has."""
    for place in range(1, len(hashes)) if tiers else ():
        if any(tier.lookup(hashes[place : place + 1]) for tier in tiers):
            return hashes[:place]
    return hashes
