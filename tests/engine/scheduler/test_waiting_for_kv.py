"""Requests that wait for KV of a store: they hold nobody up, lose nothing, and have the tokens that computing gives."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, cast

import pytest

from baton.engine.cache.store import LATENCY_S, REST_S
from baton.engine.scheduler.request import Request
from baton.engine.scheduler.step import Step
from baton.wire.sampling import DecodingParams
from baton.wire.step_cost import StepCost
from baton.wire.tiers import TierTokens
from tests.engine.scheduler.proposers import Guessing
from tests.engine.scheduler.simulation import Device, Name, Simulation, continuation
from tests.engine.scheduler.stores import ChanceStore, Clock, TestStore, offload_of
from tests.engine.scheduler.test_asynchronous import Run, random_traffic
from tests.engine.scheduler.test_drafts import following
from tests.request_keys import key_of

PARAMS = DecodingParams(max_tokens=3, ignore_eos=True)
PROMPT = list(range(1, 18))
"""Four blocks of four tokens, and one token more."""
A_SECOND_FOR_A_TOKEN = StepCost(0.0, 1.0, 0.0, 0.0, 0.0)


class Rig:
    """A pool of 8 blocks over a store that waits to be told."""

    def __init__(self, store: TestStore | None = None, cost: StepCost | None = None, **options: Any) -> None:
        self.store, self.clock = store or TestStore(), Clock()
        device = Device(4)
        self.offload = offload_of(self.store, device, self.clock, cost)
        self.simulation = Simulation(8, device=device, offload=self.offload, **options)

    def serve(self, name: Name, prompt: Iterable[int], params: DecodingParams = PARAMS) -> None:
        """A request, to its end."""
        self.simulation.add(name, list(prompt), params)
        while self.simulation.core.has_work:
            self.simulation.step()
            self.store.finish()

    def displace(self, name: Name = "other", params: DecodingParams = PARAMS) -> None:
        """Have the pool forget everything."""
        self.serve(name, range(100, 130), params)

    def returned(self, name: Name = "again") -> None:
        """`PROMPT` once more, after the pool has forgotten it; it waits for KV then."""
        self.serve("first", PROMPT)
        self.displace()
        self.simulation.add(name, PROMPT, PARAMS)
        assert self.simulation.step() == Step(())

    def expect(self, name: Name, prompt: Iterable[int] = PROMPT) -> None:
        assert self.simulation.outputs[name] == continuation(list(prompt), PARAMS, 32)[0]


def test_what_the_pool_has_evicted_comes_back_from_the_store() -> None:
    rig = Rig()
    rig.returned()
    (order,) = rig.store.orders
    assert len(order.hashes) == 4
    num_computed = rig.simulation.device.num_computed_tokens
    rig.store.finish()
    rig.simulation.run()
    rig.expect("again")
    assert rig.simulation.cached["again"] == 16
    assert rig.simulation.device.num_computed_tokens - num_computed == 1 + 2
    assert rig.offload.counters.num_loaded_tokens == 16
    assert rig.simulation.tiers == {"first": (), "other": (), "again": (TierTokens("test", 16),)}


def test_what_came_of_a_load_counts_for_its_tier_and_what_the_pool_had_does_not() -> None:
    rig = Rig()
    rig.serve("first", PROMPT)
    rig.serve("other", range(100, 117))  # takes the last block of `PROMPT` alone
    rig.simulation.add("again", PROMPT, PARAMS)
    assert rig.simulation.step() == Step(())
    rig.store.finish()
    rig.simulation.run()
    (tier,) = rig.simulation.tiers["again"]
    assert (tier.num_tokens, rig.simulation.cached["again"]) == (4, 16)


def test_what_was_loaded_is_found_by_others_in_the_pool() -> None:
    rig = Rig()
    rig.returned()
    rig.store.finish()
    rig.simulation.run()
    rig.simulation.add("third", PROMPT, PARAMS)
    rig.simulation.run()
    assert not rig.store.orders
    assert rig.simulation.cached["third"] == 16


def test_a_request_that_waits_for_kv_holds_its_blocks_and_nobody_up() -> None:
    rig = Rig()
    rig.returned()
    core = rig.simulation.core
    assert (core.has_work, core.awaits_readiness, core.status().num_waiting) == (True, True, 1)
    assert core.status().num_held_blocks == 5
    rig.simulation.add("short", [7] * 5, PARAMS)
    while "short" not in rig.simulation.finished:
        step = rig.simulation.step()
        assert [rig.simulation.name(share) for share in step.requests] == ["short"]
    rig.expect("short", [7] * 5)
    rig.store.finish()
    assert rig.simulation.step().num_tokens == 1
    assert not core.awaits_readiness


def test_of_a_load_that_ends_early_the_first_blocks_are_used_and_the_rest_is_computed() -> None:
    rig = Rig(cost=A_SECOND_FOR_A_TOKEN)
    rig.returned()
    (order,) = rig.store.orders
    rig.store.give(order, 2)
    rig.store.end(order)
    rig.store.end(rig.store.orders[0])  # asked again, it gives nothing
    assert rig.simulation.step().requests[0].start == 8
    rig.simulation.run()
    rig.expect("again")
    assert (rig.simulation.cached["again"], rig.simulation.tiers["again"]) == (8, (TierTokens("test", 8),))
    assert rig.offload.counters.computing_s == 0.0


def test_a_gap_ends_what_is_used_of_a_load() -> None:
    rig = Rig()
    rig.returned()
    (order,) = rig.store.orders
    rig.store.give(order)
    order.num_given += 1
    rig.store.give(order, 2)
    rig.store.end(order)
    rig.store.finish()
    assert rig.simulation.step().requests[0].start == 4
    rig.simulation.run()
    rig.expect("again")


def test_a_load_that_is_late_is_not_waited_for_and_can_write_nothing_any_more() -> None:
    rig = Rig()
    rig.returned()
    (order,) = rig.store.orders
    assert rig.store.give(order)
    rig.clock.now_s += LATENCY_S + 1
    assert rig.simulation.step().requests[0].start == 4
    assert not rig.store.give(order)
    rig.simulation.run()
    rig.expect("again")
    assert rig.offload.counters.num_late_loads == 1


def test_a_store_that_was_late_is_left_alone_for_a_while() -> None:
    rig = Rig()
    rig.returned()
    rig.clock.now_s += LATENCY_S + 1
    rig.simulation.run()
    rig.displace("b")
    rig.serve("c", PROMPT)
    assert rig.store.num_loads == 1
    rig.clock.now_s += REST_S
    rig.displace("d")
    rig.serve("e", PROMPT)
    assert rig.store.num_loads == 3, "for d and for e"
    rig.expect("e")


def test_a_request_waits_a_tenth_of_what_computing_takes_for_a_store_that_gives_nothing() -> None:
    rig = Rig(cost=A_SECOND_FOR_A_TOKEN)
    rig.returned()
    rig.clock.now_s += 1.5
    assert rig.simulation.step() == Step(())
    rig.clock.now_s += 0.2
    assert rig.simulation.step().requests[0].start == 0
    rig.simulation.run()
    rig.expect("again")
    assert rig.offload.counters.num_late_loads == 1


def test_what_is_computed_sooner_than_loaded_is_not_loaded() -> None:
    rig = Rig(cost=A_SECOND_FOR_A_TOKEN)
    rig.returned()
    for _ in range(2):  # not silent, but slower than computing
        rig.clock.now_s += 5.0
        rig.store.give(rig.store.orders[0])
    rig.simulation.run()
    assert rig.simulation.cached["again"] == 8
    assert rig.offload.counters.computing_s == 0.0
    rig.displace("b")
    num_refused = rig.offload.counters.num_refused_tokens
    rig.serve("computed", PROMPT)
    assert (rig.store.num_loads, rig.offload.counters.num_refused_tokens - num_refused) == (1, 16)
    assert rig.simulation.cached["computed"] == 0
    rig.expect("computed")


def test_times_of_whole_loads_are_counted_beside_what_computing_was_expected_to_take() -> None:
    rig = Rig(cost=A_SECOND_FOR_A_TOKEN)
    rig.returned()
    rig.clock.now_s += 1.0
    rig.store.finish()
    rig.simulation.run()
    counted = rig.offload.counters
    assert (counted.loading_s, counted.expected_s, counted.computing_s) == (1.0, 0.0, 16.0)


def test_a_block_with_wrong_bytes_is_computed_and_never_loaded_again() -> None:
    rig = Rig()
    rig.returned()
    (order,) = rig.store.orders
    wrong = order.hashes[1]
    rig.store.blocks[wrong].content[9] ^= 1
    assert not rig.store.give(order, 4)
    rig.store.end(order)
    assert rig.simulation.step().requests[0].start == 4
    rig.simulation.run()
    rig.expect("again")
    assert rig.store.forgotten == [wrong]
    assert rig.offload.counters.num_damaged_blocks == 1


def test_a_request_that_is_aborted_while_it_waits_gives_its_blocks_back_at_once_and_keeps_what_has_come() -> None:
    rig = Rig()
    rig.returned()
    (order,) = rig.store.orders
    rig.store.give(order, 2)
    rig.simulation.abort("again")
    rig.simulation.check_blocks()
    assert rig.simulation.pool.num_held == 0
    before = dict(rig.simulation.device.slots)
    assert not rig.store.give(order)
    assert rig.simulation.device.slots == before
    rig.simulation.add("third", PROMPT, PARAMS)
    rig.simulation.step()
    assert len(rig.store.orders[-1].hashes) == 2
    rig.store.finish()
    rig.simulation.run()
    rig.expect("third")


def test_a_request_that_waits_for_kv_is_not_preempted_for_a_newer_one() -> None:
    rig = Rig()
    rig.returned()
    rig.simulation.add("newer", range(50, 58), DecodingParams(max_tokens=9, ignore_eos=True))
    for _ in range(12):
        rig.simulation.step()
    assert rig.simulation.core.status().num_preemptions == 1
    assert rig.simulation.core.status().num_running == 0
    rig.store.finish()
    rig.simulation.run()
    rig.expect("again")
    assert rig.simulation.cached["again"] == 16
    assert len(rig.simulation.outputs["newer"]) == 9


def test_a_request_that_comes_with_its_kv_gets_the_only_row_when_a_load_before_it_is_over() -> None:
    rig = Rig(max_num_seqs=1)
    rig.returned()
    assert rig.simulation.reserve("delivered", [9] * 6)
    rig.simulation.deliver("delivered", PARAMS)
    assert rig.simulation.step() == Step(())
    rig.store.finish()
    rig.simulation.run()
    rig.expect("again")
    rig.expect("delivered", [9] * 6)


def test_a_request_that_comes_with_its_kv_and_lacks_a_block_waits_for_an_older_one_that_waits_for_kv() -> None:
    rig = Rig()
    rig.returned()
    assert rig.simulation.reserve("delivered", [9] * 12)
    rig.simulation.deliver("delivered", PARAMS)
    assert rig.simulation.step() == Step(())
    assert rig.simulation.core.status().num_preemptions == 0
    rig.store.finish()
    rig.simulation.run()
    rig.expect("again")
    rig.expect("delivered", [9] * 12)


class Uncompiled:
    """The matcher of a grammar that is not compiled yet."""

    is_ready = False


def until_its_grammar_is_there(rig: Rig, name: Name) -> Request:
    """A waiting request, as if it had a grammar: it is ready when it has no matcher any more."""
    (request,) = (each for each in rig.simulation.live() if each.key == key_of(name))
    request.matcher = cast("Any", Uncompiled())
    return request


def test_an_older_request_that_holds_blocks_and_was_not_ready_gets_the_row_of_a_load_that_is_over() -> None:
    rig = Rig(max_num_seqs=1)
    rig.serve("first", PROMPT)
    rig.displace()
    assert rig.simulation.reserve("older", [9] * 6)
    rig.simulation.deliver("older", PARAMS)
    older = until_its_grammar_is_there(rig, "older")
    rig.simulation.add("again", PROMPT, PARAMS)
    assert rig.simulation.step() == Step(())
    rig.store.finish()
    older.matcher = None
    rig.simulation.run()
    rig.expect("again")
    rig.expect("older", [9] * 6)


def test_a_request_that_waits_for_kv_is_not_behind_one_that_waits_for_its_blocks() -> None:
    rig = Rig()
    rig.serve("first", PROMPT)
    rig.displace()
    rig.simulation.add("older", [9] * 20, PARAMS)
    older = until_its_grammar_is_there(rig, "older")
    rig.simulation.add("again", PROMPT, PARAMS)
    assert rig.simulation.step() == Step(())
    rig.store.finish()
    older.matcher = None
    rig.simulation.run()
    rig.expect("again")
    assert rig.simulation.cached["again"] == 16
    rig.expect("older", [9] * 20)


def test_a_block_is_saved_when_its_new_owner_writes_and_not_before() -> None:
    rig = Rig(budget=4)
    rig.serve("first", PROMPT)
    rig.simulation.add("other", range(100, 130), PARAMS)
    saved = []
    for _ in range(8):
        rig.simulation.step()
        saved.append(rig.store.num_puts)
    assert saved == sorted(saved)
    assert all(later - earlier <= 1 for earlier, later in pairwise(saved))
    assert saved[-1] == 4


def test_what_the_next_owner_never_wrote_is_saved_by_the_one_after_it() -> None:
    rig = Rig(budget=4)
    rig.serve("first", PROMPT)
    rig.simulation.add("gone", range(100, 130), PARAMS)
    rig.simulation.abort("gone")
    assert rig.store.num_puts == 0
    rig.displace()
    assert rig.store.num_puts >= 4
    rig.serve("again", PROMPT)
    assert rig.simulation.cached["again"] == 16
    rig.expect("again")


def test_blocks_that_another_node_will_write_are_saved_when_they_are_reserved() -> None:
    rig = Rig()
    rig.serve("first", PROMPT)
    assert rig.simulation.reserve("delivered", list(range(100, 130)))
    assert rig.store.num_puts == 4
    rig.simulation.deliver("delivered", PARAMS)
    rig.simulation.run()
    rig.serve("again", PROMPT)
    rig.expect("again")
    assert rig.simulation.cached["again"] == 16


def test_of_blocks_that_another_node_will_write_only_so_many_are_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.engine.cache.tiered_pool.MOST_AT_ONCE_BYTES", 3 * 32)
    rig = Rig()
    rig.serve("first", PROMPT)
    assert rig.simulation.reserve("delivered", list(range(100, 130)))
    assert (rig.store.num_puts, rig.offload.counters.num_dropped_blocks) == (3, 1)
    assert not rig.offload.has_unsaved
    rig.simulation.deliver("delivered", PARAMS)
    rig.simulation.run()
    rig.serve("again", PROMPT)
    rig.expect("again")


@pytest.mark.parametrize("call", ["lookup", "put", "load"])
def test_a_store_that_is_gone_costs_no_request_anything(call: str) -> None:
    rig = Rig()
    rig.serve("first", PROMPT)
    if call == "put":
        rig.store.fails = frozenset({call})
    rig.displace()
    rig.store.fails = frozenset({call})
    rig.serve("again", PROMPT)
    rig.expect("again")
    assert rig.simulation.cached["again"] == 0
    assert rig.offload.num_failures == 1


def test_nothing_is_loaded_for_tokens_whose_rows_are_read() -> None:
    rig = Rig()
    rig.serve("first", PROMPT)
    rig.displace()
    rig.serve("again", PROMPT[:16])
    rig.expect("again", PROMPT[:16])
    assert rig.simulation.cached["again"] == 12


def test_at_the_end_no_load_writes_any_more() -> None:
    rig = Rig()
    rig.returned()
    rig.simulation.core.close()
    assert rig.store.is_closed
    assert not rig.store.give(rig.store.orders[0])


class Storing(Simulation):
    """A simulation over a store that acts by chance, while time passes."""

    store: ChanceStore
    clock: Clock

    def step(self) -> Step:
        self.store.turn()
        self.clock.now_s += 0.002
        return super().step()


def storing(
    seed: int, fault_rate: float, *, is_asynchronous: bool, num_stages: int = 1, has_drafts: bool = False
) -> Storing:
    draw = random.Random(seed)
    block_size = draw.choice((2, 4))
    device = Device(block_size, is_asynchronous, random.Random(seed), 0.03, num_stages)
    store, clock = ChanceStore(chance=random.Random(seed), fault_rate=fault_rate), Clock()
    simulation = Storing(
        num_blocks=draw.choice((8, 12, 16)),
        block_size=block_size,
        max_num_seqs=draw.choice((1, 3, 8)),
        budget=draw.choice((1, 5, 16, 64)),
        device=device,
        offload=offload_of(store, device, clock),
        proposer=Guessing(following, 0.5, random.Random(seed)) if has_drafts else None,
    )
    simulation.store, simulation.clock = store, clock
    return simulation


@pytest.mark.parametrize("fault_rate", [0.0, 0.02])
@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_random_traffic_has_the_tokens_that_computing_gives_whatever_the_store_does(
    is_asynchronous: bool, fault_rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.engine.cache.tiers.REST_S", 0.02)
    num_given = num_loaded = 0
    for seed in range(2, 8):
        simulation = storing(seed, fault_rate, is_asynchronous=is_asynchronous, has_drafts=seed % 4 == 3)
        run = Run(simulation)
        found = run.serve(random_traffic(random.Random(seed), simulation.limits.max_request_tokens))
        assert found == run.expected
        offload = simulation.core.offload
        assert offload is not None
        assert offload.num_loads == 0
        num_given += simulation.store.num_given
        num_loaded += offload.counters.num_loaded_tokens
        faults = offload.num_failures + offload.counters.num_damaged_blocks + offload.counters.num_late_loads
        assert bool(faults) == bool(fault_rate)
    assert num_given > 50
    assert num_loaded > 100
