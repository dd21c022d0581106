"""Carries out the steps of a comparison and keeps the result in its file after each.

Owns the document of the result. Does not know how targets are started or how a load is made: both are given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.compare.figures import medians_of, ratios_of
from bench.compare.plan import Schedule, Step
from bench.compare.settings import ALL, LAST, CompareSettings
from bench.documents import CompareDocument
from bench.runs import Run
from bench.targets.line_up import LineUp
from bench.targets.load import Load, Measure
from bench.targets.session import Session


def keep_whole_groups(document: CompareDocument, schedule: Schedule) -> set[int]:
    """Drop the runs of incomplete groups from `document`; the groups that are complete.

    What an interruption tore apart is measured again: the halves of a pair have to come soon after each other.
    """
    have = {_key(run, is_control=False) for run in document.runs}
    have |= {_key(run, is_control=True) for run in document.control_runs}
    torn = {step.group for step in schedule.counted() if step.key not in have}
    kept = {step.key for step in schedule.counted() if step.group not in torn}
    document.runs = [run for run in document.runs if _key(run, is_control=False) in kept]
    document.control_runs = [run for run in document.control_runs if _key(run, is_control=True) in kept]
    return {step.group for step in schedule.counted()} - torn


def carry_out(
    document: CompareDocument,
    steps: Sequence[Step],
    session: Session[CompareSettings],
    line_up: LineUp,
    measure: Measure,
) -> None:
    """Measure `steps` and put their results into `document`, which is saved after each."""
    settings = session.settings
    for number, step in enumerate(steps, 1):
        session.say(f"{number} of {len(steps)}: {_describe(step, settings.rounds)}")
        is_detailed = settings.detail == ALL or (settings.detail == LAST and step.round == settings.rounds)
        running = line_up.take_turn(step.target)
        before = line_up.cpu_seconds()
        num_prompts = settings.num_prompts_at(step.rate)
        result = measure(Load(running.url, step.rate, num_prompts, step.seed, is_detailed and not step.is_control))
        if step.round:
            cpu_s, others_cpu_s = _cpu(before, line_up.cpu_seconds(), step.target)
            runs = document.control_runs if step.is_control else document.runs
            runs.append(Run(step.target, step.round, step.rate, result, cpu_s, others_cpu_s))
            document.targets = line_up.describe()
            conclude(document)
            session.save(document)


def conclude(document: CompareDocument) -> None:
    """Make `workload`, `medians` and `ratios` of its runs."""
    names = [target.name for target in document.targets]
    document.workload = dict(document.runs[0].part("dataset")) if document.runs else {}
    document.medians = medians_of(names, document.runs)
    document.ratios = ratios_of(names, document.runs, document.control_runs)


def _key(run: Run, *, is_control: bool) -> tuple[int, float, str, bool]:
    return run.round, run.rate, run.target, is_control


def _cpu(before: Mapping[str, float], after: Mapping[str, float], target: str) -> tuple[float | None, float]:
    """CPU time during the load: of the target (None where it is not ours), and of the rest."""
    used = {name: after[name] - before[name] for name in after if name in before}
    others_s = sum(cpu_s for name, cpu_s in used.items() if name != target)
    return round(used[target], 2) if target in used else None, round(others_s, 2)


def _describe(step: Step, rounds: int) -> str:
    at = "all at once or as the trace says" if step.rate == float("inf") else f"{step.rate:g} requests/s"
    which = f"round {step.round} of {rounds}" if step.round else "warm-up"
    return f"{which}, {step.target}{' again' if step.is_control else ''}, {at}"
