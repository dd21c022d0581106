from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.bench.documents import load_result
from baton.bench.numbers import median, number
from baton.bench.report.document import Section, Table
from baton.bench.report.sections import section_of
from tests.bench.report.samples import PD, compare_result, limits_result, run_result, sweep_result


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
    assert list(found.pictures) == ["attainment", "latency", "gaps", "stack", "timeline"]


def test_a_round_without_details_leaves_the_pictures_to_the_others(tmp_path: Path) -> None:
    document = compare_result((1, 4), 2, detailed=True)
    for run in document["runs"]:
        if run["round"] == 1:
            run["result"] = {name: value for name, value in run["result"].items() if name not in ("itls", "ttfts")}
    assert list(section(tmp_path, document).pictures) == ["attainment", "latency", "gaps", "stack", "timeline"]


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
def test_a_verdict_is_seen_from_the_first_named(
    tmp_path: Path, metric: str, ratio: float, is_clear: bool, tone: str
) -> None:
    document = compare_result((1,), 3)
    entry = {"rate": 1, "target": "vLLM P/D", "against": "Baton P/D", "metric": metric, "ratio": ratio, "low": ratio}
    entry |= {"high": ratio, "noise": 0.1, "is_clear": is_clear, "verdict": "no verdict: the rounds disagree"}
    (table,) = section(tmp_path, document | {"ratios": [entry]}).tables["figures"]
    (cell,) = [cells[-1] for cells in table.rows if cells[-1].text]
    assert cell.tone == tone
    assert ("no verdict: the rounds disagree" in cell.detail) == (not is_clear)


def test_targets_come_in_the_order_of_the_command_not_of_the_first_round(tmp_path: Path) -> None:
    document = compare_result((1,), 3)
    document["runs"].reverse()
    (table,) = section(tmp_path, document).tables["figures"]
    assert table.heads[1:4] == ("Baton P/D", "Baton colocated", "vLLM P/D")


def test_failures_are_counted_by_reason_over_all_rounds(tmp_path: Path) -> None:
    document = compare_result((1,), 3)
    for run in document["runs"]:
        if run["target"] == "vLLM P/D":
            run["result"] |= {
                "failed": 2,
                "failures": {"http error": 2},
                "failure_messages": ["http error: status 500"],
            }
    found = section(tmp_path, document)
    (failures,) = found.tables["failures"]
    assert [cell.text for cell in failures.rows[0]] == ["vLLM P/D, 1/s", "http error", "6", "status 500"]
    assert row(found.tables["figures"][0], "failed requests")["vLLM P/D"].text == "6 of 21"


def test_notes_that_differ_in_figures_only_are_said_once(tmp_path: Path) -> None:
    document = compare_result((1,), 3)
    for count, run in enumerate(document["runs"][:4], start=1):
        run["result"]["notes"] = [f"the client was busy for {count}.5 s"]
    document["runs"][0]["others_cpu_s"] = 1000.0
    notes = section(tmp_path, document | {"notes": ["of the file"]}).notes
    assert notes[0] == "of the file"
    assert "Baton P/D, 1 request/s: the client was busy for 1.5 s (and so in 1 more runs)" in notes
    assert sum("Baton P/D" in note and "busy" in note for note in notes) == 1
    assert any("other targets used more than 5 %" in note for note in notes)


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


def test_cards_say_the_highest_rate_that_meets_the_slo(tmp_path: Path) -> None:
    document = compare_result((1, 2, 4), 1)
    shares = {("Baton P/D", 1): 1.0, ("Baton P/D", 2): 0.9, ("Baton P/D", 4): 0.89}
    for run in document["runs"]:
        run["result"]["slo_attainment"] = shares.get((run["target"], run["rate"]), 0.1)
    assert [card.value for card in section(tmp_path, document).cards] == ["2", "< 1", "< 1"]


def test_a_sweep_names_goodput_and_what_was_not_reached(tmp_path: Path) -> None:
    document = sweep_result()
    found = section(tmp_path, document)
    (table,) = found.tables["goodput"]
    assert [cells[1].text for cells in table.rows] == ["2", "below 1"]
    assert len(found.tables["points"][0].rows) == 4


def test_a_noisy_ratio_to_the_machine_has_no_value(tmp_path: Path) -> None:
    document = limits_result()
    (table,) = section(tmp_path, document).tables["ratios"]
    assert row(table, "prefill_flop_ratio")["found"].text == "noisy"
    assert row(table, "kv_bw_ratio")["found"].text == "0.66"
    assert row(table, "kv_bw_ratio")["range of pairs"].text == "0.60 to 0.81"


def test_a_run_alone_has_no_range_and_no_picture_over_rates(tmp_path: Path) -> None:
    found = section(tmp_path, run_result(PD, 2, 1, num=5))
    (table,) = found.tables["figures"]
    assert not any(cell.detail for cells in table.rows for cell in cells)
    assert list(found.pictures) == ["gaps", "stack", "timeline"]


def test_handoffs_bring_their_tables_and_picture() -> None:
    found = section_of(load_result(Path(__file__).parents[3] / "bench/results/kv-2core.json"))
    assert list(found.pictures) == ["transfer"]
    assert found.tables["kv-0"][0].rows[0][0].text == "shm"
    assert "to the other core" in found.tables["kv-3"][0].note


def test_a_workload_is_described_by_what_all_loads_have_alike(tmp_path: Path) -> None:
    document = compare_result((1,), 3)
    for place, run in enumerate(document["runs"]):
        run["result"]["dataset"] = {
            "name": "random",
            "input_tokens": {"mean": 512.0, "total": place},
            "prefix_tokens": 0,
        }
    said = dict(section(tmp_path, document).conditions)
    assert said["workload"] == "name random, input tokens mean 512"
