"""The whole command, on the host's cores with tiny sizes: the same code that runs on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import command as bench_command
from bench.child import ROOT
from bench.gpu_check import command
from bench.gpu_check.plan import all_groups
from wire.errors import InvalidSetting

_GOOD = {"ok", "meaningless here", "not run"}


@pytest.mark.timeout(420)
def test_everything_runs_without_a_gpu_and_nothing_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    words = [sys.executable, "-m", "bench.gpu_check", "--device", "cpu", "--quick", "--json", str(file)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    content = json.loads(file.read_text())
    groups = {group["name"]: group["rows"] for group in content["groups"]}
    assert list(groups) == [group.name for group in all_groups(quick=True)]
    for name, rows in groups.items():
        assert {row["verdict"] for row in rows} <= _GOOD, name
        assert any(row["value"] is not None for row in rows), name
    assert {name for name, rows in groups.items() if any(row["verdict"] == "ok" for row in rows)} >= {
        "attention",
        "operations",
        "device",
        "graphs",
        "served",
        "transfer",
    }
    assert not [row for rows in groups.values() for row in rows if row["is_speed"] and row["verdict"] == "ok"]
    assert content["device"]["num_gpus"] == 0
    assert "decode step" in done.stdout


def test_without_cuda_the_error_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        assert command.run(["--only", "operations", "--quick"]) == 0
        return
    assert command.run([]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("error: --device cuda")
    assert len(told.err.splitlines()) == 1


def test_what_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="there is no such folder"):
        command.main(["--device", "cpu", "--json", str(tmp_path / "missing" / "file.json")])


def test_baton_bench_knows_it() -> None:
    with pytest.raises(InvalidSetting, match="is not one of attention"):
        bench_command.main(["gpu-check", "--device", "cpu", "--only", "nothing"])
