"""Carries out the steps of a comparison and keeps the result in its file after each.

Owns the document of the result. Does not know how targets are started or how a load is made: both are given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.compare.figures import medians_of, ratios_of
from bench.compare.plan import Schedule, Step, groups_of
from bench.compare.settings import ALL, LAST
from bench.targets.line_up import LineUp
from bench.targets.load import Load, Measure, rate_as_json


@dataclass(frozen=True, slots=True)
class Keeper:
    """How results are kept: `detail` as in the settings, `save` writes a document, `say` tells people."""

    detail: str
    save: Callable[[Mapping[str, Any]], None]
    say: Callable[[str], None]


def keep_whole_groups(document: Mapping[str, Any], schedule: Schedule) -> tuple[dict[str, Any], set[int]]:
    """The document with the runs of complete groups only, and these groups.

    What an interruption tore apart is measured again: the halves of a pair have to come soon after each other.
    """
    lists = {"runs": document.get("runs", []), "control_runs": document.get("control_runs", [])}
    have = {
        (run["round"], run["rate"], run["target"], name == "control_runs")
        for name, runs in lists.items()
        for run in runs
    }
    done, kept = set(), set()
    for group, needed in groups_of(schedule).items():
        entries = {(number, rate_as_json(rate), target, again) for number, rate, target, again in needed}
        if entries <= have:
            done.add(group)
            kept |= entries
    whole = {
        name: [run for run in runs if (run["round"], run["rate"], run["target"], name == "control_runs") in kept]
        for name, runs in lists.items()
    }
    return {**document, **whole}, done


def carry_out(
    document: dict[str, Any],
    steps: Sequence[Step],
    num_prompts: Mapping[float, int],
    rounds: int,
    line_up: LineUp,
    measure: Measure,
    keeper: Keeper,
) -> dict[str, Any]:
    """Measure `steps`; the document with their results. `num_prompts` of each load by its rate."""
    for number, step in enumerate(steps, 1):
        keeper.say(f"{number} of {len(steps)}: {_describe(step, rounds)}")
        is_detailed = keeper.detail == ALL or (keeper.detail == LAST and step.round == rounds)
        running = line_up.take_turn(step.target)
        before = line_up.cpu_seconds()
        load = Load(running.url, step.rate, num_prompts[step.rate], step.seed, is_detailed and not step.is_control)
        result = measure(load)
        if step.round:
            entry = {
                "target": step.target,
                "round": step.round,
                "rate": rate_as_json(step.rate),
                **_cpu(before, line_up.cpu_seconds(), step.target),
                "result": result,
            }
            name = "control_runs" if step.is_control else "runs"
            document = concluded({**document, "targets": line_up.describe(), name: [*document[name], entry]})
            keeper.save(document)
    return document


def concluded(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with `workload`, `medians` and `ratios` made of its runs."""
    names = [target["name"] for target in document["targets"]]
    runs, control_runs = document["runs"], document["control_runs"]
    workload = runs[0]["result"].get("dataset", {}) if runs else {}
    return {
        **document,
        "workload": workload,
        "medians": medians_of(names, runs),
        "ratios": ratios_of(names, runs, control_runs),
    }


def _cpu(before: Mapping[str, float], after: Mapping[str, float], target: str) -> dict[str, float | None]:
    """CPU time during the load: `cpu_s` of the target (None where it is not ours), `others_cpu_s` of the rest."""
    used = {name: after[name] - before[name] for name in after if name in before}
    others_s = sum(cpu_s for name, cpu_s in used.items() if name != target)
    return {"cpu_s": round(used[target], 2) if target in used else None, "others_cpu_s": round(others_s, 2)}


def _describe(step: Step, rounds: int) -> str:
    at = "all at once or as the trace says" if step.rate == float("inf") else f"{step.rate:g} requests/s"
    which = f"round {step.round} of {rounds}" if step.round else "warm-up"
    return f"{which}, {step.target}{' again' if step.is_control else ''}, {at}"
