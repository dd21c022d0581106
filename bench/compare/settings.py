"""Settings of `baton bench compare` that a load itself does not have."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bench.targets.load import num_prompts_for, parse_rates
from program.settings import setting
from wire.errors import InvalidSetting

ALL, LAST, NONE = "all", "last", "none"
_GROUP = "comparison options"


@dataclass(frozen=True, slots=True)
class CompareSettings:
    """What is compared, and how often."""

    target: tuple[str, ...] = setting(
        (),
        "what to measure: NAME=URL, NAME='baton serve ...', or NAME='COMMAND @ URL'; the others are held against the"
        " first",
        group=_GROUP,
        metavar="TARGET",
    )
    rates: tuple[str, ...] = setting(
        (), "requests per second, one load for each; none: as the trace says", group=_GROUP, metavar="RATE"
    )
    rounds: int = setting(3, "how often every target is measured at every rate", group=_GROUP)
    warmup_rounds: int = setting(1, "rounds before, which are not counted", group=_GROUP)
    duration_s: float = setting(60.0, "seconds of each load", group=_GROUP)
    min_prompts: int = setting(20, "requests of each load at least", group=_GROUP)
    num_prompts: int = setting(0, "requests of each load; 0: what --duration-s holds", group=_GROUP)
    pause: tuple[str, ...] | None = setting(
        None,
        "targets to halt while others are measured; none: every one that is started here and is no Baton",
        group=_GROUP,
        metavar="NAME",
    )
    one_at_a_time: bool = setting(False, "start and end a target in each round, to save memory", group=_GROUP)
    control: bool = setting(True, "measure the first target twice a round: what differs then is noise", group=_GROUP)
    start_timeout_s: float = setting(900.0, "seconds until a target that is started must answer", group=_GROUP)
    detail: str = setting(LAST, "rounds to keep every request of", choices=(ALL, LAST, NONE), group=_GROUP)
    json: str = setting("", "file for the result, written after every load", group=_GROUP, metavar="FILE")
    resume: bool = setting(True, "go on with --json when it is there; --no-resume begins anew", group=_GROUP)


def rates_of(settings: CompareSettings) -> tuple[float, ...]:
    """Rates in requests/s, infinite where the trace decides. Raises `InvalidSetting`."""
    return parse_rates(settings.rates) if settings.rates else (math.inf,)


def check(settings: CompareSettings) -> None:
    """Raise `InvalidSetting` for what cannot be used."""
    if not settings.target:
        raise InvalidSetting("--target is needed, once for each thing to measure")
    for flag, value, lowest in (
        ("--rounds", settings.rounds, 1),
        ("--warmup-rounds", settings.warmup_rounds, 0),
        ("--min-prompts", settings.min_prompts, 1),
        ("--num-prompts", settings.num_prompts, 0),
    ):
        if value < lowest:
            raise InvalidSetting(f"{flag} {value} is not at least {lowest}")
    for flag, seconds in (("--duration-s", settings.duration_s), ("--start-timeout-s", settings.start_timeout_s)):
        if not seconds > 0:
            raise InvalidSetting(f"{flag} {seconds} is not above 0")
    for rate in rates_of(settings):
        num_prompts_for(rate, settings.duration_s, settings.min_prompts, settings.num_prompts)
