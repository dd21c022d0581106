"""`baton bench sweep`: the highest rate at which a configuration still serves well enough, its goodput.

The rate is doubled until it is not met, or halved until it is; then the gap between the two is cut at its geometric
middle until it is narrow enough. Configurations take turns, so that what else uses the machine meets all of them.
What is measured next follows from the document alone, so an interrupted sweep goes on when it is started again, and
loses one point at most.

Noise can make a lower rate fail and a higher one pass. The answer is always the highest rate below every failing one,
so a lucky pass above a failure never counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from baton.bench.documents import Configuration, ResultFile, SweepDocument, SweepPoint
from baton.bench.report.document import as_text
from baton.bench.report.sections import section_of
from baton.bench.serve.settings import parse_slo
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
from baton.runtime.ranges import COUNT, COUNT_OR_NONE, POSITIVE, SHARE, Range
from baton.runtime.settings import setting
from baton.wire.errors import InvalidSetting

MAX_DOUBLINGS = 12
"""How far the search goes up from the first rate."""
MAX_HALVINGS = 4
"""How far it goes down: half the rate takes twice the time, for an answer that nobody wants."""
_GROUP = "sweep"
_POINT_STEP = 1000
_WARMUP_STEP = 500_000


@dataclass(frozen=True, slots=True)
class SweepSettings(TargetSettings):
    """What is searched, and how finely."""

    min_prompts: int = setting(50, "requests of each load at least", group="targets", allowed=COUNT)
    attainment: float = setting(0.9, "share of requests that have to meet --goodput", group=_GROUP, allowed=SHARE)
    start_rate: float = setting(
        1.0, "requests per second to begin with; down to a 16th of it is tried", group=_GROUP, allowed=POSITIVE
    )
    precision: float = setting(
        0.1, "stop when a rate that failed is nearer than this share", group=_GROUP, allowed=Range(0.01, 1)
    )
    rates: tuple[str, ...] = setting((), "measure these rates instead of searching", metavar="RATE")
    warmup_runs: int = setting(
        1, "loads before the first point of a target, which are not counted", group=_GROUP, allowed=COUNT_OR_NONE
    )


def next_rate(settings: SweepSettings, points: Sequence[SweepPoint]) -> float | None:
    """The next rate to measure, None at the end."""
    tried = {point.rate for point in points}
    if settings.rates:
        return next((rate for rate in parse_rates(settings.rates) if rate not in tried), None)
    if not points:
        return settings.start_rate
    good, bad = _bounds(settings, points)
    if bad is None:
        higher = 2 * max(tried)
        return higher if higher <= settings.start_rate * 2**MAX_DOUBLINGS else None
    if good is None:
        lower = min(tried) / 2
        return lower if lower >= settings.start_rate / 2**MAX_HALVINGS else None
    middle = float(f"{math.sqrt(good * bad):.3g}")
    return middle if bad > good * (1 + settings.precision) and good < middle < bad else None


def goodput_rate(settings: SweepSettings, points: Sequence[SweepPoint]) -> float | None:
    """The highest rate that was met with none below it that was not; None for none."""
    return _bounds(settings, points)[0]


def _bounds(settings: SweepSettings, points: Sequence[SweepPoint]) -> tuple[float | None, float | None]:
    """The highest rate that was met below the lowest that failed, and that one."""
    bad = min((point.rate for point in points if point.attainment < settings.attainment), default=None)
    below = [point.rate for point in points if bad is None or point.rate < bad]
    return max(below, default=None), bad


def check(settings: SweepSettings, goals: Mapping[str, float]) -> None:
    """Raise `InvalidSetting` for what cannot be used. `goals` are those of `--goodput`."""
    check_targets(settings, parse_rates(settings.rates))
    if not goals:
        raise InvalidSetting("--goodput is needed: what a good request is, like ttft:500 tpot:50")


def carry_out(document: SweepDocument, session: Session[SweepSettings], line_up: LineUp, measure: Measure) -> None:
    """Search to the end and put every point into `document`, which is saved after each. Raises `BatonError`."""
    settings, say = session.settings, session.say
    begin = session.dataset.seed + SESSION_STEP * (len(document.sessions) - 1)
    warm: set[str] = set()

    def load(name: str, rate: float, seed: int) -> dict[str, Any]:
        return measure(Load(line_up.take_turn(name).url, rate, settings.num_prompts_at(rate), seed))

    while waiting := open_searches(document, settings):
        for found, rate in waiting:
            name = found.name
            if name not in warm:
                warm.add(name)
                for number in range(settings.warmup_runs):
                    say(f"{name}: warm-up")
                    load(name, rate, begin + _WARMUP_STEP + number)
            place = len(found.points)
            say(f"{name}: point {place + 1}, {rate:g} requests/s")
            # the same seed for every configuration, and no other point's or session's
            result = load(name, rate, begin + _POINT_STEP * place)
            point = SweepPoint(rate, result["slo_attainment"] or 0.0, result)
            say(f"{name}: {point.attainment:.1%} met the goals at {rate:g} requests/s")
            found.points.append(point)
            conclude(document, settings)
            session.save(document)


def open_searches(document: SweepDocument, settings: SweepSettings) -> list[tuple[Configuration, float]]:
    """Configurations with the rate that each wants next; who begins changes from point to point."""
    wanted = ((each, next_rate(settings, each.points)) for each in document.configurations)
    found = [(each, rate) for each, rate in wanted if rate is not None]
    first = len(found[0][0].points) % len(found) if found else 0
    return found[first:] + found[:first]


def conclude(document: SweepDocument, settings: SweepSettings) -> None:
    """Say of each configuration what its points say."""
    for each in document.configurations:
        each.goodput_rate = goodput_rate(settings, each.points)


def main(arguments: Sequence[str]) -> int:
    """Search, save and print; 1 when no rate of some configuration was good enough. Raises `BatonError`."""
    session = read_session(
        "sweep",
        "--target NAME=... --goodput METRIC:MS ...",
        "Find the highest request rate that each configuration serves within its goals.",
        arguments,
        SweepSettings,
    )
    settings, goals = session.settings, parse_slo(session.serve.goodput)
    check(settings, goals)
    configurations = [Configuration(**asdict(target), points=[]) for target in session.measured]
    document = session.begun(
        SweepDocument(facts=session.facts, slo=goals, attainment=settings.attainment, configurations=configurations)
    )
    if open_searches(document, settings):
        with LineUp(session.targets, session.settings, session.say) as line_up:
            carry_out(document, session, line_up, session.measure)
    else:
        session.say(f"everything is in {session.path} already: --no-resume measures again")
    conclude(document, settings)
    print(as_text(section_of(ResultFile("sweep", document)), "goodput", "points"))
    return 0 if all(each.goodput_rate is not None for each in document.configurations) else 1
