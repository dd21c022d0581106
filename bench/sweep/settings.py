"""Settings of `baton bench sweep` that a load itself does not have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from bench.arguments import require_at_least
from bench.sweep.search import Search
from bench.targets.settings import TargetSettings, check_targets, parse_rates
from program.settings import setting
from wire.errors import InvalidSetting

_GROUP = "sweep options"


@dataclass(frozen=True, slots=True)
class SweepSettings(TargetSettings):
    """What is searched, and how finely."""

    min_prompts: int = setting(50, "requests of each load at least", group="target and load options")
    attainment: float = setting(0.9, "share of requests that have to meet --goodput", group=_GROUP)
    start_rate: float = setting(1.0, "requests per second to begin with; down to a 16th of it is tried", group=_GROUP)
    precision: float = setting(0.1, "stop when a rate that failed is nearer than this share", group=_GROUP)
    rates: tuple[str, ...] = setting((), "measure these rates instead of searching", group=_GROUP, metavar="RATE")
    repeat: int = setting(1, "runs of each point; the middle one counts", group=_GROUP)
    warmup_runs: int = setting(1, "loads before the first point of a target, which are not counted", group=_GROUP)


def search_of(settings: SweepSettings) -> Search:
    """What is searched for. Raises `InvalidSetting`."""
    rates = parse_rates(settings.rates) if settings.rates else ()
    return Search(settings.attainment, settings.start_rate, settings.precision, rates)


def check(settings: SweepSettings, goals: Mapping[str, float]) -> None:
    """Raise `InvalidSetting` for what cannot be used. `goals` are those of `--goodput`."""
    check_targets(settings, search_of(settings).rates)
    if not goals:
        raise InvalidSetting("--goodput is needed: what a good request is, like ttft:500 tpot:50")
    if not 0 < settings.attainment <= 1:
        raise InvalidSetting(f"--attainment {settings.attainment} is not above 0 and at most 1")
    if not 0.01 <= settings.precision <= 1:
        raise InvalidSetting(f"--precision {settings.precision} is not from 0.01 to 1")
    if not 0 < settings.start_rate < math.inf:
        raise InvalidSetting(f"--start-rate {settings.start_rate} is not above 0")
    require_at_least(settings, repeat=1, warmup_runs=0)
