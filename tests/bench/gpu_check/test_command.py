"""The command with a measurement that says what it is told to; the real ones run without a GPU in `test_measures`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from baton.bench.gpu_check import command
from baton.bench.gpu_check.command import TESTS, TOTAL_S, Group, GroupResult, GroupRun, all_groups, main
from baton.bench.gpu_check.rows import Verdict, failed_row, speed_row
from baton.wire.errors import InvalidSetting

SMI = "NVIDIA H200, 580.159.04, 1980 MHz, 3201 MHz, 1980 MHz, 3201 MHz, 700.00 W, 41\n\n"


def test_a_run_prints_a_table_and_writes_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = (speed_row("step", "8B", 4.0, "ms", bound=3.0, target=4.0), failed_row("step", "0.6B", "it hung"))
    monkeypatch.setattr(GroupRun, "run", lambda self, say: GroupResult(Group("decode", "steps", 45), rows, 1.0, 135.0))
    monkeypatch.setattr(command, "_describe_device", lambda device: {"device": "a GPU", "num_gpus": 1})
    answer = subprocess.CompletedProcess([], 0, SMI)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    file = tmp_path / "result.json"
    assert main(["--only", "decode", "--json", str(file)]) == 1
    content = json.loads(file.read_text())
    assert list(content) == ["facts", "device", "clocks", "status", "groups"]
    assert content["device"] == {"device": "a GPU", "num_gpus": 1}
    assert content["status"] == 1
    (group,) = content["groups"]
    assert [row["verdict"] for row in group["rows"]] == [Verdict.OK, Verdict.FAILED]
    assert group["rows"][0]["share"] == 0.75
    (gpu,) = content["clocks"]["before"]
    assert (gpu["driver_version"], gpu["clocks.sm"], gpu["temperature.gpu"]) == ("580.159.04", "1980 MHz", "41")
    assert "decode: steps (1 s of 135 s)" in capsys.readouterr().out


def test_a_device_that_is_not_there_is_said_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "MEASURE", "tests.bench.gpu_check.fake_worker")
    with pytest.raises(InvalidSetting, match=r"^--device cuda: there is none$"):
        main([])


@pytest.mark.parametrize("quick", [False, True])
def test_all_groups_fit_into_eight_minutes_and_their_tests_are_there(quick: bool) -> None:
    groups = all_groups(quick=quick)
    assert sum(group.limit_s for group in groups) <= TOTAL_S
    assert all((TESTS / group.tests).is_file() for group in groups if group.tests)
    assert all(group.tests or group.measures for group in groups)
