from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest

from baton.bench.documents import CompareDocument, LimitsDocument, ServeDocument, SweepDocument, load_result
from baton.bench.kv.measure import KvDocument
from baton.bench.report.sections import section_of
from baton.bench.runs import Run
from baton.wire.errors import InvalidSetting
from tests.bench.report.samples import HANDOFFS, LIMITS, OF_A_TRACE, RESULTS, SWEEP, published, run_result


def written(folder: Path, document: Any) -> Path:
    path = folder / "result.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def runs_in(folder: Path, document: Any) -> list[Run]:
    found = load_result(written(folder, document)).document
    assert isinstance(found, ServeDocument)
    return found.runs


def test_a_run_is_called_by_its_label_if_somebody_gave_one_else_by_its_model(tmp_path: Path) -> None:
    result = run_result() | {"request_rate": "inf"}
    (run,) = runs_in(tmp_path, result)
    assert (run.target, run.rate, run.pace) == ("models/llama-32m", math.inf, "all at once")
    assert runs_in(tmp_path, {**result, "label": "mine"})[0].target == "mine"


KINDS: dict[str, type[Any]] = {SWEEP: SweepDocument, HANDOFFS: KvDocument, LIMITS: LimitsDocument}


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_every_published_file_is_known_by_what_it_holds_and_has_its_tables(path: Path) -> None:
    file = load_result(path)
    assert (file.name, type(file.document)) == (path.stem, KINDS.get(path.stem, CompareDocument))
    assert section_of(file).tables


def test_zeros_of_a_run_without_answers_are_no_figures(tmp_path: Path) -> None:
    result = run_result() | {"completed": 0, "failed": 5, "median_ttft_ms": 0.0, "p99_ttft_ms": 0.0}
    (run,) = runs_in(tmp_path, result)
    assert run.number("p99_ttft_ms") is None
    assert run.number("schedule_delay.p99_ms") == result["schedule_delay"]["p99_ms"]


def without(document: dict[str, Any], *way: str | int) -> dict[str, Any]:
    document = copy.deepcopy(document)
    found: Any = document
    for step in way[:-1]:
        found = found[step]
    del found[way[-1]]
    return document


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ("{", "not JSON"),
        ("3", "a map is expected"),
        ({"kind": "strange"}, "neither"),
        ({"kind": "sweep"} | {"facts": 3}, "facts: .*found 3"),
        (without(run_result(), "facts", "commit"), r"facts\.commit: Field required"),
        (without(published(OF_A_TRACE), "ratios"), "ratios: Field required"),
        (without(published(OF_A_TRACE), "runs", 2, "result", "completed"), r"runs\.2\.result.*completed is missing"),
        (without(published(OF_A_TRACE), "ratios", 1, "verdict"), r"ratios\.1\.verdict: Field required"),
        (published(OF_A_TRACE) | {"runs": []}, "nothing was measured"),
        (published(SWEEP) | {"configurations": []}, "nothing was measured"),
        (run_result() | {"request_rate": -1}, "request_rate: .*greater than 0"),
        (run_result() | {"completed": True}, "completed is missing or no number"),
        (published(LIMITS) | {"ceilings": [3]}, r"ceilings\.0: "),
    ],
)
def test_a_damaged_or_foreign_file_is_said_with_what_is_missing(tmp_path: Path, document: Any, said: str) -> None:
    path = written(tmp_path, document)
    with pytest.raises(InvalidSetting, match=said) as caught:
        load_result(path)
    assert str(path) in str(caught.value)
