"""`baton bench limits`: what this machine can do at most, and how close Baton comes.

Ceilings (copying, reading, multiplying, a message) are measured in turns with the part of Baton that they limit, in the
same run, so that the ratios say something on a machine that others use too. Owns which measurements there are and on
which cores they run; every one of them ends its processes before the next begins.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from baton.bench.arguments import parse_alone, require_folder, write_text
from baton.bench.child import Child
from baton.bench.documents import LimitsDocument, ResultFile
from baton.bench.facts import Facts, collect_facts
from baton.bench.kv.measure import Case, Cores, KvBenchSettings, core_limits, plan, round_trips, session
from baton.bench.kv.report import figures
from baton.bench.limits.result import (
    CEILING_NAMES,
    ENGINE_NAMES,
    HANDOFF_NAMES,
    KV_NAMES,
    MEANINGS,
    STEP_NAMES,
    Ceiling,
    Found,
    LimitsSettings,
    Ratio,
    ceiling_of,
    difference_of,
)
from baton.bench.limits.router_hop import RatePlan, RouterPlan, measure_router_hop, measure_router_rate, router_ratios
from baton.bench.limits.served import handoff_ratios, isolation_ratio, measure_handoffs, measure_isolation
from baton.bench.numbers import median, percentile
from baton.bench.report.document import as_text
from baton.bench.report.sections import section_of
from baton.engine.models.identity import model_name
from baton.kvtransfer.integrity import XXH3
from baton.kvtransfer.transports.registry import SHM
from baton.wire.errors import BatonError

_DESCRIPTION = "Measure this machine's ceilings and how close Baton comes to them, in turns."
_PACKAGES = ("baton-serve", "numpy", "torch", "pyzmq", "aiohttp")
_ENGINE = "baton.bench.limits.engine_process"
_START_S = 300.0
_MESSAGE_BYTES = 256
_NUM_ROUND_TRIPS, _NUM_WARM_UP_TRIPS = 500, 50
_NUM_KV_ROUNDS = 15


def main(arguments: Sequence[str]) -> int:
    """Measure and print; 1 when something that was to be measured failed. Raises `BatonError`."""
    settings = parse_alone("baton bench limits", _DESCRIPTION, arguments, LimitsSettings)
    settings.check()
    require_folder(settings.json)
    facts = collect_facts(shlex.join(["baton", "bench", "limits", *arguments]), _PACKAGES)
    found = Found()
    for name, part in (("engine", engine_limits), ("system", system_limits)):
        try:
            part(settings, found, lambda text: print(f"measuring: {text}", file=sys.stderr, flush=True))
        except BatonError as error:  # one half that fails leaves the other
            found.failures.append(f"{name} limits: {error}")
    setup = {"model": model_name(settings.model, ""), "cores": list(settings.core_ids), "threads": settings.num_threads}
    setup |= {"rounds": settings.num_rounds, "max_num_batched_tokens": settings.max_num_batched_tokens}
    print("\n".join([*facts.describe(), ", ".join(f"{name} {value}" for name, value in setup.items()), ""]))
    print(report(facts, setup, found))
    if settings.json:
        document = {"kind": "limits", "facts": asdict(facts), "setup": setup, **asdict(found)}
        write_text(settings.json, json.dumps(document, indent=1) + "\n")
    return 1 if found.failures else 0


def report(facts: Facts, setup: dict[str, Any], found: Found) -> str:
    document = LimitsDocument(facts, found.ceilings, found.ratios, setup, found.failures)
    filled = [name for name, rows in (("ceilings", found.ceilings), ("ratios", found.ratios)) if rows]
    meanings = [f"{name}: {MEANINGS[name]}" for name in dict.fromkeys(ratio.name for ratio in found.ratios)]
    return "\n".join(
        [as_text(section_of(ResultFile("limits", document)), *filled), *([""] * bool(meanings)), *meanings]
    )


def engine_limits(settings: LimitsSettings, found: Found, say: Callable[[str], None]) -> None:
    """What is measured in one process with an engine. Raises `RequestFailed`."""
    wanted = [name for name in settings.names if name in ENGINE_NAMES]
    if not wanted:
        return
    say("building the engine")
    with Child(_ENGINE, asdict(settings)) as engine:
        engine.hear(_START_S)
        steps = [
            {"batch": batch, "context": length} for length in settings.context_lens for batch in settings.batch_sizes
        ]
        for name in wanted:
            for case in [] if name in CEILING_NAMES else steps if name in STEP_NAMES else [{}]:
                say(", ".join([name, *(f"{size} {number}" for size, number in case.items())]))
                answer = engine.ask(name, **case)
                found.ratios.extend(Ratio(**ratio) for ratio in (answer if isinstance(answer, list) else [answer]))
        ceilings = engine.ask("ceilings", names=[name for name in CEILING_NAMES if name in wanted])
        found.ceilings.extend(Ceiling(**ceiling) for ceiling in ceilings)


def system_limits(settings: LimitsSettings, found: Found, say: Callable[[str], None]) -> None:
    """What needs several processes. Raises `InvalidSetting`, `ModelLoadError`, `RequestFailed`."""
    cores = two_cores(settings)
    wanted = set(settings.names)
    with _confined_to(settings.core_ids):
        if "zmq_round_trip" in wanted:
            say("zmq round trip")
            found.ceilings.append(zmq_round_trip(settings, cores))
        if wanted.intersection(KV_NAMES):
            for case in _kv_cases(settings, cores, say):
                found.ratios.extend(ratio for ratio in kv_ratios(case) if ratio.name in wanted)
        if wanted.intersection(HANDOFF_NAMES):
            for samples in measure_handoffs(settings, cores[0], say):
                found.ratios.extend(ratio for ratio in handoff_ratios(samples) if ratio.name in wanted)
        if "router_us_per_token" in wanted:
            small = {"concurrencies": (1, 4), "num_tokens": 20} if settings.quick else {}
            plan = RouterPlan(num_rounds=settings.num_rounds, **small)  # type: ignore[arg-type]
            found.ratios.extend(ratio for each in measure_router_hop(plan, say) for ratio in router_ratios(each))
        if "router_events_per_cpu_s" in wanted:
            few = {"concurrencies": (4,), "num_events": 200} if settings.quick else {}
            found.ratios.extend(measure_router_rate(RatePlan(num_rounds=settings.num_rounds, **few), say))  # type: ignore[arg-type]
        if "itl_isolation" in wanted:
            found.ratios.extend(map(isolation_ratio, measure_isolation(settings, say)))


def two_cores(settings: LimitsSettings) -> Cores:
    """One for each of two processes that are measured together; any where there is only one."""
    cores = settings.core_ids
    return (cores[0], cores[len(cores) // 2]) if len(cores) > 1 else (None, None)


def zmq_round_trip(settings: LimitsSettings, cores: Cores) -> Ceiling:
    """Microseconds of a small message to a process on another core and back; of each round the median."""
    num_trips = 20 if settings.quick else _NUM_ROUND_TRIPS
    with core_limits(cores, num_bytes=1) as (one, other):
        round_trips(one, other, _NUM_WARM_UP_TRIPS, message_bytes=_MESSAGE_BYTES)
        rounds_s = [
            round_trips(one, other, num_trips, message_bytes=_MESSAGE_BYTES) for _ in range(settings.num_rounds)
        ]
    p99_us = percentile([trip_s for trips_s in rounds_s for trip_s in trips_s], 99) * 1e6
    where = "any cores" if cores[0] is None else f"cores {cores[0]} and {cores[1]}"
    note = f"{_MESSAGE_BYTES} bytes over TCP between processes on {where}; p99 {p99_us:.0f} us"
    return ceiling_of("zmq round trip", [median(trips_s) * 1e6 for trips_s in rounds_s], "us", note)


def _kv_cases(settings: LimitsSettings, cores: Cores, say: Callable[[str], None]) -> list[Case]:
    """Handoffs of 1, 8, 64 and 512 blocks by shared memory with checksums. Raises `RequestFailed`."""
    say("handoffs by shared memory")
    num_rounds, pinned = max(settings.num_rounds, _NUM_KV_ROUNDS), "" if cores[0] is None else f"{cores[0]},{cores[1]}"
    planned = plan(KvBenchSettings(transports=SHM, rounds=num_rounds, cores=pinned, quick=settings.quick))
    return list(session(planned, SHM, XXH3, planned.settings.block_bytes, planned.blocks))


def kv_ratios(case: Case) -> list[Ratio]:
    shown = f"{case.num_blocks} block{'s' * (case.num_blocks > 1)} of {case.block_bytes // 1024} KiB"
    note = f"{case.transport}, checksum {case.checksum}"
    found = figures(case)
    pairs, rates = found.kv_bw_ratio, f"{note}, {found.gb_per_s:.2f} of {found.memcpy_gb_per_s:.2f} GB/s"
    wall_us, copy_us = ([taken_s * 1e6 for taken_s in all_s] for all_s in (case.wall_s, case.memcpy_s))
    return [
        Ratio("kv_bw_ratio", shown, pairs.of_medians, pairs.low, pairs.high, "", "1", found.is_noisy, rates),
        difference_of("kv_overhead_us", shown, wall_us, copy_us, unit="us", note=note),
    ]


@contextlib.contextmanager
def _confined_to(cores: tuple[int, ...]) -> Iterator[None]:
    """This process and those that it starts meanwhile run on these cores only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
