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
from tests.bench.report.samples import COMPARISON, OF_A_TRACE, SWEEP, published


def section(folder: Path, document: dict[str, Any]) -> Section:
    path = folder / "result.json"
    path.write_text(json.dumps(document))
    return section_of(load_result(path))


def row(table: Table, name: str) -> dict[str, Any]:
    cells = next(row for row in table.rows if row[0].text == name)
    return dict(zip(table.heads, cells, strict=True))


def test_a_comparison_has_a_table_for_each_rate_with_medians_ratios_and_verdicts(tmp_path: Path) -> None:
    document = published(COMPARISON)
    found = section(tmp_path, document)
    shown = found.tables["figures"]
    assert [table.title for table in shown] == ["1 request/s", "2 requests/s", "4 requests/s", "6 requests/s"]
    values = [
        run["result"]["p99_ttft_ms"] for run in document["runs"] if (run["target"], run["rate"]) == ("vllm-pd", 4)
    ]
    cell = row(shown[2], "TTFT p99 (ms)")["vllm-pd"]
    assert cell.text == number(median(values))
    assert cell.detail == f"{number(min(values))} to {number(max(values))}"
    ratio = row(shown[2], "TTFT p50 (ms)")["vllm-pd / baton-pd"]
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
    document = published(OF_A_TRACE)
    for run in document["runs"]:
        run["result"]["notes"] = [f"the client was busy for {run['round']}.5 s"] * (run["target"] == "one")
    assert section(tmp_path, document | {"notes": ["of the file"]}).notes == (
        "of the file",
        "one, as the trace says: the client was busy for 1.5 s (and so in 2 more runs)",
    )


def test_conditions_hold_what_has_to_be_said(tmp_path: Path) -> None:
    said = dict(section(tmp_path, published(OF_A_TRACE)).conditions)
    assert said["command"].startswith("baton bench compare")
    assert said["commit"] == "6c66812d6c47"
    assert "torch 2.13.0" in said["versions"]
    assert said["one"].startswith("baton serve models/llama-32m --prefill 0 [python baton serve on 0,1, ")
    assert "length divisor 32" in said["workload"]
    assert said["SLO"] == "TTFT ≤ 2000 ms, TPOT ≤ 50 ms"
    assert said["seeds"] == "1000, 2000, 3000"


def test_a_sweep_names_goodput_and_what_was_not_reached(tmp_path: Path) -> None:
    found = section(tmp_path, published(SWEEP))
    (table,) = found.tables["goodput"]
    assert [cells[1].text for cells in table.rows] == ["6"] * 3 + ["below 6"] * 4
    assert len(found.tables["points"][0].rows) == 7
