"""Which blocks a host tier should keep: the prompt tokens that pool and tier spare, by policy, on a recorded trace.

    python -m tests.engine.cache.policies ../shared/traces/mooncake_conversation_2000.jsonl
    python -m tests.engine.cache.policies FILE --scans      # behind each prompt one that nobody asks for again

A line of the trace has `input_length` and `hash_ids`, an id for each block of 512 tokens; dividing all lengths changes
no share. Requests come one after another. The pool is Baton's own, of a tenth of the different blocks of the trace;
what it evicts is offered to the tier. `Baton` is the host tier itself, with blocks of one byte.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from bisect import bisect_right
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from pathlib import Path
from typing import NamedTuple

import numpy as np

from baton.engine.cache.block_pool import BlockPool
from baton.engine.cache.host_tier import HostTier
from baton.engine.cache.store import StoredBlock

BLOCK_TOKENS = 512
POOL_SHARE = 0.1
TIER_SHARES = (0.1, 0.25, 0.5)
NEVER = sys.maxsize


class Ask(NamedTuple):
    """A prompt: the hashes of its full blocks; `num_reusable` of them can be reused."""

    hashes: list[bytes]
    num_reusable: int
    num_tokens: int


class Tier:
    """Keeps at most `capacity` hashes. This one keeps none. `uses`: when each will be asked for, for who may know."""

    def __init__(self, capacity: int, uses: dict[bytes, list[int]]) -> None:
        self.capacity = capacity
        self.kept: OrderedDict[bytes, int] = OrderedDict()
        self.uses = uses
        self.now = 0

    def lookup(self, hashes: Sequence[bytes]) -> int:
        """How many it has, from the first one on."""
        count = next((place for place, each in enumerate(hashes) if each not in self.kept), len(hashes))
        self.asked(hashes, count)
        return count

    def asked(self, hashes: Sequence[bytes], count: int) -> None:
        """The first `count` of these are used."""

    def evicted(self, block_hash: bytes, place: int) -> None:
        """The pool drops a block, which was at that place of its prompt."""


class Lru(Tier):
    """The one that was not used for longest gives way."""

    def asked(self, hashes: Sequence[bytes], count: int) -> None:
        for each in reversed(hashes[:count]):
            self.kept.move_to_end(each)

    def evicted(self, block_hash: bytes, place: int) -> None:
        if block_hash in self.kept:
            self.kept.move_to_end(block_hash)
        elif self.admits(block_hash):
            if len(self.kept) >= self.capacity:
                self.kept.popitem(last=False)
            self.kept[block_hash] = 0

    def admits(self, block_hash: bytes) -> bool:
        """Whether it may come in, in place of the first one."""
        return True


class CountedLru(Lru):
    """Who comes has to have been asked for at least as often as who goes, of late (TinyLFU)."""

    def __init__(self, capacity: int, uses: dict[bytes, list[int]]) -> None:
        super().__init__(capacity, uses)
        self._counts: Counter[bytes] = Counter()
        self._num_asked = 0

    def asked(self, hashes: Sequence[bytes], count: int) -> None:
        super().asked(hashes, count)
        self._counts.update(hashes)
        self._num_asked += len(hashes)
        if self._num_asked > 2 * self.capacity:
            self._counts = Counter({each: many // 2 for each, many in self._counts.items() if many > 1})
            self._num_asked = 0

    def admits(self, block_hash: bytes) -> bool:
        return len(self.kept) < self.capacity or self._counts[block_hash] >= self._counts[next(iter(self.kept))]


class Sieve(Tier):
    """A hand goes from old to new, clears marks of use, and takes the first one without."""

    def __init__(self, capacity: int, uses: dict[bytes, list[int]]) -> None:
        super().__init__(capacity, uses)
        self._order: list[bytes] = []
        self._hand = 0

    def asked(self, hashes: Sequence[bytes], count: int) -> None:
        for each in hashes[:count]:
            self.kept[each] = 1

    def evicted(self, block_hash: bytes, place: int) -> None:
        if block_hash in self.kept:
            self.kept[block_hash] = 1
            return
        while len(self.kept) >= self.capacity:
            self._hand %= len(self._order)
            if self.kept[self._order[self._hand]]:
                self.kept[self._order[self._hand]] = 0
                self._hand += 1
            else:
                del self.kept[self._order.pop(self._hand)]
        self.kept[block_hash] = 0
        self._order.append(block_hash)


class S3Fifo(Tier):
    """Two queues: new ones have a tenth, and go on to the other when they were used; who left the first one too soon
    comes into the second when it comes back. `kept`: how often each was used."""

    def __init__(self, capacity: int, uses: dict[bytes, list[int]]) -> None:
        super().__init__(capacity, uses)
        self._new, self._main, self._gone = (OrderedDict[bytes, None]() for _ in range(3))

    def asked(self, hashes: Sequence[bytes], count: int) -> None:
        for each in hashes[:count]:
            self.kept[each] = min(3, self.kept[each] + 1)

    def evicted(self, block_hash: bytes, place: int) -> None:
        if block_hash in self.kept:
            self.asked([block_hash], 1)
            return
        while len(self.kept) >= self.capacity:
            self._make_room()
        (self._main if block_hash in self._gone else self._new)[block_hash] = None
        self._gone.pop(block_hash, None)
        self.kept[block_hash] = 0

    def _make_room(self) -> None:
        is_new = len(self._new) >= self.capacity // 10 or not self._main
        oldest, _ = (self._new if is_new else self._main).popitem(last=False)
        if self.kept[oldest]:
            self.kept[oldest] = 0 if is_new else self.kept[oldest] - 1
            self._main[oldest] = None
            return
        del self.kept[oldest]
        if is_new:
            self._gone[oldest] = None
            if len(self._gone) > self.capacity:
                self._gone.popitem(last=False)


class Arc(Tier):
    """Two LRU lists, of what was used once and more often; what left either of them too soon moves the border."""

    def __init__(self, capacity: int, uses: dict[bytes, list[int]]) -> None:
        super().__init__(capacity, uses)
        self._target = 0
        self._once, self._often, self._gone_once, self._gone_often = (OrderedDict[bytes, None]() for _ in range(4))

    def asked(self, hashes: Sequence[bytes], count: int) -> None:
        for each in reversed(hashes[:count]):
            self._once.pop(each, None)
            self._often.pop(each, None)
            self._often[each] = None

    def evicted(self, block_hash: bytes, place: int) -> None:
        if block_hash in self.kept:
            self.asked([block_hash], 1)
            return
        came_back = block_hash in self._gone_once or block_hash in self._gone_often
        if block_hash in self._gone_once:
            self._target += max(1, len(self._gone_often) // len(self._gone_once))
        elif block_hash in self._gone_often:
            self._target -= max(1, len(self._gone_once) // len(self._gone_often))
        self._target = min(self.capacity, max(0, self._target))
        if len(self.kept) >= self.capacity:
            self._make_room()
        for gone in (self._gone_once, self._gone_often):
            gone.pop(block_hash, None)
            if len(gone) > self.capacity:
                gone.popitem(last=False)
        (self._often if came_back else self._once)[block_hash] = None
        self.kept[block_hash] = 0

    def _make_room(self) -> None:
        of_once = bool(self._once) and (len(self._once) > self._target or not self._often)
        source, gone = (self._once, self._gone_once) if of_once else (self._often, self._gone_often)
        oldest, _ = source.popitem(last=False)
        gone[oldest] = None
        del self.kept[oldest]


class Valued(Tier):
    """What it takes to compute a block again, times its uses, above what was given up last (greedy dual). `_WEIGHT`:
    what a place in the prompt adds; a block that is 100 blocks further behind takes so many times longer."""

    _WEIGHT = 1.0

    def __init__(self, capacity: int, uses: dict[bytes, list[int]]) -> None:
        super().__init__(capacity, uses)
        self._given_up = 0.0
        self._values: dict[bytes, tuple[float, int]] = {}
        self._queue: list[tuple[float, int, bytes]] = []

    def asked(self, hashes: Sequence[bytes], count: int) -> None:
        for each in hashes[:count]:
            self.kept[each] += 1
            self._value(each, self._values[each][1])

    def evicted(self, block_hash: bytes, place: int) -> None:
        while block_hash not in self.kept and len(self.kept) >= self.capacity:
            value, behind, oldest = heappop(self._queue)
            if self._values.get(oldest) == (value, -behind):
                self._given_up = value
                del self.kept[oldest], self._values[oldest]
        self.kept.setdefault(block_hash, 1)
        self._value(block_hash, place)

    def _value(self, block_hash: bytes, place: int) -> None:
        value = self._given_up + self.kept[block_hash] * (1.0 + self._WEIGHT * place / 100)
        self._values[block_hash] = value, place
        heappush(self._queue, (value, -place, block_hash))


class Optimum(Tier):
    """Who is asked for latest gives way, of one prompt the last block (Belady). What nobody will ask for stays out."""

    def __init__(self, capacity: int, uses: dict[bytes, list[int]]) -> None:
        super().__init__(capacity, uses)
        self._queue: list[tuple[int, int, bytes]] = []

    def asked(self, hashes: Sequence[bytes], count: int) -> None:
        for place, each in enumerate(hashes[:count]):
            self.evicted(each, place)

    def evicted(self, block_hash: bytes, place: int) -> None:
        self.kept.pop(block_hash, None)
        later = self.uses.get(block_hash, ())[bisect_right(self.uses.get(block_hash, ()), self.now) :]
        if not later:
            return
        self.kept[block_hash] = later[0]
        heappush(self._queue, (-later[0], -place, block_hash))
        while len(self.kept) > self.capacity:
            use, _, latest = heappop(self._queue)
            if self.kept.get(latest) == -use:
                del self.kept[latest]


class Baton(Tier):
    """The host tier."""

    def __init__(self, capacity: int, uses: dict[bytes, list[int]]) -> None:
        super().__init__(capacity, uses)
        self._tier = HostTier(np.zeros((capacity, 1), np.uint8))
        self._content = np.zeros(1, np.uint8)

    def lookup(self, hashes: Sequence[bytes]) -> int:
        return self._tier.lookup(hashes)

    def evicted(self, block_hash: bytes, place: int) -> None:
        if not self._tier.lookup((block_hash,)):
            self._tier.put(StoredBlock(block_hash, 0, self._content))


POLICIES: dict[str, Callable[[int, dict[bytes, list[int]]], Tier]] = {
    "no tier": Tier,
    "LRU": Lru,
    "LRU, admission by counts": CountedLru,
    "SIEVE": Sieve,
    "S3-FIFO": S3Fifo,
    "ARC": Arc,
    "uses and place in the prompt": Valued,
    "Baton": Baton,
    "optimum that knows the future": Optimum,
}


def read_trace(path: Path) -> list[Ask]:
    """The prompts of a trace, in order."""
    asks = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        num_tokens, hashes = row["input_length"], [int(each).to_bytes(8, "little") for each in row["hash_ids"]]
        asks.append(Ask(hashes[: num_tokens // BLOCK_TOKENS], (num_tokens - 1) // BLOCK_TOKENS, num_tokens))
    return asks


def with_scans(asks: Sequence[Ask]) -> list[Ask]:
    """Behind each prompt one more, as long as any of them, whose blocks nobody asks for again. Its tokens count not."""
    draw, mixed, number = random.Random(1), list[Ask](), 2**32
    for ask in asks:
        length = len(draw.choice(asks).hashes)
        mixed += [ask, Ask([each.to_bytes(8, "little") for each in range(number, number + length)], 0, 0)]
        number += length
    return mixed


def spared_share(asks: Sequence[Ask], num_blocks: int, open_tier: Callable[[dict[bytes, list[int]]], Tier]) -> float:
    """The share of all prompt tokens whose KV is in a pool of so many blocks, or in the tier."""
    uses, places = defaultdict[bytes, list[int]](list), dict[bytes, int]()
    for number, ask in enumerate(asks):
        places.update((each, place) for place, each in enumerate(ask.hashes))
        for each in ask.hashes[: ask.num_reusable]:
            uses[each].append(number)
    tier, num_hits = open_tier(uses), 0

    def offer(evicted: Sequence[tuple[int, bytes]]) -> None:
        for _, each in evicted:
            tier.evicted(each, places[each])

    pool = BlockPool(num_blocks, on_evicted=offer)
    for tier.now, ask in enumerate(asks):
        cached = pool.lookup(ask.hashes[: ask.num_reusable])
        pool.share(cached)
        wanted = ask.hashes[len(cached) : ask.num_reusable]
        num_hits += len(cached) + (tier.lookup(wanted) if wanted else 0)
        table = cached + pool.allocate(len(ask.hashes) - len(cached))
        for block_id, block_hash in zip(table, ask.hashes, strict=True):
            pool.publish(block_id, block_hash)
        pool.release(table)
    return num_hits * BLOCK_TOKENS / sum(ask.num_tokens for ask in asks)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--scans", action="store_true")
    arguments = parser.parse_args()
    asks = read_trace(arguments.trace)
    num_different = len({each for ask in asks for each in ask.hashes})
    asks = with_scans(asks) if arguments.scans else asks
    sizes = [int(share * num_different) for share in TIER_SHARES]
    sys.stdout.write(f"{'':32}" + "".join(f"{share:>10.0%}" for share in TIER_SHARES) + "\n")
    num_blocks = int(POOL_SHARE * num_different)
    for name, policy in POLICIES.items():
        shares = [spared_share(asks, num_blocks, partial(policy, size)) for size in sizes]
        sys.stdout.write(f"{name:32}" + "".join(f"{share:>10.1%}" for share in shares) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
