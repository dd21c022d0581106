"""`baton bench compare`: the same workload on several targets in turns, and what may be concluded from it.

Targets are measured one after the other in each round, each with the same requests; what else uses the machine meets
all of them. See `bench.compare.verdict` for the rule by which a difference is called one.
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
from bench.compare.plan import Schedule, steps_of
from bench.compare.report import report
from bench.compare.run import Keeper, carry_out, concluded, keep_whole_groups
from bench.compare.settings import CompareSettings, check, rates_of
from bench.facts import collect_facts
from bench.serve.settings import ServeBenchSettings
from bench.serve.settings import check as check_serve
from bench.targets.line_up import line_up_of, names_to_halt
from bench.targets.load import arguments_of, complete, measure_with, num_prompts_for, serve_flags
from bench.targets.spec import Target, parse_targets
from bench.workload.dataset_settings import DatasetSettings

_PACKAGES = ("baton-serve", "aiohttp", "numpy", "torch", "tokenizers", "uvloop")


def main(arguments: Sequence[str]) -> int:
    """Measure, save and print; 1 when a target answered nothing at some rate. Raises `BatonError`."""
    settings, serve, dataset = _parse(arguments)
    check(settings)
    check_serve(serve)
    targets = parse_targets(settings.target)
    names_to_halt(targets, settings.pause)
    path = Path(settings.json) if settings.json else None
    measured = arguments_of(dataclasses.replace(settings, resume=True), serve, dataset)
    facts = collect_facts(shlex.join(["baton", "bench", "compare", *measured]), _PACKAGES)
    document, session = result_file.begin(path, "compare", measured, facts, is_resumed=settings.resume)
    schedule = _schedule(settings, targets, dataset.seed, session)
    document, done = keep_whole_groups(document, schedule)
    document = {
        "kind": "compare",
        "facts": dataclasses.asdict(facts),
        "targets": [target.describe() for target in targets],
        "rounds": settings.rounds,
        **document,
    }
    if steps := steps_of(schedule, done):
        measure = measure_with(serve, dataset, _say)
        num_prompts = {rate: _num_prompts(settings, rate) for rate in schedule.rates}
        keeper = Keeper(settings.detail, partial(result_file.save, path), _say)
        with line_up_of(targets, settings, _say) as line_up:
            document = carry_out(document, steps, num_prompts, settings.rounds, line_up, measure, keeper)
    else:
        _say(f"everything is in {path} already: --no-resume measures again")
    document = concluded(document)
    print(report(document))
    return 0 if all(entry["failed"] < entry["num_requests"] for entry in document["medians"]) else 1


def _parse(arguments: Sequence[str]) -> tuple[CompareSettings, ServeBenchSettings, DatasetSettings]:
    parser = argparse.ArgumentParser(
        prog="baton bench compare",
        usage="baton bench compare --target NAME=... --target NAME=... [options]",
        description="Measure several servers in turns with the same requests, and say what differs beyond noise.",
        allow_abbrev=False,
    )
    settings, serve, dataset = parse_settings(parser, arguments, CompareSettings, serve_flags(), DatasetSettings)
    return settings, complete(serve), dataset


def _schedule(settings: CompareSettings, targets: Sequence[Target], seed: int, session: int) -> Schedule:
    return Schedule(
        targets=tuple(target.name for target in targets),
        rates=rates_of(settings),
        rounds=settings.rounds,
        warmup_rounds=settings.warmup_rounds,
        has_control=settings.control,
        is_one_at_a_time=settings.one_at_a_time,
        seed=seed,
        session=session,
    )


def _num_prompts(settings: CompareSettings, rate: float) -> int:
    return num_prompts_for(rate, settings.duration_s, settings.min_prompts, settings.num_prompts)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
