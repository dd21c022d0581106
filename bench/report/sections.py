"""One section for each kind of result file: which tables, pictures and conditions it has."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from bench.facts import Facts
from bench.kv.report import GLOSSARY, hop_in_words
from bench.kv.report import tables as kv_tables
from bench.plots.attainment import GOAL, slo_in_words
from bench.report.document import Card, Cell, Picture, Section, Table, words
from bench.report.limit_tables import ceiling_table, limit_table
from bench.report.numbers import number, percent, size, whole
from bench.report.pictures import picture_of_handoffs, pictures_of_runs
from bench.report.results import (
    CompareFile,
    KvFile,
    LimitsFile,
    Point,
    ResultFile,
    Run,
    RunFile,
    SweepFile,
    Target,
    points_of,
)
from bench.report.run_tables import breakdown_table, client_table, failure_table, figure_tables
from bench.report.sweep_tables import goodput_table, points_table


def section_of(file: ResultFile) -> Section:
    """Everything a file has to say."""
    match file:
        case CompareFile():
            return _compare(file)
        case SweepFile():
            return _sweep(file)
        case LimitsFile():
            return _limits(file)
        case KvFile():
            return _kv(file)
        case RunFile():
            return _runs(file)


def _compare(file: CompareFile) -> Section:
    points = points_of(file.runs, [target.name for target in file.targets])
    targets = " against ".join(target.name for target in file.targets)
    conditions = [("compared", targets), ("rounds", f"{file.num_rounds}, in turns")]
    conditions += [_described(target) for target in file.targets]
    return Section(
        name=file.name,
        kind="comparison",
        title=targets,
        facts=file.facts,
        conditions=(*_machine(file.facts), *conditions, *_load(file.runs)),
        blocks=tuple(_of_runs(points, figure_tables(points, file.ratios), _slo(file.runs))),
        cards=_cards(points),
        notes=_notes(file.notes, file.runs),
    )


def _sweep(file: SweepFile) -> Section:
    points = points_of(file.runs, [each.target.name for each in file.configurations])
    commands = [_described(each.target) for each in file.configurations]
    tables = [goodput_table(file.configurations, points), points_table(points)]
    return Section(
        name=file.name,
        kind="sweep",
        title=f"Goodput: the highest rate at which {percent(file.goal)} of requests meet {slo_in_words(file.slo)}",
        facts=file.facts,
        conditions=(*_machine(file.facts), *commands, *_load(file.runs)),
        blocks=tuple(_of_runs(points, tables, file.slo, file.goal)),
        notes=_notes(file.notes, file.runs),
    )


def _limits(file: LimitsFile) -> Section:
    return Section(
        name=file.name,
        kind="limits",
        title="What the machine can do, and how near Baton comes",
        facts=file.facts,
        conditions=(*_machine(file.facts), *((str(name), in_words(value)) for name, value in file.setup.items())),
        blocks=(limit_table(file.ratios), ceiling_table(file.ceilings)),
        notes=file.notes,
    )


def _kv(file: KvFile) -> Section:
    blocks: list[Table | Picture] = []
    for number_, (title, heads, rows) in enumerate(kv_tables(file.results)):
        cells = tuple((words(row[0]), *(Cell(text) for text in row[1:])) for row in rows)
        left = frozenset({"transport", "checksum", "block", "range", "note", "one core can"})
        note = {"Limits of this machine": hop_in_words(file.results.limits)}.get(title, "")
        blocks.append(
            Table(f"kv-{number_}", title, tuple(heads), cells, left, note or " ".join(GLOSSARY) * (not number_))
        )
    if file.results.cases:
        blocks.insert(0, picture_of_handoffs(file.results.cases))
    failed = [f"{name} failed: {reason}" for name, reason in file.results.failures.items()]
    missing = [f"{name} was not measured: {reason}" for name, reason in file.missing.items()]
    return Section(
        name=file.name,
        kind="KV handoffs",
        title="Handoffs of KV blocks between two processes",
        facts=file.facts,
        conditions=_machine(file.facts),
        blocks=tuple(blocks),
        notes=(*failed, *missing),
    )


def _runs(file: RunFile) -> Section:
    points = points_of(file.runs)
    return Section(
        name=file.name,
        kind="run" if len(file.runs) == 1 else "runs",
        title=", ".join(dict.fromkeys(f"{run.target} at {run.pace}" for run in file.runs)),
        facts=file.facts,
        conditions=(*_machine(file.facts), *_load(file.runs)),
        blocks=tuple(_of_runs(points, figure_tables(points), _slo(file.runs))),
        cards=_cards(points),
        notes=_notes((), file.runs),
    )


def _of_runs(
    points: Sequence[Point], tables: Iterable[Table], slo_ms: Mapping[str, float], goal: float = GOAL
) -> Iterator[Table | Picture]:
    """Pictures of load first, then figures, then where the time goes, then what makes all that trustworthy."""
    pictures = {picture.name: picture for picture in pictures_of_runs(points, slo_ms, goal)}
    yield from (pictures.pop(name) for name in ("attainment", "latency") if name in pictures)
    yield from tables
    yield from (pictures.pop(name) for name in ("gaps", "stack") if name in pictures)
    yield from (table for table in (breakdown_table(points),) if table)
    yield from pictures.values()
    yield from (table for table in (failure_table(points), client_table(points)) if table)


def _described(target: Target) -> tuple[str, str]:
    return target.name, f"{target.command}{f' [{target.pinning}]' if target.pinning else ''}"


def _machine(facts: Facts) -> tuple[tuple[str, str], ...]:
    return (
        ("command", facts.command),
        ("commit", facts.commit or "unknown"),
        ("date", facts.time),
        (
            "machine",
            f"{facts.cpu_model or 'unknown processor'}, {whole(facts.num_cores)} cores, {size(facts.memory_bytes)}, "
            f"{facts.kernel}, load average before {number(facts.load_average)}",
        ),
        ("ran on cores", ", ".join(map(str, facts.cores))),
        ("versions", ", ".join(f"{name} {version}" for name, version in facts.versions.items())),
    )


def _load(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """What was asked and how it came, as far as it is the same for all runs."""
    first = runs[0]
    found = [
        ("model", first.figures.get("model_id")),
        ("workload", _shared(runs, "dataset")),
        ("arrival", _shared(runs, "arrival")),
        ("SLO", slo_in_words(_slo(runs))),
        (
            "requests per run",
            sorted({count for run in runs if isinstance(count := run.figures.get("num_prompts"), int)}),
        ),
        ("concurrency at most", first.figures.get("max_concurrency")),
        ("seeds", sorted({seed for run in runs if isinstance(seed := run.figures.get("seed"), int)})),
    ]
    return [(name, text) for name, value in found if (text := in_words(value))]


def _shared(runs: Sequence[Run], name: str) -> dict[str, Any]:
    """Of a member of every run what is the same in all, without the rest (seeds, rates, totals)."""
    return _common([part for run in runs if (part := run.part(name))])


def _common(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all mappings have alike, inner mappings entry by entry. A count of 0 says nothing and is left out."""
    found: dict[str, Any] = {}
    for key, value in parts[0].items() if parts else ():
        others = [part.get(key) for part in parts]
        if isinstance(value, Mapping) and all(isinstance(other, Mapping) for other in others):
            if inner := _common(cast("list[Mapping[str, Any]]", others)):
                found[key] = inner
        elif all(other == value for other in others) and (value != 0 or isinstance(value, bool)):
            found[key] = value
    return found


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


