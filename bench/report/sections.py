"""One section for each kind of result file: which tables, pictures and conditions it has.

Nothing is drawn here: a picture is drawn when it is needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from baton.bench.compare.verdict import ratios_of
from baton.bench.documents import (
    CompareDocument,
    LimitsDocument,
    MeasuredTarget,
    ResultFile,
    ServeDocument,
    SweepDocument,
)
from baton.bench.kv.measure import KvDocument
from baton.bench.kv.report import draw_transfer
from baton.bench.kv.report import table as kv_table
from baton.bench.numbers import percent
from baton.bench.plots import lines
from baton.bench.plots.lines import GOAL, slo_in_words
from baton.bench.report.document import Picture, Section, Table
from baton.bench.report.tables import (
    breakdown_table,
    ceiling_table,
    failure_table,
    figure_tables,
    goodput_table,
    limit_table,
    points_table,
)
from baton.bench.runs import Point, Run, points_of


def section_of(file: ResultFile) -> Section:
    match file.document:
        case CompareDocument() as document:
            return _compare(file.name, document)
        case SweepDocument() as document:
            return _sweep(file.name, document)
        case LimitsDocument() as document:
            return _limits(file.name, document)
        case KvDocument() as document:
            return _kv(file.name, document)
        case ServeDocument() as document:
            return _served(file.name, document)


def _compare(name: str, document: CompareDocument) -> Section:
    targets = [target.name for target in document.targets]
    title = " against ".join(targets)
    num_rounds = len({run.round for run in document.runs})
    said = (("compared", title), ("rounds", f"{num_rounds}, in turns"), *map(_described, document.targets))
    points = points_of(document.runs, targets)
    ratios = ratios_of(targets, document.runs, document.control_runs)  # verdicts of an earlier file have other words
    begun = Section(name, "comparison", title, document.facts, said, notes=tuple(document.notes))
    return _of_runs(begun, document.runs, points, figure_tables(points, ratios))


def _sweep(name: str, document: SweepDocument) -> Section:
    runs = []
    for each in document.configurations:
        for place, point in enumerate(each.points, start=1):
            runs.append(Run(each.name, place, point.rate, point.result | {"slo_attainment": point.attainment}))
    points = points_of(runs, [each.name for each in document.configurations])
    tables = [goodput_table(document.configurations), points_table(points)]
    goals = f"{percent(document.attainment)} of requests meet {slo_in_words(document.slo)}"
    title = f"Goodput: the highest rate at which {goals}"
    said = tuple(map(_described, document.configurations))
    begun = Section(name, "sweep", title, document.facts, said, notes=tuple(document.notes))
    return _of_runs(begun, runs, points, tables, document.attainment)


def _limits(name: str, document: LimitsDocument) -> Section:
    return Section(
        name,
        "limits",
        "What the machine can do, and how near Baton comes",
        document.facts,
        conditions=(*document.facts.conditions, *((key, in_words(value)) for key, value in document.setup.items())),
        blocks=tuple(table for table in (limit_table(document.ratios), ceiling_table(document.ceilings)) if table.rows),
        notes=(*document.failures, *document.notes),
    )


def _kv(name: str, document: KvDocument) -> Section:
    picture = Picture("transfer", "Rate of KV handoffs against their size", partial(draw_transfer, document.cases))
    return Section(
        name,
        "KV handoffs",
        "Handoffs of KV blocks between two processes",
        document.facts,
        conditions=document.facts.conditions,
        blocks=(picture, kv_table(document.cases)) if document.cases else (),
        notes=tuple(f"{transport} failed: {reason}" for transport, reason in document.failures.items()),
    )


def _served(name: str, document: ServeDocument) -> Section:
    points, (run,) = points_of(document.runs), document.runs
    begun = Section(name, "run", f"{run.target} at {run.pace}", document.facts)
    return _of_runs(begun, document.runs, points, figure_tables(points))


def _of_runs(
    begun: Section, runs: Sequence[Run], points: Sequence[Point], tables: Iterable[Table], goal: float = GOAL
) -> Section:
    """`begun` with what its runs say; `goal` is the share of requests that shall meet the SLO."""
    conditions = (*begun.facts.conditions, *begun.conditions, *_load(runs))
    blocks = tuple(_blocks(points, tables, _slo(runs), goal))
    return replace(begun, conditions=conditions, blocks=blocks, notes=_notes(begun.notes, runs))


def _blocks(
    points: Sequence[Point], tables: Iterable[Table], slo_ms: Mapping[str, float], goal: float
) -> Iterator[Table | Picture]:
    """Pictures of load first, then figures, then where the time goes, then what failed: what the points have."""
    # what a gap may be: as the SLO says of the largest one, else of their mean
    limit_ms = slo_ms.get("itl", slo_ms.get("tpot"))
    if plot := lines.attainment(points, slo_ms, goal):
        yield Picture("attainment", "SLO attainment against rate", plot.draw)
    if plot := lines.latency(points, slo_ms):
        yield Picture("latency", "TTFT and ITL against rate", plot.draw)
    yield from tables
    if plot := lines.gaps(points, limit_ms):
        yield Picture("gaps", "Gaps between tokens", plot.draw)
    yield from (table for table in (breakdown_table(points), failure_table(points)) if table.rows)


def _described(target: MeasuredTarget) -> tuple[str, str]:
    pinning = f" [{', '.join(target.pinning)}]" if target.pinning else ""
    return target.name, f"{target.command or target.url}{pinning}"


def _load(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """What was asked and how it came, as far as it is the same for all runs."""
    first = runs[0].result
    every = {
        name: sorted({found for run in runs if isinstance(found := run.result.get(name), int)})
        for name in ("num_prompts", "seed")
    }
    found = {
        "model": first.get("model_id"),
        "workload": _common([part for run in runs if (part := run.part("dataset"))]),
        "arrival": _common([part for run in runs if (part := run.part("arrival"))]),
        "SLO": slo_in_words(_slo(runs)),
        "requests per run": every["num_prompts"],
        "concurrency at most": first.get("max_concurrency"),
        "seeds": every["seed"],
    }
    return [(name, text) for name, value in found.items() if (text := in_words(value))]


def _common(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all mappings have alike. A count of 0 says nothing and is left out."""
    alike = parts[0].items() if parts else ()
    return {
        key: value
        for key, value in alike
        if all(part.get(key) == value for part in parts) and (value != 0 or isinstance(value, bool))
    }


def in_words(value: Any) -> str:
    """A value of a JSON document on one line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{str(name).replace('_', ' ')} {in_words(inner)}" for name, inner in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(in_words, value))
    if isinstance(value, float):
        return f"{value:g}"
    return {True: "yes", False: "no", None: ""}[value] if value is None or isinstance(value, bool) else str(value)


def _slo(runs: Sequence[Run]) -> dict[str, float]:
    return {str(name): float(limit) for name, limit in runs[0].part("slo").items()}


def _notes(own: Sequence[str], runs: Sequence[Run]) -> tuple[str, ...]:
    """Notes of the file, then those of its runs: of a target's notes that differ in figures only, the first."""
    found: dict[tuple[str, str], list[str]] = {}
    for run in runs:
        for note in run.row("notes"):
            kind = re.sub(r"\d+(\.\d+)?", "#", str(note))
            found.setdefault((run.target, kind), []).append(f"{run.target}, {run.pace}: {note}")
    firsts = [f"{first} (and so in {len(others)} more runs)" if others else first for first, *others in found.values()]
    return (*own, *firsts)
