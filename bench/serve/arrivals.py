"""When requests arrive: offsets in seconds from the beginning of a run, one per prompt, never decreasing.

Owns the arrival processes and which of them the settings ask for; knows neither prompts nor the clock. The names and
the meaning of rate, burstiness and ramp are those of `vllm bench serve`: the first request waits for one gap, too, so
that the last comes at `num / rate`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from baton.bench.serve.settings import CONSTANT, POISSON, TRACE, ServeBenchSettings
from baton.bench.workload.dataset_settings import AZURE, MOONCAKE, DatasetSettings, Prompt
from baton.bench.workload.passages import generator
from baton.wire.errors import InvalidSetting

RampStrategy = Literal["linear", "exponential"]
CLOSED_LOOP, ALL_AT_ONCE, RAMP = "closed loop", "all at once", "ramp"
_TRACES = (MOONCAKE, AZURE)


def poisson_or_gamma(num: int, rate: float, burstiness: float, seed: int) -> tuple[float, ...]:
    """Gaps from a gamma distribution of shape `burstiness`; 1 is a Poisson process.

    Scaled so that the last is `num / rate`, as `vllm bench serve` does it. A `rate` of infinity puts all at 0, a
    `burstiness` of infinity makes the gaps equal.
    """
    if rate == math.inf:
        return (0.0,) * num
    offsets = np.cumsum(_gaps(np.full(num, rate), burstiness, seed))
    last_s = num / rate
    if offsets[-1] > 0:
        offsets *= last_s / offsets[-1]
    # rounding may leave others past the last one
    return (*np.minimum(offsets[:-1], last_s).tolist(), last_s)


def ramp(
    num: int, start_rate: float, end_rate: float, strategy: RampStrategy, burstiness: float, seed: int
) -> tuple[float, ...]:
    """A rate that goes from `start_rate` to `end_rate` over the requests, by their index."""
    rates = (np.linspace if strategy == "linear" else np.geomspace)(start_rate, end_rate, num)
    return tuple(np.cumsum(_gaps(rates, burstiness, seed)).tolist())


def from_trace(prompts: Sequence[Prompt], time_scale: float) -> tuple[float, ...]:
    """The stamps of a trace from its first one on, times `time_scale`.

    Raises `InvalidSetting`: no stamps, or stamps out of order.
    """
    stamps = [prompt.arrival_s for prompt in prompts if prompt.arrival_s is not None]
    if not stamps or len(stamps) < len(prompts):
        raise InvalidSetting("--arrival trace: this dataset has no time stamps")
    if sorted(stamps) != stamps:
        raise InvalidSetting("--arrival trace: the time stamps of this dataset are not in order")
    return tuple((stamp - stamps[0]) * time_scale for stamp in stamps)


def _gaps(rates: NDArray[np.float64], burstiness: float, seed: int) -> NDArray[np.float64]:
    """One gap in seconds for each rate; mean `1 / rate`, variance `1 / (burstiness * rate^2)`."""
    if burstiness == math.inf:
        return 1.0 / rates
    return generator(seed, "arrivals").gamma(burstiness, 1.0 / (rates * burstiness))


def arrivals_of(
    settings: ServeBenchSettings, dataset: DatasetSettings, prompts: Sequence[Prompt]
) -> tuple[tuple[float, ...] | None, dict[str, Any]]:
    """When the prompts are to be sent, and what a result says about that. Raises `InvalidSetting`.

    Offsets of each from the beginning; None: the next is sent when one is answered.
    """
    process, num, seed = process_of(settings, dataset), len(prompts), dataset.seed
    facts: dict[str, Any] = {"process": process, "span_s": None}
    offsets_s: tuple[float, ...]
    if process == CLOSED_LOOP:
        return None, facts
    start, end, strategy = settings.ramp_up_start_rps, settings.ramp_up_end_rps, settings.ramp_up_strategy
    if start is not None and end is not None:
        offsets_s = ramp(num, start, end, cast("RampStrategy", strategy), settings.burstiness, seed)
    elif process == TRACE:
        offsets_s = from_trace(prompts, dataset.time_scale)
        facts["time_scale"] = dataset.time_scale
    else:
        burstiness = math.inf if process == CONSTANT else settings.burstiness
        offsets_s = poisson_or_gamma(num, settings.request_rate, burstiness, seed)
    if process == POISSON:
        facts["burstiness"] = settings.burstiness
    return offsets_s, facts | {"span_s": round(offsets_s[-1], 6)}


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
