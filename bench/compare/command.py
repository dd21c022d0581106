"""`baton bench compare`: the same workload on several targets in turns, and what may be concluded from it.

Targets are measured one after the other in each round, each with the same requests; what else uses the machine meets
all of them. The file of the result is whole after each step. See `baton.bench.compare.verdict` for the rule by which a
difference is called one.

Invariants: every target gets the same prompts and arrivals in a round, and no prompt comes twice on one target (but for
a trace, whose prompts are its own), so no cache of an earlier round helps. Who begins changes from round to round.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from baton.bench.compare.verdict import RULE, ratios_of
from baton.bench.documents import CompareDocument, ResultFile
from baton.bench.report.document import as_text
from baton.bench.report.sections import section_of
from baton.bench.runs import Run, points_of
from baton.bench.targets.line_up import (
    SESSION_STEP,
    LineUp,
    Load,
    Measure,
    Session,
    TargetSettings,
    check_targets,
    parse_rates,
    read_session,
)
from baton.runtime.ranges import COUNT, COUNT_OR_NONE
from baton.runtime.settings import setting

_ROUND_STEP = 1000
_CONTROL_STEP = 500
ALL, LAST, NONE = "all", "last", "none"
_GROUP = "comparison"


Group: TypeAlias = tuple[int, float]
"""A round and a rate: what is measured in one go or not at all, as the halves of a pair have to come soon after each
other."""


@dataclass(frozen=True, slots=True)
class Step:
    """One load. `round` counts from 1; 0 is a warm-up, whose result nobody keeps.

    `is_control`: the first target again.
    """

    round: int
    rate: float
    target: str
    is_control: bool
    seed: int


@dataclass(frozen=True, slots=True)
class CompareSettings(TargetSettings):
    rates: tuple[str, ...] = setting(
        (), "requests per second, one load for each; none: as the trace says", metavar="RATE"
    )
    rounds: int = setting(3, "how often every target is measured at every rate", allowed=COUNT)
    warmup_rounds: int = setting(1, "rounds before, which are not counted", group=_GROUP, allowed=COUNT_OR_NONE)
    control: bool = setting(True, "measure the first target twice a round: what differs then is noise", group=_GROUP)
    detail: str = setting(LAST, "rounds to keep every request of", choices=(ALL, LAST, NONE), group=_GROUP)


def rates_of(settings: CompareSettings) -> tuple[float, ...]:
    """Rates in requests/s, infinite where the trace decides. Raises `InvalidSetting`."""
    return parse_rates(settings.rates) if settings.rates else (math.inf,)


@dataclass(frozen=True, slots=True)
class Schedule:
    """What is to be done: `targets` by name, reference first; `session` counts interruptions."""

    targets: tuple[str, ...]
    settings: CompareSettings
    seed: int
    session: int = 0

    def steps(self, done: Collection[Group] = ()) -> tuple[Step, ...]:
        """All steps but those of the groups in `done`; () when nothing is left to measure."""
        left = [step for step in self.counted() if (step.round, step.rate) not in done]
        return (*self._warm_ups(), *left) if left else ()

    def counted(self) -> Iterator[Step]:
        """The steps that are no warm-ups, of all groups. Who is measured first: one place further each turn."""
        everybody = [*((name, False) for name in self.targets), *[(self.targets[0], True)] * self.settings.control]
        for number in range(1, self.settings.rounds + 1):
            for place, rate in enumerate(rates_of(self.settings)):
                first = (number + place) % len(everybody)
                for target, is_control in everybody[first:] + everybody[:first]:
                    # the control must not find the prompts of the reference in its cache
                    seed = self._seed(number, place) + _CONTROL_STEP * is_control
                    yield Step(number, rate, target, is_control, seed)

    def _warm_ups(self) -> Iterator[Step]:
        for number in range(self.settings.warmup_rounds):
            for place, rate in enumerate(rates_of(self.settings)):
                for target in self.targets:
                    yield Step(0, rate, target, False, self._seed(self.settings.rounds + 1 + number, place))

    def _seed(self, number: int, place: int) -> int:
        return self.seed + SESSION_STEP * self.session + _ROUND_STEP * number + place


def check(settings: CompareSettings) -> None:
    """Raise `InvalidSetting` for what cannot be used."""
    check_targets(settings, rates_of(settings))


def keep_whole_groups(document: CompareDocument, schedule: Schedule) -> set[Group]:
    """Drop the runs of groups that an interruption tore apart from `document`; the groups that are complete."""
    wanted = Counter((step.round, step.rate) for step in schedule.counted())
    found = Counter((run.round, run.rate) for run in (*document.runs, *document.control_runs))
    whole = {group for group, num in wanted.items() if found[group] == num}
    document.runs = [run for run in document.runs if (run.round, run.rate) in whole]
    document.control_runs = [run for run in document.control_runs if (run.round, run.rate) in whole]
    return whole


def carry_out(
    document: CompareDocument,
    steps: Sequence[Step],
    session: Session[CompareSettings],
    line_up: LineUp,
    measure: Measure,
) -> None:
    """Measure `steps` and put their results into `document`, which is saved after each."""
    settings = session.settings
    for number, step in enumerate(steps, 1):
        at = f"{step.rate:g} requests/s" if math.isfinite(step.rate) else "all at once or as the trace says"
        which = f"round {step.round} of {settings.rounds}" if step.round else "warm-up"
        session.say(f"{number} of {len(steps)}: {which}, {step.target}{' again' if step.is_control else ''}, {at}")
        is_detailed = settings.detail == ALL or (settings.detail == LAST and step.round == settings.rounds)
        running = line_up.take_turn(step.target)
        num_prompts = settings.num_prompts_at(step.rate)
        result = measure(Load(running.url, step.rate, num_prompts, step.seed, is_detailed and not step.is_control))
        if step.round:
            runs = document.control_runs if step.is_control else document.runs
            runs.append(Run(step.target, step.round, step.rate, result))
            conclude(document)
            session.save(document)


def conclude(document: CompareDocument) -> None:
    """Make `ratios` of its runs."""
    names = [target.name for target in document.targets]
    document.ratios = ratios_of(names, document.runs, document.control_runs)


def report(document: CompareDocument) -> str:
    """The figures of every target, what may be concluded, and the rule, for a terminal."""
    return f"{as_text(section_of(ResultFile('compare', document)), 'figures')}\n\n{RULE}"


def main(arguments: Sequence[str]) -> int:
    """Measure, save and print; 1 when a target answered nothing at some rate. Raises `BatonError`."""
    session = read_session(
        "compare",
        "--target NAME=... --target NAME=...",
        "Measure several servers in turns with the same requests, and say what differs beyond noise.",
        arguments,
        CompareSettings,
    )
    check(session.settings)
    document = session.begun(
        CompareDocument(
            facts=session.facts, targets=session.measured, rounds=session.settings.rounds, runs=[], ratios=[]
        )
    )
    schedule = schedule_of(session, len(document.sessions) - 1)
    if steps := schedule.steps(keep_whole_groups(document, schedule)):
        with LineUp(session.targets, session.settings, session.say) as line_up:
            carry_out(document, steps, session, line_up, session.measure)
    else:
        session.say(f"everything is in {session.path} already: --no-resume measures again")
    conclude(document)
    print(report(document))
    return 0 if all(point.num_failed < point.num_requests for point in points_of(document.runs)) else 1


def schedule_of(session: Session[CompareSettings], num_before: int) -> Schedule:
    """What is to be done after `num_before` interruptions."""
    names = tuple(target.name for target in session.targets)
    return Schedule(names, session.settings, session.dataset.seed, num_before)
