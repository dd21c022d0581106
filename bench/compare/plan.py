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

    @property
    def key(self) -> tuple[int, float, str, bool]:
        """What of it is in the file of the result: round, rate, target, whether it is the control."""
        return self.round, self.rate, self.target, self.is_control


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

    def steps(self, done: Collection[int] = ()) -> tuple[Step, ...]:
        """All steps but those of the groups in `done`; () when nothing is left to measure."""
        left = tuple(step for step in self.counted() if step.group not in done)
        if not left:
            return ()
        return tuple(self._with_starts(left)) if self.is_one_at_a_time else (*self._warm_ups(), *left)

    def counted(self) -> Iterator[Step]:
        """The steps that are no warm-ups, of all groups."""
        for number in range(1, self.rounds + 1):
            if self.is_one_at_a_time:  # a start costs more than a load: all rates of a target in one go
                for target, is_control in self._order(number):
                    for place in range(len(self.rates)):
                        yield self._step(number, place, target, is_control, number)
                continue
            for place in range(len(self.rates)):
                for target, is_control in self._order(number + place):
                    yield self._step(number, place, target, is_control, number * len(self.rates) + place)

    def _step(self, number: int, place: int, target: str, is_control: bool, group: int) -> Step:
        # the control must not find the prompts of the reference in its cache
        seed = self._seed(number, place) + _CONTROL_STEP * is_control
        return Step(number, self.rates[place], target, is_control, seed, group)

    def _warm_ups(self) -> Iterator[Step]:
        for number in range(self.warmup_rounds):
            for place, rate in enumerate(self.rates):
                for target in self.targets:
                    yield Step(0, rate, target, False, self._seed(self.rounds + 1 + number, place), 0)

    def _with_starts(self, left: Sequence[Step]) -> Iterator[Step]:
        """A target that was just started is cold: warm-ups come before its first load."""
        previous = ""
        for step in left:
            if step.target != previous:
                for number in range(self.warmup_rounds):
                    yield Step(0, step.rate, step.target, False, step.seed + _START_STEP + number, 0)
            previous = step.target
            yield step

    def _order(self, turn: int) -> list[tuple[str, bool]]:
        """Who is measured after whom: one place further each turn."""
        everybody = [*((name, False) for name in self.targets), *[(self.targets[0], True)] * self.has_control]
        first = turn % len(everybody)
        return everybody[first:] + everybody[:first]

    def _seed(self, number: int, place: int) -> int:
        return self.seed + SESSION_STEP * self.session + _ROUND_STEP * number + place
