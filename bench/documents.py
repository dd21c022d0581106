"""Result files of every benchmark, read and checked, and how a long measurement keeps its file.

A file that is damaged, or of something else, is an `InvalidSetting` that names the file and the member. One is whole
after every save and is taken up again after an interruption. Does not know how anything is measured.
Invariant: whatever happens, the file is one that was complete.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from baton.bench.arguments import checked, parse_json, read_text, require_folder
from baton.bench.facts import Facts
from baton.bench.kv.measure import KvDocument
from baton.bench.limits.result import Ceiling
from baton.bench.limits.result import Ratio as LimitRatio
from baton.bench.runs import Rate, Ratio, Result, Run, as_json
from baton.wire.errors import InvalidSetting

_MAX_SHOWN = 300


@dataclass(slots=True)
class MeasuredTarget:
    """`pinning`: in earlier files, its processes with the cores that they could run on."""

    name: str
    command: str = ""
    url: str = ""
    pinning: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Session:
    """When a measurement was begun or gone on with, and what the machine was like."""

    time: str
    commit: str
    load_average: float


@dataclass(slots=True, kw_only=True)
class CompareDocument:
    """A result of `baton bench compare`. `ratios` follow from the runs."""

    kind: Literal["compare"] = "compare"
    facts: Facts
    targets: list[MeasuredTarget]
    rounds: int = 0
    arguments: list[str] = field(default_factory=list)
    sessions: list[Session] = field(default_factory=list)
    runs: list[Run]
    control_runs: list[Run] = field(default_factory=list)
    ratios: list[Ratio]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One rate: the share of requests that met the goals, and the result of its run."""

    rate: Rate
    attainment: float
    result: Result


@dataclass(slots=True, kw_only=True)
class Configuration(MeasuredTarget):
    """One configuration of a sweep; `goodput_rate` is None when no rate met the goals often enough."""

    points: list[SweepPoint]
    goodput_rate: float | None = None


@dataclass(slots=True, kw_only=True)
class SweepDocument:
    """A result of `baton bench sweep`. `slo` in ms, `attainment` the share of requests that have to meet it."""

    kind: Literal["sweep"] = "sweep"
    facts: Facts
    slo: dict[str, float]
    attainment: float
    configurations: list[Configuration]
    arguments: list[str] = field(default_factory=list)
    sessions: list[Session] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


_DocumentT = TypeVar("_DocumentT", CompareDocument, SweepDocument)


def begun(path: Path | None, fresh: _DocumentT, arguments: Sequence[str], *, is_resumed: bool) -> _DocumentT:
    """What the file holds so far, else `fresh`; this session is the last of its `sessions`.

    `arguments` say what is measured. Raises `InvalidSetting` for a file that holds something else or has no folder.
    """
    require_folder(path or "")
    fresh.arguments = list(arguments)
    document: _DocumentT = fresh
    if is_resumed and path is not None and path.exists():
        where, instead = f"--json {path}", "name another file, or begin anew with --no-resume"
        try:
            document = checked(type(fresh), parse_json(read_text(path, where), where), where)
        except InvalidSetting as error:
            raise InvalidSetting(f"{error}: {instead}") from None
        if document.arguments != fresh.arguments:
            changed = ", ".join(sorted({*document.arguments} ^ {*arguments}))
            raise InvalidSetting(f"{where} was measured with other settings ({changed:.{_MAX_SHOWN}}): {instead}")
    document.sessions.append(Session(fresh.facts.time, fresh.facts.commit, fresh.facts.load_average))
    return document


def save(path: Path | None, document: CompareDocument | SweepDocument) -> None:
    """Put `document` in the place of what is there, at once. Raises `InvalidSetting`."""
    if path is None:
        return
    beside = path.with_name(f"{path.name}.part")
    try:
        with beside.open("w", encoding="utf-8") as file:
            json.dump(as_json(document), file, allow_nan=False)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        raise InvalidSetting(f"--json {path}: {error.strerror}") from None


@dataclass(frozen=True, slots=True)
class ServeDocument:
    """A result of `baton bench serve`: one run."""

    facts: Facts
    runs: list[Run]


@dataclass(frozen=True, slots=True)
class LimitsDocument:
    """A result of `baton bench limits`; `failures` has a sentence for each part that failed."""

    kind: Literal["limits"] = field(default="limits", kw_only=True)
    facts: Facts
    setup: dict[str, Any] = field(default_factory=dict)
    ceilings: list[Ceiling] = field(default_factory=list)
    ratios: list[LimitRatio] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _ServedRun:
    """What has to be in a file of `baton bench serve` beside its figures."""

    facts: Facts
    model_id: str
    request_rate: Rate
    label: str | None = None
    backend: str | None = None


Document: TypeAlias = ServeDocument | CompareDocument | SweepDocument | LimitsDocument | KvDocument
_KINDS: dict[str, type[Any]] = {
    "compare": CompareDocument,
    "sweep": SweepDocument,
    "limits": LimitsDocument,
    "kv": KvDocument,
}


@dataclass(frozen=True, slots=True)
class ResultFile:
    """A file by its name without the ending."""

    name: str
    document: Document


def load_result(path: Path) -> ResultFile:
    """Read one result file of any kind. Raises `InvalidSetting`."""
    where = str(path)
    document = parse_json(read_text(path, where), where)
    if not isinstance(document, dict):
        raise InvalidSetting(f"{path}: this is no result of a benchmark: a map is expected")
    kind = str(document.get("kind"))
    if kind in _KINDS or "cases" in document:  # handoffs had no kind at first
        found: Document = checked(_KINDS.get(kind, KvDocument), document, where)
        if not getattr(found, "runs", True) or not getattr(found, "configurations", True):
            raise InvalidSetting(f"{path}: nothing was measured")
    elif "model_id" in document:
        found = served(document, where)
    else:
        said = "it has neither `kind` nor `model_id` nor `cases`"
        raise InvalidSetting(f"{path}: this is no result of a benchmark: {said}")
    return ResultFile(path.stem, found)


def served(document: dict[str, Any], where: str) -> ServeDocument:
    """What `baton bench serve` found, as its file has it. Raises `InvalidSetting`, which begins with `where`."""
    run = checked(_ServedRun, document, where)
    name = run.label if run.label and run.label != run.backend else run.model_id
    return ServeDocument(run.facts, [Run(name, 1, run.request_rate, checked(Result, document, where))])
