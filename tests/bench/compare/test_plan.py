from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from baton.bench.compare.command import Schedule

SCHEDULE = Schedule(
    targets=("a", "b"),
    rates=(1.0, 2.0, 4.0),
    rounds=3,
    warmup_rounds=1,
    has_control=True,
    is_one_at_a_time=False,
    seed=7,
)
ONE_AT_A_TIME = dataclasses.replace(SCHEDULE, is_one_at_a_time=True)


@pytest.mark.parametrize("schedule", [SCHEDULE, ONE_AT_A_TIME])
def test_everything_is_measured_once_a_round(schedule: Schedule) -> None:
    counted = [step for step in schedule.steps() if step.round]
    assert Counter((step.round, step.rate, step.target, step.is_control) for step in counted) == {
        (number, rate, target, again): 1
        for number in (1, 2, 3)
        for rate in (1.0, 2.0, 4.0)
        for target, again in (("a", False), ("b", False), ("a", True))
    }


@pytest.mark.parametrize("schedule", [SCHEDULE, ONE_AT_A_TIME])
def test_a_round_has_the_same_requests_for_all_and_none_comes_twice_to_one(schedule: Schedule) -> None:
    steps = schedule.steps()
    for target in ("a", "b"):
        seeds = [step.seed for step in steps if step.target == target]
        assert len(set(seeds)) == len(seeds)
    shared = {(step.round, step.rate): step.seed for step in steps if step.target == "a" and not step.is_control}
    assert all(step.seed == shared[step.round, step.rate] for step in steps if step.target == "b" and step.round)


def test_one_at_a_time_a_target_has_all_its_rates_after_one_start_and_a_warm_up() -> None:
    turns: list[list[tuple[int, float]]] = []
    previous = ""
    for step in ONE_AT_A_TIME.steps():
        if step.target != previous:
            turns.append([])
        previous = step.target
        turns[-1].append((step.round, step.rate))
    assert all(turn[0] == (0, 1.0) for turn in turns)
    assert all([rate for number, rate in turn if number][:3] == [1.0, 2.0, 4.0] for turn in turns)
