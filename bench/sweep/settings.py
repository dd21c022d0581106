"""Settings of `baton bench sweep` that a load itself does not have."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bench.sweep.search import Search
from bench.targets.load import num_prompts_for, parse_rates
from program.settings import setting
from wire.errors import InvalidSetting

_GROUP = "sweep options"


@dataclass(frozen=True, slots=True)
class SweepSettings:
    """What is searched, and how finely."""

    target: tuple[str, ...] = setting(
        (),
        "configurations to search: NAME=URL, NAME='baton serve ...', or NAME='COMMAND @ URL'",
        group=_GROUP,
        metavar="TARGET",
    )
    attainment: float = setting(0.9, "share of requests that have to meet --goodput", group=_GROUP)
    start_rate: float = setting(1.0, "requests per second to begin with; down to a 16th of it is tried", group=_GROUP)
    precision: float = setting(0.1, "stop when a rate that failed is nearer than this share", group=_GROUP)
    rates: tuple[str, ...] = setting((), "measure these rates instead of searching", group=_GROUP, metavar="RATE")
    repeat: int = setting(1, "runs of each point; the middle one counts", group=_GROUP)
    warmup_runs: int = setting(1, "loads before the first point of a target, which are not counted", group=_GROUP)
    duration_s: float = setting(60.0, "seconds of each load", group=_GROUP)
    min_prompts: int = setting(50, "requests of each load at least", group=_GROUP)
    num_prompts: int = setting(0, "requests of each load; 0: what --duration-s holds", group=_GROUP)
    pause: tuple[str, ...] | None = setting(
        None,
        "targets to halt while others are measured; none: every one that is started here and is no Baton",
        group=_GROUP,
        metavar="NAME",
    )
    one_at_a_time: bool = setting(
        False, "start a target, search, and end it before the next, instead of taking turns", group=_GROUP
    )
    start_timeout_s: float = setting(900.0, "seconds until a target that is started must answer", group=_GROUP)
    json: str = setting("", "file for the result, written after every point", group=_GROUP, metavar="FILE")
    resume: bool = setting(True, "go on with --json when it is there; --no-resume begins anew", group=_GROUP)


def search_of(settings: SweepSettings) -> Search:
    """What is searched for. Raises `InvalidSetting`."""
    rates = parse_rates(settings.rates) if settings.rates else ()
    return Search(settings.attainment, settings.start_rate, settings.precision, rates)


def check(settings: SweepSettings, goals: dict[str, float]) -> None:
    """Raise `InvalidSetting` for what cannot be used. `goals` are those of `--goodput`."""
    if not settings.target:
        raise InvalidSetting("--target is needed, once for each configuration")
    if not goals:
        raise InvalidSetting("--goodput is needed: what a good request is, like ttft:500 tpot:50")
    if not 0 < settings.attainment <= 1:
        raise InvalidSetting(f"--attainment {settings.attainment} is not above 0 and at most 1")
    if not 0.01 <= settings.precision <= 1:
        raise InvalidSetting(f"--precision {settings.precision} is not from 0.01 to 1")
    for flag, value, lowest in (
        ("--repeat", settings.repeat, 1),
        ("--warmup-runs", settings.warmup_runs, 0),
        ("--min-prompts", settings.min_prompts, 1),
        ("--num-prompts", settings.num_prompts, 0),
    ):
        if value < lowest:
            raise InvalidSetting(f"{flag} {value} is not at least {lowest}")
    for flag, number in (
        ("--start-rate", settings.start_rate),
        ("--duration-s", settings.duration_s),
        ("--start-timeout-s", settings.start_timeout_s),
    ):
        if not 0 < number < math.inf:
            raise InvalidSetting(f"{flag} {number} is not above 0")
    for rate in search_of(settings).rates:
        num_prompts_for(rate, settings.duration_s, settings.min_prompts, settings.num_prompts)
