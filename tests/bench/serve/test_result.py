from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from baton.bench.client.outcome import Failure
from baton.bench.serve.result import as_json, middle_of, prepare_folder, report, result_path, write_result
from baton.bench.serve.settings import ServeBenchSettings
from baton.wire.errors import InvalidSetting
from tests.bench.serve.outcomes import answered, failed
from tests.bench.serve.results import result_of

RESULT = {"label": "openai", "model_id": "owner/tiny/", "date": "20260102-030405"}
DETAILS = {"input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors"}
OUTCOMES = (answered([0.1, 0.25], sent_s=7.0, scheduled_s=6.5), failed(Failure.HTTP_ERROR, "503: busy", sent_s=8.0))


def test_details_are_only_there_when_asked_for() -> None:
    result = result_of(OUTCOMES, breakdown={"num_requests": 1, "requests": [{"index": 0}]})
    assert not as_json(result, detailed=False).keys() & DETAILS
    assert as_json(result, detailed=False)["breakdown"] == {"num_requests": 1}
    detailed = as_json(result, detailed=True)
    assert detailed.keys() >= DETAILS
    assert detailed["breakdown"]["requests"] == [{"index": 0}]
    assert json.loads(json.dumps(detailed)) == detailed


def test_lists_have_one_entry_per_request_failed_ones_too() -> None:
    found = as_json(result_of(OUTCOMES), detailed=True)
    assert found["ttfts"] == [0.1, 0.0]
    assert found["itls"] == [[0.15], []]
    assert found["latencies"] == [0.25, 0.0]
    assert found["start_times"] == [7.0, 8.0]
    assert found["queue_times"] == [0.5, 0.0]
    assert found["output_lens"] == [2, 0]
    assert found["generated_texts"] == ["xx", ""]
    assert found["errors"] == ["", "http error: 503: busy"]


def test_of_several_runs_the_middle_one_is_reported_with_the_range_of_all() -> None:
    results = [
        result_of([answered([first_s, first_s + 0.1])], seed=seed) for seed, first_s in enumerate((0.3, 0.1, 0.2))
    ]
    found = middle_of(results).summary
    assert found["seed"] == 2
    assert found["mean_ttft_ms"] == 200.0
    assert found["range"]["mean_ttft_ms"] == {"low": 100.0, "high": 300.0}
    assert [each["mean_ttft_ms"] for each in found["repeats"]] == [300.0, 100.0, 200.0]
    assert "repeat 3 of 3" in found["notes"][0]
    text = report(found, ("ttft",), (99.0,))
    assert re.search(r"^-+3 Repeats-+$", text, re.MULTILINE)
    assert re.search(r"^Range of median TTFT \(ms\):\s+100\.00 to 300\.00$", text, re.MULTILINE)
    assert len(re.findall(r"^Median TTFT \(ms\):", text, re.MULTILINE)) == 1


def test_a_run_in_which_all_failed_is_the_last_choice_and_in_no_range() -> None:
    results = [result_of([failed(Failure.STALLED)]), result_of([answered([0.2])]), result_of([answered([0.4])])]
    found = middle_of(results).summary
    assert found["mean_ttft_ms"] == 400.0
    assert found["range"]["mean_ttft_ms"] == {"low": 200.0, "high": 400.0}


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"request_rate": 4.0}, "openai-4.0qps-tiny-20260102-030405.json"),
        ({"max_concurrency": 8}, "openai-infqps-concurrency8-tiny-20260102-030405.json"),
        (
            {"ramp_up_strategy": "linear", "ramp_up_start_rps": 1.0, "ramp_up_end_rps": 5.0},
            "openai-ramp-up-linear-1.0qps-5.0qps-tiny-20260102-030405.json",
        ),
        ({"result_filename": "mine.json", "result_dir": "out"}, "out/mine.json"),
        ({"save_result": False, "append_result": True, "result_filename": "all.jsonl"}, "all.jsonl"),
    ],
)
def test_a_file_is_named_as_by_vllm(changes: dict[str, Any], name: str) -> None:
    assert result_path(ServeBenchSettings(**{"save_result": True, **changes}), RESULT) == Path(name)


def test_a_file_is_written_anew_or_gets_one_more_line(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_result(path, {"old": 1}, is_appended=False)
    write_result(path, {"run": 1}, is_appended=False)
    assert json.loads(path.read_text()) == {"run": 1}
    lines = tmp_path / "all.jsonl"
    for run in range(3):
        write_result(lines, {"run": run}, is_appended=True)
    assert [json.loads(line) for line in lines.read_text().splitlines()] == [{"run": 0}, {"run": 1}, {"run": 2}]


def test_the_folder_is_made_before_there_is_a_result(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    prepare_folder(ServeBenchSettings(result_dir=str(folder)))
    assert not folder.exists()
    prepare_folder(ServeBenchSettings(result_dir=str(folder), save_result=True))
    assert folder.is_dir()


def test_a_folder_or_file_that_cannot_be_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidSetting, match="--result-dir"):
        prepare_folder(ServeBenchSettings(result_dir=str(tmp_path / "file"), save_result=True))
    with pytest.raises(InvalidSetting, match="--result-filename"):
        write_result(tmp_path / "nowhere" / "x.json", {}, is_appended=False)
