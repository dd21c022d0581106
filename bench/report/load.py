"""Result files of every benchmark, read and checked.

A file that is damaged, or of something else, is an `InvalidSetting` that names the file and the member.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from bench.arguments import checked, read_text
from bench.documents import CompareDocument, SweepDocument
from bench.facts import Facts
from bench.kv.measure import Results
from bench.limits.result import Ceiling, Ratio
from bench.runs import Rate, Result, Run
from wire.errors import InvalidSetting


@dataclass(frozen=True, slots=True)
class ServeDocument:
    """Results of `baton bench serve`: one run, or several that were appended to one file."""

    facts: Facts
    runs: list[Run]


@dataclass(frozen=True, slots=True)
class LimitsDocument:
    """A result of `baton bench limits`."""

    facts: Facts
    ceilings: list[Ceiling]
    ratios: list[Ratio]
    setup: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvDocument(Results):
    """A result of `baton bench kv`; `missing` says why a transport was not measured."""

    facts: Facts
    missing: dict[str, str]


@dataclass(frozen=True, slots=True)
class _ServedRun:
    """What has to be in a file of `baton bench serve` beside its figures."""

    facts: Facts
    model_id: str
    request_rate: Rate
    label: str | None = None
    backend: str | None = None
    repeats: list[Result] | None = None


Document: TypeAlias = ServeDocument | CompareDocument | SweepDocument | LimitsDocument | KvDocument
_KINDS: dict[str, type[Any]] = {"compare": CompareDocument, "sweep": SweepDocument, "limits": LimitsDocument}


@dataclass(frozen=True, slots=True)
class ResultFile:
    """A file by its name without the ending."""

    name: str
    document: Document


def load_result(path: Path) -> ResultFile:
    """Read one result file of any kind. Raises `InvalidSetting`."""
    where, entries = str(path), _entries(path)
    document, kind = entries[0], str(entries[0].get("kind"))
    if kind in _KINDS or ("cases" in document and "small_cases" in document):
        found: Document = checked(_KINDS.get(kind, KvDocument), document, where)
        if not getattr(found, "runs", True) or not getattr(found, "configurations", True):
            raise InvalidSetting(f"{path}: nothing was measured")
    elif "model_id" in document:
        facts = checked(_ServedRun, document, where).facts
        found = ServeDocument(facts, [run for entry in entries for run in _runs(entry, where)])
    else:
        said = "it has neither `kind` nor `model_id` nor `cases`"
        raise InvalidSetting(f"{path}: this is no result of a benchmark: {said}")
    return ResultFile(path.stem, found)


def _entries(path: Path) -> list[dict[str, Any]]:
    """The maps of a file: one, or one a line as `--append-result` writes them."""
    text = read_text(path, str(path))
    try:
        found = [json.loads(text)]
    except ValueError as error:
        try:
            found = [json.loads(line) for line in text.splitlines() if line.strip()]
        except ValueError:
            raise InvalidSetting(f"{path}: this is not JSON ({error})") from None
    found = found[0] if isinstance(found[0], list) else found
    if not found or not all(isinstance(document, dict) for document in found):
        raise InvalidSetting(f"{path}: this is no result of a benchmark: a map is expected")
    return found


def _runs(entry: dict[str, Any], where: str) -> list[Run]:
    """The repeats where there are some: the middle one, whose details the file has, is the file itself."""
    served = checked(_ServedRun, entry, where)
    name = served.label if served.label and served.label != served.backend else served.model_id
    repeats = served.repeats or [entry]
    alike = [all(entry.get(key) == value for key, value in each.items() if key != "notes") for each in repeats]
    return [
        Run(name, number, served.request_rate, checked(Result, entry if is_alike else each, where))
        for number, (each, is_alike) in enumerate(zip(repeats, alike, strict=True), start=1)
    ]
