"""The half of `baton bench limits` that needs several processes: nodes, a router, clients.

Owns which measurements there are, how large they are, and on which cores they run. Every one of them ends its
processes before the next begins.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

from bench.limits.handoff_ratios import NUM_OUTPUT_TOKENS, HandoffPlan, handoff_ratios, measure_handoffs
from bench.limits.isolation import ARRANGEMENTS, IsolationPlan, isolation_ratio, measure_isolation
from bench.limits.kv_ratios import kv_cases, kv_ratios
from bench.limits.result import Ceiling, Ratio
from bench.limits.round_trip import zmq_round_trip
from bench.limits.router_path import RouterPlan, measure_router_path, router_ratios
from bench.limits.served import served_model
from bench.limits.settings import LimitsSettings

_READY_S = 300.0
_NUM_ROUND_TRIPS = 500
_NUM_KV_ROUNDS = 15
_NUM_ISOLATION_ROUNDS = 5
_ISOLATION_PHASE_S = 1.5


def system_limits(settings: LimitsSettings, say: Callable[[str], None]) -> tuple[list[Ceiling], list[Ratio]]:
    """Measure what the settings want of this half. Raises `InvalidSetting`, `ModelLoadError`, `RequestFailed`."""
    ceilings: list[Ceiling] = []
    ratios: list[Ratio] = []
    with _confined_to(settings.core_ids):
        if settings.wants("zmq_round_trip"):
            say("zmq round trip")
            num_trips = 20 if settings.quick else _NUM_ROUND_TRIPS
            ceilings.append(zmq_round_trip(settings.num_rounds, num_trips, _two_cores(settings)))
        for measure, names in (
            (_kv, ("kv_bw_ratio", "kv_overhead_us")),
            (_handoffs, ("exposed_ratio", "handover_us")),
            (_router, ("router_us_per_token",)),
            (_isolation, ("itl_isolation",)),
        ):
            unwanted = {name for name in names if not settings.wants(name)}
            if unwanted != set(names):
                ratios.extend(ratio for ratio in measure(settings, say) if ratio.name not in unwanted)
    return ceilings, ratios


def _kv(settings: LimitsSettings, say: Callable[[str], None]) -> list[Ratio]:
    cores = ",".join(map(str, _two_cores(settings) or ()))
    cases = kv_cases(max(settings.num_rounds, _NUM_KV_ROUNDS), cores, say, quick=settings.quick)
    return [ratio for case in cases for ratio in kv_ratios(case)]


def _handoffs(settings: LimitsSettings, say: Callable[[str], None]) -> list[Ratio]:
    limit = served_model(settings.model).max_tokens - NUM_OUTPUT_TOKENS
    num_tokens = settings.num_prompt_tokens
    lengths = (num_tokens,) if settings.quick else (num_tokens, 4 * num_tokens)
    plan = HandoffPlan(
        model=settings.model,
        prompt_lens=tuple(sorted({min(length, limit) for length in lengths})),
        num_rounds=settings.num_rounds,
        ready_timeout_s=_READY_S,
        is_quick=settings.quick,
    )
    return [ratio for samples in measure_handoffs(plan, _two_cores(settings), say) for ratio in handoff_ratios(samples)]


def _router(settings: LimitsSettings, say: Callable[[str], None]) -> list[Ratio]:
    plan = RouterPlan(num_rounds=settings.num_rounds)
    if settings.quick:
        plan = RouterPlan(concurrencies=(1, 4), num_rounds=settings.num_rounds, num_tokens=20)
    return [ratio for samples in measure_router_path(plan, say) for ratio in router_ratios(samples)]


def _isolation(settings: LimitsSettings, say: Callable[[str], None]) -> list[Ratio]:
    plan = IsolationPlan(
        model=settings.model,
        num_prompt_tokens=settings.num_prompt_tokens,
        num_rounds=settings.num_rounds if settings.quick else min(settings.num_rounds, _NUM_ISOLATION_ROUNDS),
        phase_s=0.1 if settings.quick else _ISOLATION_PHASE_S,
        ready_timeout_s=_READY_S,
        arrangements=ARRANGEMENTS[:2] if settings.quick else ARRANGEMENTS,
    )
    return [isolation_ratio(samples) for samples in measure_isolation(plan, say)]


def _two_cores(settings: LimitsSettings) -> tuple[int, int] | None:
    """One for each of two processes that are measured together; None where there is only one core."""
    cores = settings.core_ids
    return (cores[0], cores[len(cores) // 2]) if len(cores) > 1 else None


@contextlib.contextmanager
def _confined_to(cores: tuple[int, ...]) -> Iterator[None]:
    """This process and those that it starts meanwhile run on these cores only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
