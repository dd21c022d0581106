"""KV stores for tests of the engine's side: one that does what a test says, or what chance says, and the bytes of a
simulated device's blocks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from baton.engine.cache.offload import KvOffload
from baton.engine.cache.store import BlockBytes, Landing, StoredBlock, TierCounters
from baton.engine.cache.tiered_pool import TieredPool
from baton.engine.cache.tiers import Tier, Tiers
from baton.wire.step_cost import StepCost
from tests.engine.scheduler.simulation import Device

UNKNOWN = -1


class SlotBytes:
    """What a simulated device remembers of the slots of a block, as bytes. See `PoolBytes`."""

    def __init__(self, device: Device) -> None:
        self.block_bytes = 8 * device.block_size
        self._device = device

    def read(self, block_id: int) -> BlockBytes:
        slots = [self._device.slots.get((block_id, slot)) for slot in range(self._device.block_size)]
        return np.array([UNKNOWN if each is None else each for each in slots], dtype=np.int64).view(np.uint8)

    def write(self, block_id: int, content: BlockBytes) -> BlockBytes:
        for slot, value in enumerate(content.view(np.int64).tolist()):
            self._device.slots[block_id, slot] = value
        return self.read(block_id)


@dataclass
class Order:
    """A load that is going on; `num_given` of its blocks were given."""

    hashes: Sequence[bytes]
    landing: Landing
    num_given: int = 0


@dataclass
class TestStore:
    """See `KvStore`: a dictionary. What it was asked to load waits for `give` and `end`."""

    __test__ = False

    blocks: dict[bytes, StoredBlock] = field(default_factory=dict)
    orders: list[Order] = field(default_factory=list)
    forgotten: list[bytes] = field(default_factory=list)
    num_puts: int = 0
    num_loads: int = 0
    is_closed: bool = False
    usage: float = 0.0
    fails: frozenset[str] = frozenset()
    """Names of the calls that raise."""

    def lookup(self, hashes: Sequence[bytes]) -> int:
        self._may_fail("lookup")
        return next((place for place, each in enumerate(hashes) if each not in self.blocks), len(hashes))

    def holds(self, block_hash: bytes) -> bool:
        return self.lookup((block_hash,)) > 0

    def put(self, block: StoredBlock) -> None:
        self._may_fail("put")
        self.num_puts += 1
        self.blocks[block.block_hash] = block._replace(content=block.content.copy())

    def load(self, hashes: Sequence[bytes], landing: Landing) -> None:
        self._may_fail("load")
        self.num_loads += 1
        self.orders.append(Order(list(hashes), landing))

    def forget(self, block_hash: bytes) -> None:
        self._may_fail("forget")
        self.forgotten.append(block_hash)
        del self.blocks[block_hash]

    def close(self) -> None:
        self.is_closed = True

    def give(self, order: Order, count: int = 1) -> bool:
        """The next blocks of a load; whether more are wanted."""
        for block_hash in order.hashes[order.num_given : order.num_given + count]:
            order.num_given += 1
            if not order.landing.arrived(self.blocks[block_hash]):
                return False
        return True

    def end(self, order: Order) -> None:
        self.orders.remove(order)
        order.landing.ended()

    def finish(self) -> None:
        """All loads, whole."""
        for order in list(self.orders):
            self.give(order, len(order.hashes))
            self.end(order)

    def _may_fail(self, name: str) -> None:
        if name in self.fails:
            raise ConnectionError(f"{name}: the store is gone")


@dataclass
class ChanceStore(TestStore):
    """Forgets, damages, mixes up, is late, never answers and raises, each with the chance `fault_rate`."""

    chance: random.Random = field(default_factory=lambda: random.Random(0))
    fault_rate: float = 0.0
    num_given: int = 0

    def turn(self) -> None:
        """A little of what it was asked to do."""
        for order in list(self.orders):
            if self.chance.random() < 0.5:
                continue
            if self._happens():
                self.orders.remove(order)  # and is never heard of again
            elif order.num_given == len(order.hashes) or self._happens():
                self.end(order)
            elif order.hashes[order.num_given] in self.blocks:
                self.num_given += self._give_one(order)
            else:
                self.end(order)

    def _give_one(self, order: Order) -> bool:
        block = self.blocks[order.hashes[order.num_given]]
        if self._happens():
            damaged = block.content.copy()
            damaged[self.chance.randrange(len(damaged))] ^= 1 << self.chance.randrange(8)
            block = block._replace(content=damaged)
        elif self._happens():
            block = self.chance.choice(list(self.blocks.values()))._replace(block_hash=block.block_hash)
        order.num_given += 1
        return order.landing.arrived(block)

    def lookup(self, hashes: Sequence[bytes]) -> int:
        return len(hashes) + 3 if self._happens() else super().lookup(hashes)

    def put(self, block: StoredBlock) -> None:
        if self._happens():
            self.blocks.pop(self.chance.choice([*self.blocks, block.block_hash]), None)
        super().put(block)

    def forget(self, block_hash: bytes) -> None:
        self.blocks.pop(block_hash, None)

    def _may_fail(self, name: str) -> None:
        if self._happens():
            raise ConnectionError(f"{name}: the store is gone")

    def _happens(self) -> bool:
        return self.chance.random() < self.fault_rate


@dataclass
class Clock:
    """Seconds that a test lets pass."""

    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


def offload_of(store: TestStore, device: Device, clock: Clock | None = None, cost: StepCost | None = None) -> KvOffload:
    """The engine's side of `store`, with the blocks of `device`, whose steps have this cost as far as it knows."""
    clock = clock or Clock()
    tiers = Tiers([Tier("test", store, TierCounters(), clock)])
    return KvOffload(TieredPool(tiers, SlotBytes(device)), device.block_size, 64, lambda: cost, clock)
