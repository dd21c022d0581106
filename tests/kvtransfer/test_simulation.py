"""Both sides on a simulated network and clock, thousands of steps under a seed; `BATON_SCHEDULES` seeds, 1 unless told.

Control messages are lost, doubled, delayed and reordered; KV is lost, cut, flipped, doubled and late; connections
break; nodes cancel, freeze and die. What is checked, and when, is said in `world`.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

import pytest

from baton.engine.cache.block_pool import NoFreeBlocks
from baton.kvtransfer.transports.base import Move
from baton.wire.request_key import RequestKey
from tests.kvtransfer.loopback import Fault
from tests.kvtransfer.pair import RECEIVER_EPOCH
from tests.kvtransfer.pools import BLOCK_SIZE, key_of
from tests.kvtransfer.wire import TRANSIT_S
from tests.kvtransfer.world import HANDSHAKE, Kind, World, flipped, patches

_NUM_STEPS = 2000
_NUM_SEEDS = int(os.environ.get("BATON_SCHEDULES", "1"))


class Schedule:
    """What happens in a world, chosen under a seed."""

    def __init__(self, seed: int, kind: Kind) -> None:
        self.chance = random.Random(seed)
        self.world = World(kind, fate=self._fate, plan=self._fault)
        self.num_requests = 0

    def _fate(self, message: object) -> Sequence[float]:
        # a handshake is only lost with its connection: with most of them gone there would be nothing to see
        if isinstance(message, HANDSHAKE):
            return (TRANSIT_S,)
        roll = self.chance.random()
        num_copies = 0 if roll < 0.04 else 2 if roll < 0.08 else 1
        return [self.chance.choice((TRANSIT_S, TRANSIT_S, TRANSIT_S, 0.5, 4.0)) for _ in range(num_copies)]

    def _fault(self, number: int, key: RequestKey, move: Move) -> Fault:
        roll, kind = self.chance.random(), self.world.kind
        if roll < 0.01:
            return flipped(self.chance.randrange(8))
        if roll < 0.02:
            return Fault(num_cut_bytes=self.chance.randrange(1, 100))
        if roll < 0.03:
            return Fault(num_copies=0)
        late = self.chance.choice((0, 0, 0, 1, 5)) if kind.can_be_late else 0
        return Fault(num_copies=1 + (roll < 0.05 and kind.can_double), delay=late)

    def step(self) -> None:
        """One thing happens; time goes on."""
        world, roll = self.world, self.chance.random()
        if roll < 0.12:
            self._arrive()
        elif roll < 0.15 and self.num_requests:
            self._cancel()
        elif roll < 0.152:
            world.restart_prefill_node()
        elif roll < 0.154:
            world.break_connections()
        elif roll < 0.155:
            world.is_prefill_frozen = True
        elif roll < 0.18:
            world.is_prefill_frozen = False
        elif roll < 0.58:
            world.push(1)
        elif roll < 0.7 and not world.is_prefill_frozen:
            self._compute()
        for key in list(world.decode_pool.running):
            if self.chance.random() < 0.1:
                world.decode_pool.retire(key)
        world.wire.now_s += self.chance.choice((0.0, 0.01, 0.05, 0.3))
        if self.chance.random() < 0.7:
            world.run_prefill_node()
        if self.chance.random() < 0.7:
            world.run_decode_node()
        world.check()

    def _arrive(self) -> None:
        """A request: its two legs may come to the nodes at different times, or one not at all."""
        self.num_requests += 1
        world, key, num_tokens = self.world, key_of(self.num_requests), self.chance.randrange(1, 24)
        num_cached = self.chance.choice((0, 0, BLOCK_SIZE, 2 * BLOCK_SIZE))
        prefill_comes, decode_comes = self.chance.random() < 0.9, self.chance.random() < 0.9
        try:
            if prefill_comes:
                decode_epoch = RECEIVER_EPOCH if self.chance.random() < 0.95 else 1
                world.begin(key, num_tokens, decode_epoch=decode_epoch)
            if decode_comes:
                world.grant(key, num_tokens, num_cached if num_cached <= num_tokens else 0)
        except NoFreeBlocks:
            if prefill_comes and decode_comes:
                world.wait_for_room(key)
                if self.chance.random() < 0.5:
                    world.cancel_decode(key)

    def _compute(self) -> None:
        """A chunk of some prompt, a layer of its last step, or its end."""
        world = self.world
        if not world.life.computing:
            return
        key = self.chance.choice(world.life.computing)
        prompt = world.life.prompts[key]
        roll = self.chance.random()
        if prompt.layers is not None:
            if roll < 0.05:
                world.fail_step(key)
            else:
                world.store_layer(key)
        elif roll < 0.4:
            world.compute(key, self.chance.randrange(prompt.num_tokens + 1))
        elif roll < 0.6:
            world.begin_last_step(key)
        elif roll < 0.65:
            world.cancel_prefill(key, "token 1 ended it", request_ended=True)
        else:
            world.finish(key)

    def _cancel(self) -> None:
        """The client is gone; either leg may hear of it first, or alone."""
        key = key_of(self.chance.randrange(max(1, self.num_requests - 8), self.num_requests + 1))
        if self.chance.random() < 0.7:
            self.world.cancel_decode(key)
        if self.chance.random() < 0.7:
            self.world.cancel_prefill(key, "cancelled")


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name.lower())
@pytest.mark.parametrize("seed", range(_NUM_SEEDS))
def test_no_schedule_delivers_wrong_kv_reuses_a_block_too_early_or_leaks(
    monkeypatch: pytest.MonkeyPatch, seed: int, kind: Kind
) -> None:
    schedule = Schedule(seed, kind)
    world = schedule.world
    for target, value in patches(world).items():
        monkeypatch.setattr(target, value)
    for _ in range(_NUM_STEPS):
        schedule.step()
    world.quiesce()
    assert len(world.decode_pool.delivered_kv) > 20
    assert len(world.decode_pool.failures) > 20
    world.check_over()
