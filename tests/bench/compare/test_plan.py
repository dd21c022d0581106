from __future__ import annotations

from collections import Counter

from baton.bench.compare.command import CompareSettings, Schedule

SCHEDULE = Schedule(("a", "b"), CompareSettings(rates=("1", "2", "4")), seed=7)


def test_everything_is_measured_once_a_round() -> None:
    counted = [step for step in SCHEDULE.steps() if step.round]
    assert Counter((step.round, step.rate, step.target, step.is_control) for step in counted) == {
        (number, rate, target, again): 1
        for number in (1, 2, 3)
        for rate in (1.0, 2.0, 4.0)
        for target, again in (("a", False), ("b", False), ("a", True))
    }


def test_a_round_has_the_same_requests_for_all_and_none_comes_twice_to_one() -> None:
    steps = SCHEDULE.steps()
    for target in ("a", "b"):
        seeds = [step.seed for step in steps if step.target == target]
        assert len(set(seeds)) == len(seeds)
    shared = {(step.round, step.rate): step.seed for step in steps if step.target == "a" and not step.is_control}
    assert all(step.seed == shared[step.round, step.rate] for step in steps if step.target == "b" and step.round)


def test_who_begins_changes_from_turn_to_turn() -> None:
    counted = [step for step in SCHEDULE.steps() if step.round]
    first_of = [(step.target, step.is_control) for step in counted[::3]]
    assert first_of[:4] == [("b", False), ("a", True), ("a", False), ("a", True)]
