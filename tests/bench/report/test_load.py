from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest

from bench.report.load import load_result
from bench.report.results import CompareFile, KvFile, LimitsFile, RunFile, SweepFile, points_of
from tests.bench.report.samples import FACTS, PD, compare_result, limits_result, run_result, sweep_result
from wire.errors import InvalidSetting

KV = Path(__file__).parents[3] / "bench/results/kv-2core.json"


def written(folder: Path, document: Any) -> Path:
    path = folder / "result.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def small_compare() -> dict[str, Any]:
    return compare_result((1, 4), 3, num=5, detailed=False)


def test_a_run_is_its_model_at_its_rate(tmp_path: Path) -> None:
    file = load_result(written(tmp_path, run_result(PD, math.inf, 1, num=5)))
    assert isinstance(file, RunFile)
    assert [(run.target, run.rate, run.pace) for run in file.runs] == [("llama-32m", math.inf, "all at once")]
    assert file.facts.commit == FACTS["commit"]


def test_a_label_that_somebody_gave_is_the_name(tmp_path: Path) -> None:
    file = load_result(written(tmp_path, {**run_result(PD, 1, 1, num=5), "label": "mine"}))
    assert isinstance(file, RunFile)
    assert file.runs[0].target == "mine"


def test_appended_results_are_runs_of_one_file(tmp_path: Path) -> None:
    lines = "\n".join(json.dumps(run_result(PD, rate, 1, num=5)) for rate in (1, 2, 2))
    file = load_result(written(tmp_path, lines))
    assert isinstance(file, RunFile)
    assert [len(point.runs) for point in points_of(file.runs)] == [1, 2]


def test_repeats_are_rounds_and_the_middle_one_has_its_details(tmp_path: Path) -> None:
    results = [run_result(PD, 2, seed, num=5) for seed in (1, 2, 3)]
    nested = ("facts", "dataset", "breakdown", "client", "ttfts", "itls", "start_times")
    repeats = [{name: value for name, value in each.items() if name not in nested} for each in results]
    file = load_result(written(tmp_path, {**results[1], "repeats": repeats, "notes": ["the middle one"]}))
    assert isinstance(file, RunFile)
    assert [bool(run.row("itls")) for run in file.runs] == [False, True, False]
    (point,) = points_of(file.runs)
    assert point.values("p99_ttft_ms") == [each["p99_ttft_ms"] for each in results]


def test_a_comparison_has_points_of_all_rounds(tmp_path: Path) -> None:
    file = load_result(written(tmp_path, small_compare()))
    assert isinstance(file, CompareFile)
    assert [target.pinning for target in file.targets] == ["prefill: 0, decode: 1", "engine: 0, 1", ""]
    points = points_of(file.runs)
    assert [(point.target, point.rate, len(point.runs)) for point in points][:2] == [
        ("Baton P/D", 1, 3),
        ("Baton P/D", 4, 3),
    ]
    assert {ratio.metric for ratio in file.ratios} >= {"p50_ttft_ms", "p99_itl_ms"}
    assert file.runs[0].number("others_cpu_s") == 0.01


def test_sweeps_limits_and_handoffs_are_known_by_what_they_hold(tmp_path: Path) -> None:
    sweep = load_result(written(tmp_path, sweep_result()))
    assert isinstance(sweep, SweepFile)
    assert [each.goodput_rate for each in sweep.configurations] == [4.0, 0.5]
    limits = load_result(written(tmp_path, limits_result()))
    assert isinstance(limits, LimitsFile)
    assert [ratio.is_noisy for ratio in limits.ratios] == [False, False, True]
    handoffs = load_result(KV)
    assert isinstance(handoffs, KvFile)
    assert len(handoffs.results.cases) == 32


def test_zeros_of_a_run_without_answers_are_no_figures(tmp_path: Path) -> None:
    result = run_result(PD, 1, 1, num=5) | {"completed": 0, "failed": 5, "median_ttft_ms": 0.0, "p99_ttft_ms": 0.0}
    file = load_result(written(tmp_path, result))
    assert isinstance(file, RunFile)
    assert file.runs[0].number("p99_ttft_ms") is None
    assert file.runs[0].number("schedule_delay.p99_ms") == 1.4


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
        ("", "a map is expected"),
        ("{", "not JSON"),
        ("[]", "a map is expected"),
        ("3", "a map is expected"),
        ({"something": 1}, "neither"),
        ({"kind": "strange"}, "neither"),
        ({"kind": "compare"}, "targets is missing"),
        ({"kind": "sweep"}, "configurations is missing"),
        ({"kind": "limits"}, "facts is missing"),
        (without(run_result(PD, 1, 1, num=2), "facts"), "facts is missing"),
        (without(run_result(PD, 1, 1, num=2), "facts", "commit"), r"facts\.commit"),
        (without(small_compare(), "ratios"), "ratios is missing"),
        (without(small_compare(), "runs", 3, "result", "completed"), r"runs\[3\]\.result\.completed is missing"),
        (without(small_compare(), "ratios", 1, "verdict"), r"ratios\[1\]\.verdict is missing"),
        (small_compare() | {"runs": []}, "at least one run"),
        (small_compare() | {"targets": [{"name": "x", "url": "y"}]}, r"runs\[0\]\.target is not one of"),
        (run_result(PD, 1, 1, num=2) | {"request_rate": -1}, "request_rate is not a rate"),
        (run_result(PD, 1, 1, num=2) | {"completed": "all"}, "completed is not a number"),
        (run_result(PD, 1, 1, num=2) | {"completed": True}, "completed is not a number"),
        (limits_result() | {"ceilings": [3]}, r"ceilings\[0\] is not a map"),
    ],
)
def test_a_damaged_or_foreign_file_is_said_with_what_is_missing(tmp_path: Path, document: Any, said: str) -> None:
    path = written(tmp_path, document)
    with pytest.raises(InvalidSetting, match=said) as caught:
        load_result(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_or_no_text_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="No such file"):
        load_result(tmp_path / "none.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidSetting, match="not text"):
        load_result(tmp_path / "binary")
