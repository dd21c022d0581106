"""When requests arrive: offsets in seconds from the beginning of a run, one per conversation, never decreasing.

Owns the arrival processes and which of them the settings ask for; knows neither prompts nor the clock. The names and
the meaning of rate, burstiness and ramp are those of `vllm bench serve`: the first request waits for one gap, too, so
that the last comes at `num / rate`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from bench.serve.settings import CONSTANT, POISSON, TRACE, ServeBenchSettings
from bench.workload.dataset_settings import AZURE, MOONCAKE, DatasetSettings
from bench.workload.passages import generator
from bench.workload.turns import Conversation
from wire.errors import InvalidSetting

RampStrategy = Literal["linear", "exponential"]
CLOSED_LOOP, ALL_AT_ONCE, RAMP = "closed loop", "all at once", "ramp"
_TRACES = (MOONCAKE, AZURE)


def poisson_or_gamma(num: int, rate: float, burstiness: float, seed: int) -> tuple[float, ...]:
    """Gaps from a gamma distribution of shape `burstiness`; 1 is a Poisson process.

    Scaled so that the last is `num / rate`, as `vllm bench serve` does it. A `rate` of infinity puts all at 0, a
    `burstiness` of infinity makes the gaps equal. Raises `InvalidSetting`.
    """
    _check(num, {"--request-rate": rate})
    if rate == math.inf:
        return (0.0,) * num
    offsets = np.cumsum(_gaps(np.full(num, rate), burstiness, seed))
    last_s = num / rate
    if offsets[-1] > 0:
        offsets *= last_s / offsets[-1]
    # rounding may leave others past the last one
    return (*np.minimum(offsets[:-1], last_s).tolist(), last_s)


def constant(num: int, rate: float) -> tuple[float, ...]:
    """Equal gaps of `1 / rate`. Raises `InvalidSetting`."""
    _check(num, {"--request-rate": rate})
    return tuple((index + 1) / rate for index in range(num))


def ramp(
    num: int, start_rate: float, end_rate: float, strategy: RampStrategy, burstiness: float, seed: int
) -> tuple[float, ...]:
    """A rate that goes from `start_rate` to `end_rate` over the requests, by their index. Raises `InvalidSetting`."""
    _check(num, {"--ramp-up-start-rps": start_rate, "--ramp-up-end-rps": end_rate}, is_finite=True)
    progress = np.arange(num) / max(num - 1, 1)
    if strategy == "linear":
        rates = start_rate + (end_rate - start_rate) * progress
    else:
        rates = start_rate * (end_rate / start_rate) ** progress
    return tuple(np.cumsum(_gaps(rates, burstiness, seed)).tolist())


def from_trace(
    conversations: Sequence[Conversation], time_scale: float, spread_s: float, seed: int
) -> tuple[float, ...]:
    """The stamps of a trace from its first one on, times `time_scale`.

    Several requests on one stamp are a trace's rounding, not a burst: they are spread at random over `spread_s` of the
    trace's time, but not past the next stamp (infinity: over the whole gap; the last group over the gap before it).
    0 keeps the stamps. A stamp with one request stays.

    Raises `InvalidSetting`: no stamps, stamps out of order, or a scale that is not above 0.
    """
    _check(1, {"--time-scale": time_scale}, is_finite=True)
    stamps = _stamps(conversations)
    random = generator(seed, "trace stamps")
    groups = [(stamp, len(list(same))) for stamp, same in groupby(stamps)]
    gaps = [after - before for (before, _), (after, _) in pairwise(groups)]
    gaps.append(gaps[-1] if gaps else 0.0)
    offsets: list[float] = []
    for (stamp, num), gap_s in zip(groups, gaps, strict=True):
        width_s = min(spread_s, gap_s) if num > 1 else 0.0
        offsets.extend((stamp + width_s * np.sort(random.random(num))).tolist())
    # rounding may put a spread stamp past the one after it
    return tuple((offset - stamps[0]) * time_scale for offset in accumulate(offsets, max))


def _stamps(conversations: Sequence[Conversation]) -> list[float]:
    known = [conversation.arrival_s for conversation in conversations if conversation.arrival_s is not None]
    if not known or len(known) < len(conversations):
        raise InvalidSetting("--arrival trace: this dataset has no time stamps")
    if sorted(known) != known:
        raise InvalidSetting("--arrival trace: the time stamps of this dataset are not in order")
    return known


def _gaps(rates: NDArray[np.float64], burstiness: float, seed: int) -> NDArray[np.float64]:
    """One gap in seconds for each rate; mean `1 / rate`, variance `1 / (burstiness * rate^2)`."""
    _check(1, {"--burstiness": burstiness})
    if burstiness == math.inf:
        return 1.0 / rates
    return generator(seed, "arrivals").gamma(burstiness, 1.0 / (rates * burstiness))


def _check(num: int, positive: Mapping[str, float], *, is_finite: bool = False) -> None:
    if num < 1:
        raise InvalidSetting(f"--num-prompts {num} is not at least 1")
    for flag, value in positive.items():
        if not value > 0 or (is_finite and value == math.inf):
            raise InvalidSetting(f"{flag} {value} is not above 0{' and finite' * is_finite}")


def arrivals_of(
    settings: ServeBenchSettings, dataset: DatasetSettings, conversations: Sequence[Conversation]
) -> tuple[tuple[float, ...] | None, dict[str, Any]]:
    """When the conversations are to begin, and what a result says about that. Raises `InvalidSetting`.

    Offsets of each from the beginning; None: the next is sent when one is answered.
    """
    process = process_of(settings, dataset)
    offsets_s = _offsets(process, settings, dataset, conversations)
    facts: dict[str, Any] = {"process": process, "span_s": None if offsets_s is None else round(offsets_s[-1], 6)}
    if process == POISSON:
        facts["burstiness"] = settings.burstiness
    if process == TRACE:
        facts |= {"time_scale": dataset.time_scale, "spread_timestamps": dataset.spread_timestamps}
    return offsets_s, facts


def process_of(settings: ServeBenchSettings, dataset: DatasetSettings) -> str:
    """The name of the process. Raises `InvalidSetting` for settings that contradict each other."""
    if settings.ramp_up_strategy is not None:
        return RAMP
    has_rate = math.isfinite(settings.request_rate)
    asked = settings.arrival
    if asked is None and not has_rate and dataset.dataset_name in _TRACES and settings.max_concurrency is None:
        asked = TRACE
    if asked == TRACE:
        if has_rate:
            raise InvalidSetting("--arrival trace: the trace decides the rate; use --time-scale, not --request-rate")
        return TRACE
    if not has_rate:
        if asked == CONSTANT:
            raise InvalidSetting("--arrival constant needs --request-rate")
        return ALL_AT_ONCE if settings.max_concurrency is None else CLOSED_LOOP
    return asked or POISSON


def _offsets(
    process: str, settings: ServeBenchSettings, dataset: DatasetSettings, conversations: Sequence[Conversation]
) -> tuple[float, ...] | None:
    num, seed = len(conversations), dataset.seed
    start, end = settings.ramp_up_start_rps, settings.ramp_up_end_rps
    if process == RAMP and start is not None and end is not None:
        return ramp(num, start, end, cast("RampStrategy", settings.ramp_up_strategy), settings.burstiness, seed)
    if process == CLOSED_LOOP:
        return None
    if process == TRACE:
        return from_trace(conversations, dataset.time_scale, dataset.spread_s, seed)
    if process == CONSTANT:
        return constant(num, settings.request_rate)
    return poisson_or_gamma(num, settings.request_rate, settings.burstiness, seed)
