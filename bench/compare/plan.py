"""Which load comes when: pure, from settings to a list of steps.

Invariants: every target gets the same prompts and arrivals in a round, and no prompt comes twice on one target (but for
a trace, whose prompts are its own), so no cache of an earlier round helps. Who begins changes from round to round.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from bench.targets.session import SESSION_STEP

_ROUND_STEP = 1000
_CONTROL_STEP = 500
_START_STEP = 250


@dataclass(frozen=True, slots=True)
class Step:
    """One load. `round` counts from 1; 0 is a warm-up, whose result nobody keeps.

    `is_control`: the first target again. `group`: steps of one group are measured in one go or not at all.
    """

    round: int
    rate: float
    target: str
    is_control: bool
    seed: int
    group: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """What is to be done: `targets` by name, reference first; `session` counts interruptions."""

    targets: tuple[str, ...]
    rates: tuple[float, ...]
    rounds: int
    warmup_rounds: int
    has_control: bool
    is_one_at_a_time: bool
    seed: int
    session: int = 0


def steps_of(schedule: Schedule, done: Collection[int] = ()) -> tuple[Step, ...]:
    """All steps but those of the groups in `done`; () when nothing is left to measure."""
    left = tuple(step for step in _counted(schedule) if step.group not in done)
    if not left:
        return ()
    if schedule.is_one_at_a_time:
        return tuple(_with_starts(schedule, left))
    return (*_warm_ups(schedule), *left)


def groups_of(schedule: Schedule) -> dict[int, set[tuple[int, float, str, bool]]]:
    """By group, what has to be measured for it to be done: round, rate, target, whether it is the control."""
    found: dict[int, set[tuple[int, float, str, bool]]] = {}
    for step in _counted(schedule):
        found.setdefault(step.group, set()).add((step.round, step.rate, step.target, step.is_control))
    return found


def _counted(schedule: Schedule) -> Iterator[Step]:
    num_rates = len(schedule.rates)
    for number in range(1, schedule.rounds + 1):
        if schedule.is_one_at_a_time:  # a start costs more than a load: all rates of a target in one go
            for target, is_control in _order(schedule, number):
                for place, rate in enumerate(schedule.rates):
                    yield _step(schedule, number, place, rate, target, is_control, number)
            continue
        for place, rate in enumerate(schedule.rates):
            for target, is_control in _order(schedule, number + place):
                yield _step(schedule, number, place, rate, target, is_control, number * num_rates + place)


def _step(schedule: Schedule, number: int, place: int, rate: float, target: str, is_control: bool, group: int) -> Step:
    # the control must not find the prompts of the reference in its cache
    seed = _seed(schedule, number, place) + _CONTROL_STEP * is_control
    return Step(number, rate, target, is_control, seed, group)


def _warm_ups(schedule: Schedule) -> Iterator[Step]:
    for number in range(schedule.warmup_rounds):
        for place, rate in enumerate(schedule.rates):
            seed = _seed(schedule, schedule.rounds + 1 + number, place)
            for target in schedule.targets:
                yield Step(0, rate, target, False, seed, 0)


def _with_starts(schedule: Schedule, left: Sequence[Step]) -> Iterator[Step]:
    """A target that was just started is cold: warm-ups come before its first load."""
    previous = ""
    for step in left:
        if step.target != previous:
            for number in range(schedule.warmup_rounds):
                yield Step(0, step.rate, step.target, False, step.seed + _START_STEP + number, 0)
        previous = step.target
        yield step


def _order(schedule: Schedule, turn: int) -> list[tuple[str, bool]]:
    """Who is measured after whom: one place further each turn."""
    everybody = [(name, False) for name in schedule.targets]
    if schedule.has_control:
        everybody.append((schedule.targets[0], True))
    first = turn % len(everybody)
    return everybody[first:] + everybody[:first]


def _seed(schedule: Schedule, number: int, place: int) -> int:
    return schedule.seed + SESSION_STEP * schedule.session + _ROUND_STEP * number + place
