"""Load or compute: what is chosen, what is learned from loads, and how long one may take."""

from __future__ import annotations

import pytest

from baton.engine.cache.load_choice import FADES_S, PATIENCE, TOLERANCE_S, LoadChoice, LoadPlan, LoadProgress
from baton.wire.step_cost import StepCost
from tests.engine.scheduler.stores import Clock

TOKEN_S = 0.01
BLOCK_SIZE = 10
COST = StepCost(0.0, TOKEN_S, 0.0, 0.0, 0.0)
"""A block takes 0.1 s to be computed, wherever it is."""
BLOCK_S = TOKEN_S * BLOCK_SIZE


class Rig:
    """A choice whose loads are told when blocks come."""

    def __init__(self, cost: StepCost | None = COST, max_chunk: int = 1000) -> None:
        self.clock = Clock()
        self.choice = LoadChoice(BLOCK_SIZE, 1000, max_chunk, lambda: cost, self.clock)

    def plan(self, *tiers: str, start: int = 0) -> LoadPlan | None:
        """For a prompt that ends a token behind these blocks."""
        return self.choice.plan(tiers, start, start + BLOCK_SIZE * len(tiers) + 1)

    def begin(self, num_blocks: int, tier: str = "host") -> LoadProgress:
        plan = self.plan(*[tier] * num_blocks)
        assert plan is not None
        return self.choice.begin(plan)

    def give(self, progress: LoadProgress, num_blocks: int, block_s: float) -> None:
        """Blocks that come one after another, each after so long."""
        for _ in range(num_blocks):
            self.clock.now_s += block_s
            progress.arrived(progress.num_blocks)

    def load(self, first_s: float, block_s: float, num_blocks: int = 11, tier: str = "host") -> None:
        """A whole load of a tier that takes so long."""
        progress = self.begin(num_blocks, tier)
        self.give(progress, 1, first_s)
        self.give(progress, num_blocks - 1, block_s)
        self.choice.end(progress, was_late=False)


def test_a_tier_that_nobody_has_asked_is_worth_a_try() -> None:
    assert Rig().plan("host", "host") == LoadPlan(("host", "host"), 0.0, 20 * TOKEN_S)
    assert Rig().plan() is None


@pytest.mark.parametrize(("block_s", "is_loaded"), [(0.9 * BLOCK_S, True), (1.1 * BLOCK_S, False)])
def test_blocks_are_loaded_only_where_that_is_sooner(block_s: float, is_loaded: bool) -> None:
    rig = Rig()
    rig.load(0.01, block_s)
    plan = rig.plan(*["host"] * 50)
    assert (plan is not None) == is_loaded
    if plan is not None:
        assert len(plan.tiers) == 50
        assert plan.load_s == pytest.approx(0.01 + 49 * block_s)


def total_s(rig: Rig, num_blocks: int, first_s: float, block_s: float) -> float:
    """Until so many blocks are there, from a tier that takes these times or computed, as it was chosen."""
    begun_s, num_missing = rig.clock.now_s, num_blocks
    if rig.plan(*["host"] * num_blocks) is not None:
        progress, due_s = rig.begin(num_blocks), begun_s + first_s
        while num_missing and not progress.is_late:
            rig.clock.now_s = min(due_s, rig.clock.now_s + TOLERANCE_S)
            if rig.clock.now_s == due_s:
                progress.arrived(progress.num_blocks)
                num_missing, due_s = num_missing - 1, due_s + block_s
        rig.choice.end(progress, was_late=num_missing > 0)
    return rig.clock.now_s - begun_s + num_missing * BLOCK_S


@pytest.mark.parametrize("first_s", [0.001, 0.01, 0.1, 1.0])
@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.8, 1.0, 1.2, 2.0, 10.0])
def test_no_prompt_takes_a_tenth_longer_than_on_the_better_side(first_s: float, share: float) -> None:
    """The first one may find out that the tier is slower than computing, and costs a tenth then. A tier whose first
    block takes longer than a tenth of computing all is not waited for, nor a last one for longer than it is worth."""
    rig = Rig()
    for place, num_blocks in enumerate((20, 1, 2, 5, 10, 50, 100, 500)):
        load_s, compute_s = first_s + (num_blocks - 1) * share * BLOCK_S, num_blocks * BLOCK_S
        longest_s = PATIENCE * compute_s + min(load_s, compute_s - BLOCK_S)
        may_load = place and first_s <= PATIENCE * compute_s and load_s <= longest_s
        better_s = min(load_s, compute_s) if may_load else compute_s
        assert total_s(rig, num_blocks, first_s, share * BLOCK_S) <= (1.0 + PATIENCE) * better_s + 3 * TOLERANCE_S


