"""Settings that `compare` and `sweep` share: the targets, how long each load is, and where the result goes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bench.arguments import require_above_zero, require_at_least
from program.settings import setting
from wire.errors import InvalidSetting

_GROUP = "target and load options"


@dataclass(frozen=True, slots=True)
class TargetSettings:
    """What is measured. A command adds to this how often, and at which rates."""

    target: tuple[str, ...] = setting(
        (),
        "what to measure: NAME=URL, NAME='baton serve ...', or NAME='COMMAND @ URL'; a comparison holds the others"
        " against the first",
        group=_GROUP,
        metavar="TARGET",
    )
    duration_s: float = setting(60.0, "seconds of each load", group=_GROUP)
    min_prompts: int = setting(20, "requests of each load at least", group=_GROUP)
    num_prompts: int = setting(0, "requests of each load; 0: what --duration-s holds", group=_GROUP)
    pause: tuple[str, ...] | None = setting(
        None,
        "targets to halt while others are measured; none: every one that is started here and is no Baton",
        group=_GROUP,
        metavar="NAME",
    )
    one_at_a_time: bool = setting(
        False, "start a target when it is its turn and end it after, to save memory", group=_GROUP
    )
    start_timeout_s: float = setting(900.0, "seconds until a target that is started must answer", group=_GROUP)
    json: str = setting("", "file for the result, written after every load that counts", group=_GROUP, metavar="FILE")
    resume: bool = setting(True, "go on with --json when it is there; --no-resume begins anew", group=_GROUP)

    def num_prompts_at(self, rate: float) -> int:
        """Requests of one load: `num_prompts` if that is not 0, else what fills `duration_s`, at least `min_prompts`.

        Raises `InvalidSetting` for an infinite rate without `num_prompts`.
        """
        if self.num_prompts:
            return self.num_prompts
        if not math.isfinite(rate):
            raise InvalidSetting("an infinite rate needs --num-prompts: it has no duration")
        return max(self.min_prompts, math.ceil(rate * self.duration_s))


def check_targets(settings: TargetSettings, rates: Sequence[float]) -> None:
    """Raise `InvalidSetting` for what cannot be used."""
    if not settings.target:
        raise InvalidSetting("--target is needed, once for each thing to measure")
    require_at_least(settings, min_prompts=1, num_prompts=0)
    require_above_zero(settings, "duration_s", "start_timeout_s")
    for rate in rates:
        settings.num_prompts_at(rate)


def parse_rates(words: Sequence[str]) -> tuple[float, ...]:
    """Rates in requests/s of words like `1 2` or `1,2`, `inf` among them. Raises `InvalidSetting`."""
    found = []
    for text in (text for word in words for text in word.split(",")):
        try:
            rate = float(text)
        except ValueError:
            rate = math.nan
        if not rate > 0:
            raise InvalidSetting(f"--rates {text!r:.40} is not a rate above 0")
        found.append(rate)
    if len(set(found)) < len(found):
        raise InvalidSetting(f"--rates {' '.join(words):.100}: a rate is there twice")
    return tuple(found)
