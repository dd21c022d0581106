"""Settings of `baton bench compare` that a load itself does not have."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bench.arguments import require_at_least
from bench.targets.settings import TargetSettings, check_targets, parse_rates
from program.settings import setting

ALL, LAST, NONE = "all", "last", "none"
_GROUP = "comparison options"


@dataclass(frozen=True, slots=True)
class CompareSettings(TargetSettings):
    """How often, and at which rates."""

    rates: tuple[str, ...] = setting(
        (), "requests per second, one load for each; none: as the trace says", group=_GROUP, metavar="RATE"
    )
    rounds: int = setting(3, "how often every target is measured at every rate", group=_GROUP)
    warmup_rounds: int = setting(1, "rounds before, which are not counted", group=_GROUP)
    control: bool = setting(True, "measure the first target twice a round: what differs then is noise", group=_GROUP)
    detail: str = setting(LAST, "rounds to keep every request of", choices=(ALL, LAST, NONE), group=_GROUP)


def rates_of(settings: CompareSettings) -> tuple[float, ...]:
    """Rates in requests/s, infinite where the trace decides. Raises `InvalidSetting`."""
    return parse_rates(settings.rates) if settings.rates else (math.inf,)


def check(settings: CompareSettings) -> None:
    """Raise `InvalidSetting` for what cannot be used."""
    require_at_least(settings, rounds=1, warmup_rounds=0)
    check_targets(settings, rates_of(settings))
