from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.bench.documents import load_result
from baton.bench.numbers import median, number
from baton.bench.report.document import Section, Table
from baton.bench.report.sections import section_of
from baton.bench.report.tables import tone_of
from baton.bench.runs import Ratio
from tests.bench.report.samples import compare_result, sweep_result


def section(folder: Path, document: dict[str, Any]) -> Section:
    path = folder / "result.json"
    path.write_text(json.dumps(document))
    return section_of(load_result(path))


def row(table: Table, name: str) -> dict[str, Any]:
    cells = next(row for row in table.rows if row[0].text == name)
    return dict(zip(table.heads, cells, strict=True))


def test_a_comparison_has_a_table_for_each_rate_with_medians_ratios_and_verdicts(tmp_path: Path) -> None:
    document = compare_result((1, 4), 3, num=20, detailed=True)
    found = section(tmp_path, document)
    shown = found.tables["figures"]
    assert [table.title for table in shown] == ["1 request/s", "4 requests/s"]
    values = [
        run["result"]["p99_ttft_ms"] for run in document["runs"] if (run["target"], run["rate"]) == ("vLLM P/D", 4)
    ]
    cell = row(shown[1], "TTFT p99 (ms)")["vLLM P/D"]
    assert cell.text == number(median(values))
    assert cell.detail == f"{number(min(values))} to {number(max(values))}"
    ratio = row(shown[1], "TTFT p50 (ms)")["vLLM P/D / Baton P/D"]
    assert ratio.tone == "bad"
    assert ratio.detail.endswith("slower")
    assert list(found.pictures) == ["attainment", "latency", "gaps"]


@pytest.mark.parametrize(
    ("metric", "ratio", "is_clear", "tone"),
    [
        ("median_ttft_ms", 2.0, True, "bad"),
        ("median_ttft_ms", 0.5, True, "good"),
        ("output_throughput", 2.0, True, "good"),
        ("slo_attainment", 0.5, True, "bad"),
        ("p99_itl_ms", 0.5, False, "muted"),
    ],
)
def test_a_verdict_is_seen_from_the_first_named(metric: str, ratio: float, is_clear: bool, tone: str) -> None:
    found = Ratio(ratio, ratio, ratio, 0.1, is_clear, "", rate=1, target="a", against="b", metric=metric)
    assert tone_of(found) == tone


def test_notes_that_differ_in_figures_only_are_said_once(tmp_path: Path) -> None:
    document = compare_result((1,), 3)
    for count, run in enumerate(document["runs"][:4], start=1):
        run["result"]["notes"] = [f"the client was busy for {count}.5 s"]
    notes = section(tmp_path, document | {"notes": ["of the file"]}).notes
    assert notes[0] == "of the file"
    assert "Baton P/D, 1 request/s: the client was busy for 1.5 s (and so in 1 more runs)" in notes
    assert sum("Baton P/D" in note and "busy" in note for note in notes) == 1


def test_conditions_hold_what_has_to_be_said(tmp_path: Path) -> None:
    found = section(tmp_path, compare_result((1,), 3))
    said = dict(found.conditions)
    assert said["command"].startswith("baton bench compare")
    assert said["commit"] == "0123456789ab"
    assert "torch 2.13.0" in said["versions"]
    assert said["Baton P/D"] == "run Baton P/D [prefill: 0, decode: 1]"
    assert "length divisor 1" in said["workload"]
    assert said["SLO"] == "TTFT ≤ 500 ms, ITL ≤ 60 ms"
    assert said["seeds"] == "7, 14, 21"


def test_a_sweep_names_goodput_and_what_was_not_reached(tmp_path: Path) -> None:
    document = sweep_result()
    found = section(tmp_path, document)
    (table,) = found.tables["goodput"]
    assert [cells[1].text for cells in table.rows] == ["2", "below 1"]
    assert len(found.tables["points"][0].rows) == 4