MAX_OTHERS_SHARE = 0.05
"""Above this share of a core the other targets are said to have disturbed a run."""


def _notes(own: Sequence[str], runs: Sequence[Run]) -> tuple[str, ...]:
    """Notes of the file, then those of its runs: of a target's notes that differ in figures only, the first."""
    found: dict[tuple[str, str], list[str]] = {}
    for run in runs:
        others_s, duration_s = run.number("others_cpu_s") or 0.0, run.number("duration") or 0.0
        is_disturbed = others_s > MAX_OTHERS_SHARE * duration_s
        for note in [*run.row("notes"), *(["meanwhile the other targets used more than 5 % of a core"] * is_disturbed)]:
            kind = re.sub(r"\d+(\.\d+)?", "#", str(note))
            found.setdefault((run.target, kind), []).append(f"{run.target}, {run.pace}: {note}")
    firsts = [f"{first} (and so in {len(others)} more runs)" if others else first for first, *others in found.values()]
    return (*own, *firsts)


def _cards(points: Sequence[Point]) -> tuple[Card, ...]:
    """One for each target: goodput of the measured rates where there is an SLO, else its median TTFT."""
    return tuple(
        _card(target, [point for point in points if point.target == target])
        for target in dict.fromkeys(point.target for point in points)
    )


def _card(target: str, points: Sequence[Point]) -> Card:
    shown = (points[0], points[-1]) if len(points) > 1 else (points[0],)

    def line(label: str, name: str, form: Callable[[float | None], str], unit: str) -> str:
        return f"{label} {' → '.join(form(point.middle(name)) for point in shown)} {unit}"

    reach = " → ".join(f"{point.rate:g}" for point in shown)
    lines = (
        f"from the lowest to the highest rate, {reach} requests/s:" if len(shown) > 1 else "",
        line("median TTFT", "p50_ttft_ms", number, "ms"),
        line("p99 ITL", "p99_itl_ms", number, "ms"),
        line("output", "output_throughput", number, "tokens/s"),
    )
    attained = [point for point in points if point.middle("slo_attainment") is not None]
    if attained:
        good = [point.rate for point in attained if (point.middle("slo_attainment") or 0.0) >= GOAL]
        value = f"{max(good):g}" if good else f"< {attained[0].rate:g}"
        unit = f"requests/s: highest measured rate at which {percent(GOAL)} meet the SLO"
        return Card(target, value, unit, tuple(filter(None, lines)))
    return Card(target, number(points[0].middle("p50_ttft_ms")), "ms median TTFT", tuple(filter(None, lines)))
