"""Which arrival process the settings ask for, and what to say about it beside a result."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from bench.serve.settings import CONSTANT, POISSON, TRACE, ServeBenchSettings
from bench.workload.arrivals import constant, from_trace, poisson_or_gamma, ramp
from bench.workload.dataset_settings import AZURE, MOONCAKE, DatasetSettings
from bench.workload.turns import Conversation
from wire.errors import InvalidSetting

CLOSED_LOOP, ALL_AT_ONCE, RAMP = "closed loop", "all at once", "ramp"
_TRACES = (MOONCAKE, AZURE)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """`offsets_s` of each conversation from the beginning; None: the next is sent when one is answered."""

    offsets_s: tuple[float, ...] | None
    facts: dict[str, Any]


def arrivals_of(
    settings: ServeBenchSettings, dataset: DatasetSettings, conversations: Sequence[Conversation]
) -> Arrivals:
    """When the conversations are to begin. Raises `InvalidSetting`."""
    process = process_of(settings, dataset)
    offsets_s = _offsets(process, settings, dataset, conversations)
    facts: dict[str, Any] = {"process": process, "span_s": None if offsets_s is None else round(offsets_s[-1], 6)}
    if process == POISSON:
        facts["burstiness"] = settings.burstiness
    if process == TRACE:
        facts |= {"time_scale": dataset.time_scale, "spread_timestamps": dataset.spread_timestamps}
    return Arrivals(offsets_s, facts)


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
    if process == RAMP and settings.ramp_up_start_rps is not None and settings.ramp_up_end_rps is not None:
        strategy = cast("Literal['linear', 'exponential']", settings.ramp_up_strategy)
        return ramp(num, settings.ramp_up_start_rps, settings.ramp_up_end_rps, strategy, settings.burstiness, seed)
    if process == CLOSED_LOOP:
        return None
    if process == TRACE:
        return from_trace(conversations, dataset.time_scale, dataset.spread_s, seed)
    if process == CONSTANT:
        return constant(num, settings.request_rate)
    return poisson_or_gamma(num, settings.request_rate, settings.burstiness, seed)
