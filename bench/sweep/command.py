"""`baton bench sweep`: the highest rate at which a configuration still serves well enough, its goodput.

The rate is doubled until too few requests meet the goals of `--goodput`, then narrowed down. Configurations take turns,
so that what else uses the machine meets all of them. An interrupted sweep goes on when it is started again.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench.arguments import parse_settings
from bench.compare import result_file
from bench.facts import collect_facts
from bench.serve.settings import ServeBenchSettings
from bench.serve.settings import check as check_serve
from bench.serve.slo import parse_slo
from bench.sweep.report import report
from bench.sweep.run import Plan, carry_out, concluded, open_searches
from bench.sweep.settings import SweepSettings, check, search_of
from bench.targets.line_up import line_up_of, names_to_halt
from bench.targets.load import arguments_of, complete, measure_with, num_prompts_for, serve_flags
from bench.targets.spec import parse_targets
from bench.workload.dataset_settings import DatasetSettings

_PACKAGES = ("baton-serve", "aiohttp", "numpy", "torch", "tokenizers", "uvloop")


def main(arguments: Sequence[str]) -> int:
    """Search, save and print; 1 when no rate of some configuration was good enough. Raises `BatonError`."""
    settings, serve, dataset = _parse(arguments)
    goals = parse_slo(serve.goodput)
    check(settings, goals)
    check_serve(serve)
    targets = parse_targets(settings.target)
    names_to_halt(targets, settings.pause)
    path = Path(settings.json) if settings.json else None
    measured = arguments_of(dataclasses.replace(settings, resume=True), serve, dataset)
    facts = collect_facts(shlex.join(["baton", "bench", "sweep", *measured]), _PACKAGES)
    document, session = result_file.begin(path, "sweep", measured, facts, is_resumed=settings.resume)
    document = {
        "kind": "sweep",
        "facts": dataclasses.asdict(facts),
        "slo": goals,
        "attainment": settings.attainment,
        "configurations": [{**target.describe(), "points": []} for target in targets],
        **document,
    }
    plan = _plan(settings, dataset.seed, session)
    if open_searches(document, plan):
        measure = measure_with(serve, dataset, _say)
        with line_up_of(targets, settings, _say) as line_up:
            document = carry_out(document, plan, line_up, measure, partial(result_file.save, path), _say)
    else:
        _say(f"everything is in {path} already: --no-resume measures again")
    document = concluded(document, plan.search, [])
    print(report(document))
    return 0 if all(found["goodput_rate"] is not None for found in document["configurations"]) else 1


def _parse(arguments: Sequence[str]) -> tuple[SweepSettings, ServeBenchSettings, DatasetSettings]:
    parser = argparse.ArgumentParser(
        prog="baton bench sweep",
        usage="baton bench sweep --target NAME=... --goodput METRIC:MS ... [options]",
        description="Find the highest request rate that each configuration serves within its goals.",
        allow_abbrev=False,
    )
    settings, serve, dataset = parse_settings(parser, arguments, SweepSettings, serve_flags(), DatasetSettings)
    return settings, complete(serve), dataset


def _plan(settings: SweepSettings, seed: int, session: int) -> Plan:
    def num_prompts(rate: float) -> int:
        return num_prompts_for(rate, settings.duration_s, settings.min_prompts, settings.num_prompts)

    return Plan(
        search=search_of(settings),
        repeat=settings.repeat,
        warmup_runs=settings.warmup_runs,
        num_prompts=num_prompts,
        seed=seed,
        session=session,
        is_one_at_a_time=settings.one_at_a_time,
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