def test_a_tier_with_a_long_way_is_asked_for_what_takes_long_only() -> None:
    rig = Rig()
    rig.load(0.5, 0.001)
    assert rig.plan(*["host"] * 49) is None
    assert rig.plan(*["host"] * 51) is not None


def test_what_lies_deep_in_a_prompt_takes_longer_to_compute() -> None:
    rig = Rig(StepCost(0.0, TOKEN_S / 2, TOKEN_S / 1000, 0.0, 0.0))
    rig.load(0.001, BLOCK_S)
    assert rig.plan(*["host"] * 10) is None
    assert rig.plan(*["host"] * 10, start=1000) is not None


def test_steps_that_are_spared_count() -> None:
    spared = Rig(StepCost(1.0, TOKEN_S, 0.0, 0.0, 0.0), max_chunk=20).plan(*["host"] * 5)
    assert spared is not None
    assert spared.compute_s == pytest.approx(5 * BLOCK_S + 2 * 1.0)


def test_of_two_tiers_the_slow_one_is_left_out() -> None:
    rig = Rig()
    rig.load(0.001, 0.001, tier="host")
    rig.load(0.001, 2 * BLOCK_S, tier="disk")
    plan = rig.plan("host", "host", "disk", "disk", "disk")
    assert plan is not None
    assert plan.tiers == ("host", "host")
    assert rig.plan("disk", "disk", "disk") is None


def test_a_fast_tier_behind_a_slow_one_may_be_worth_both() -> None:
    rig = Rig()
    rig.load(0.001, 0.001, tier="host")
    rig.load(0.001, 1.5 * BLOCK_S, tier="disk")
    plan = rig.plan(*["disk"] * 3, *["host"] * 20)
    assert plan is not None
    assert len(plan.tiers) == 23


def test_loads_that_wait_already_come_first() -> None:
    rig = Rig()
    rig.load(0.001, 0.5 * BLOCK_S)
    first = rig.begin(20)
    assert rig.plan(*["host"] * 15) is None
    rig.give(first, 15, 0.5 * BLOCK_S)
    assert rig.plan(*["host"] * 15) is not None


def test_who_waits_behind_another_load_is_not_said_to_be_slow() -> None:
    rig = Rig()
    first, second = rig.begin(5), rig.begin(5)
    for progress in (first, second):
        rig.give(progress, 5, 0.02)
        rig.choice.end(progress, was_late=False)
    assert second.taken_s == pytest.approx(5 * 0.02)
    plan = rig.plan(*["host"] * 5)
    assert plan is not None
    assert plan.load_s == pytest.approx(5 * 0.02, rel=0.01)


def test_what_is_known_of_a_slow_tier_fades_and_the_next_load_tells_the_truth() -> None:
    rig = Rig()
    rig.load(0.01, 3 * BLOCK_S)
    rig.clock.now_s += FADES_S
    assert rig.plan(*["host"] * 20) is None
    rig.clock.now_s += FADES_S
    assert rig.plan(*["host"] * 20) is not None
    for _ in range(9):
        rig.clock.now_s += 3 * FADES_S
        rig.load(0.01, 0.1 * BLOCK_S)
    plan = rig.plan(*["host"] * 20)
    assert plan is not None
    assert plan.load_s < 20 * 0.2 * BLOCK_S


def lateness_of(progress: LoadProgress, clock: Clock, most_s: float) -> float:
    """After how long without a block a load is over."""
    begun_s, step_s = clock.now_s, most_s / 1000
    while not progress.is_late:
        clock.now_s += step_s
        assert clock.now_s < begun_s + most_s
    return clock.now_s - begun_s


