from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench.serve.files import prepare_folder, result_path, write_result

from bench.serve.settings import ServeBenchSettings
from wire.errors import InvalidSetting

RESULT = {"label": "openai", "model_id": "owner/tiny/", "date": "20260102-030405"}


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


def test_a_label_with_a_slash_makes_no_folder() -> None:
    path = result_path(ServeBenchSettings(save_result=True), {**RESULT, "label": "a/b"})
    assert path is not None
    assert path.parent == Path()


def test_nothing_is_written_unasked() -> None:
    assert result_path(ServeBenchSettings(result_dir="out"), RESULT) is None


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
