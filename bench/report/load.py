"""Result files of every benchmark, read and checked.

Owns what has to be in a file before anything is drawn from it. A file that is damaged, or of something else, is an
`InvalidSetting` that names the file and the member.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.report.load_machine import facts_of, handoffs_of, joined, limits_of
from bench.report.reader import Reader
from bench.report.results import (
    CompareFile,
    Configuration,
    Ratio,
    ResultFile,
    Run,
    RunFile,
    SweepFile,
    Target,
)
from wire.errors import InvalidSetting


def load_result(path: Path) -> ResultFile:
    """Read one result file of any kind. Raises `InvalidSetting`."""
    documents = [Reader(str(path), "", document) for document in _documents(path)]
    first = documents[0]
    kind = first.members.get("kind")
    if kind == "compare":
        return _compare(path.stem, first)
    if kind == "sweep":
        return _sweep(path.stem, first)
    if kind == "limits":
        return limits_of(path.stem, first)
    if "cases" in first.members and "small_cases" in first.members:
        return handoffs_of(path.stem, first)
    if "model_id" in first.members:
        return RunFile(
            path.stem, facts_of(first.child("facts")), tuple(run for document in documents for run in _runs(document))
        )
    raise InvalidSetting(f"{path}: this is no result of a benchmark: it has neither `kind` nor `model_id` nor `cases`")


def _documents(path: Path) -> list[dict[str, Any]]:
    """The maps of a file: one, or one a line as `--append-result` writes them."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSetting(f"{path}: {getattr(error, 'strerror', None) or 'this is not text'}") from None
    try:
        found = [json.loads(text)]
    except ValueError as error:
        try:
            found = [json.loads(line) for line in text.splitlines() if line.strip()]
        except ValueError:
            raise InvalidSetting(f"{path}: this is not JSON ({error})") from None
    if len(found) == 1 and isinstance(found[0], list):
        found = found[0]
    if not found or not all(isinstance(document, dict) for document in found):
        raise InvalidSetting(f"{path}: this is no result of a benchmark: a map is expected")
    return found


_NEEDED = ("completed", "failed", "duration", "output_throughput")
_FAMILIES = ("ttft", "tpot", "itl", "e2el", "max_itl", "ttst")


def _figures(reader: Reader) -> dict[str, Any]:
    """The whole result; the 50th percentile goes by the name of a percentile, however it is called in the file."""
    for name in _NEEDED:
        reader.number(name)
    found = dict(reader.members)
    for family in _FAMILIES:
        if f"median_{family}_ms" in found:
            found.setdefault(_metric(f"median_{family}_ms"), found[f"median_{family}_ms"])
    if "p50_ttft_ms" not in found:
        raise reader.missing("median_ttft_ms")
    if not found["completed"]:  # without an answer statistics are 0, which nobody measured
        names = tuple(f"_{family}_ms" for family in _FAMILIES)
        found = {name: value for name, value in found.items() if not name.endswith(names)}
    return found


def _metric(name: str) -> str:
    return f"p50_{name.removeprefix('median_')}" if name.startswith("median_") else name


def _runs(reader: Reader) -> list[Run]:
    """The repeats where there are some: the middle one, whose details the file has, is the file itself."""
    label = reader.text_or("label")
    name = label if label and label != reader.text_or("backend") else reader.text("model_id")
    rate, whole = reader.rate("request_rate"), _figures(reader)
    if not reader.members.get("repeats"):
        return [Run(name, rate, 0, whole)]
    repeats = [_figures(repeat) for repeat in reader.children("repeats")]
    middle = next(
        (each for each in repeats if all(whole.get(key) == each[key] for key in each if key != "notes")), None
    )
    return [Run(name, rate, number, whole if repeat is middle else repeat) for number, repeat in enumerate(repeats)]


def _compare(name: str, reader: Reader) -> CompareFile:
    targets = tuple(_target(target) for target in reader.children("targets"))
    known = {target.name for target in targets}
    runs = []
    for run in reader.children("runs"):
        if run.text("target") not in known:
            raise run.wrong("target", f"one of the targets {', '.join(sorted(known))}")
        cpu = {name: run.members[name] for name in ("cpu_s", "others_cpu_s") if name in run.members}
        figures = _figures(run.child("result")) | cpu
        runs.append(Run(run.text("target"), run.rate("rate"), int(run.number("round")), figures))
    if not runs:
        raise reader.wrong("runs", "a list with at least one run")
    return CompareFile(
        name=name,
        facts=facts_of(reader.child("facts")),
        targets=targets,
        num_rounds=len({run.round for run in runs}),
        runs=tuple(runs),
        ratios=tuple(_ratio(ratio) for ratio in reader.children("ratios")),
        notes=reader.texts("notes"),
    )


def _target(reader: Reader) -> Target:
    pinning = reader.members.get("pinning")
    return Target(
        name=reader.text("name"),
        command=reader.text_or("command") or reader.text_or("url"),
        pinning=joined(pinning),
    )


def _ratio(reader: Reader) -> Ratio:
    return Ratio(
        rate=reader.rate("rate"),
        target=reader.text("target"),
        against=reader.text("against"),
        metric=_metric(reader.text("metric")),
        ratio=reader.number("ratio"),
        low=reader.number("low"),
        high=reader.number("high"),
        noise=reader.number_or_none("noise"),
        is_clear=reader.members.get("is_clear") is True,
        verdict=reader.text("verdict"),
    )


def _sweep(name: str, reader: Reader) -> SweepFile:
    configurations, runs = [], []
    for found in reader.children("configurations"):
        target = _target(found)
        configurations.append(Configuration(target, found.number_or_none("goodput_rate")))
        for number, point in enumerate(found.children("points")):
            attained = {"slo_attainment": point.number("attainment"), "attainments": point.members.get("attainments")}
            runs.append(Run(target.name, point.rate("rate"), number, _figures(point.child("result")) | attained))
    if not configurations:
        raise reader.wrong("configurations", "a list with at least one configuration")
    slo = reader.child("slo")
    return SweepFile(
        name=name,
        facts=facts_of(reader.child("facts")),
        slo={metric: slo.number(metric) for metric in slo.members},
        goal=reader.number("attainment"),
        configurations=tuple(configurations),
        runs=tuple(runs),
        notes=reader.texts("notes"),
    )