@pytest.mark.parametrize("num_given", [0, 1, 10, 19])
def test_a_request_that_waits_in_vain_is_a_tenth_later_than_one_that_is_computed(num_given: int) -> None:
    """However fast the blocks came before nothing came any more."""
    for block_s in (0.0, 0.5 * BLOCK_S, 0.99 * BLOCK_S):
        rig = Rig()
        progress, begun_s, compute_s = rig.begin(20), rig.clock.now_s, 20 * BLOCK_S
        rig.give(progress, num_given, block_s)
        assert not progress.is_late
        lateness_of(progress, rig.clock, 10.0)
        total_s = rig.clock.now_s - begun_s + (20 - num_given) * BLOCK_S
        assert total_s == pytest.approx((1.0 + PATIENCE) * compute_s + TOLERANCE_S, abs=0.02)


def test_blocks_that_come_slower_than_they_are_computed_are_not_waited_for() -> None:
    rig = Rig()
    progress = rig.begin(20)
    while not progress.is_late:
        rig.give(progress, 1, 2 * BLOCK_S)
    assert progress.num_blocks <= 3


@pytest.mark.parametrize("share", [0.7, 0.95, 1.02, 1.14, 1.4])
@pytest.mark.parametrize("burst", [1, 8])
def test_how_fast_blocks_come_says_whether_to_wait_where_the_end_of_a_prompt_takes_longest(
    share: float, burst: int
) -> None:
    """The last token takes three times as long as the first one."""
    cost = StepCost(0.0, TOKEN_S, TOKEN_S / 500, 0.0, 0.0)
    rig, num_blocks = Rig(cost), 100
    compute_s = cost.tokens_s(num_blocks * BLOCK_SIZE, 0)
    progress, begun_s, block_s = rig.begin(num_blocks), rig.clock.now_s, share * compute_s / num_blocks
    while progress.num_blocks < num_blocks and not progress.is_late:
        if rig.clock.now_s - begun_s >= (progress.num_blocks + burst) * block_s:
            rig.give(progress, min(burst, num_blocks - progress.num_blocks), 0.0)
        rig.clock.now_s += 2 * TOLERANCE_S
    num_tokens = progress.num_blocks * BLOCK_SIZE
    total_s = rig.clock.now_s - begun_s + cost.tokens_s(num_blocks * BLOCK_SIZE - num_tokens, num_tokens)
    assert total_s <= 1.06 * min(share, 1.0) * compute_s + burst * block_s


def test_a_load_behind_another_one_has_the_time_of_both() -> None:
    rig = Rig()
    first, second = rig.begin(20), rig.begin(10)
    assert lateness_of(second, rig.clock, 10.0) == pytest.approx(0.1 * 30 * BLOCK_S, abs=0.02)
    assert first.is_late
    rig = Rig()
    first, second = rig.begin(20), rig.begin(10)
    rig.give(first, 20, 0.9 * BLOCK_S)
    assert not second.is_late


def test_a_load_without_blocks_ends_however_many_come_for_those_behind_it() -> None:
    rig = Rig()
    first, second = rig.begin(20), rig.begin(50)
    rig.give(second, 40, 0.5 * BLOCK_S)
    assert not first.is_late
    rig.give(second, 5, 0.5 * BLOCK_S)
    assert first.is_late
    assert not second.is_late


def test_a_tier_that_was_silent_is_left_alone_for_as_long_as_it_is_believed_to_be() -> None:
    rig = Rig()
    progress = rig.begin(20)
    lateness_of(progress, rig.clock, 10.0)
    rig.choice.end(progress, was_late=True)
    assert rig.plan(*["host"] * 20) is None
    assert rig.plan(*["disk"] * 20) is not None
    rig.clock.now_s += 2 * FADES_S
    assert rig.plan(*["host"] * 20) is not None


@pytest.mark.parametrize("cost", [None, StepCost(1e-3, 0.0, 0.0, 1e-3, 0.0)], ids=["nothing", "nothing of prompts"])
def test_while_nothing_is_known_of_computing_everything_is_loaded(cost: StepCost | None) -> None:
    rig = Rig(cost)
    rig.load(0.1, 5.0)
    assert rig.plan("host", "host") == LoadPlan(("host", "host"), 0.0, 0.0)
