"""The command on the host's cores with tiny sizes: the same code that runs on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import command as bench_command
from bench.gpu_check.command import main
from bench.gpu_check.groups import TOTAL_S, all_groups, chosen_groups
from bench.gpu_check.run import TESTS
from wire.errors import InvalidSetting


@pytest.mark.timeout(300)
def test_a_group_runs_without_a_gpu_and_nothing_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    assert main(["--device", "cpu", "--quick", "--only", "transfer", "--json", str(file)]) == 0
    content = json.loads(file.read_text())
    assert list(content) == ["facts", "device", "clocks", "status", "groups"]
    groups = {group["name"]: group["rows"] for group in content["groups"]}
    assert list(groups) == ["transfer"]
    found = {name: {row["verdict"] for row in rows} for name, rows in groups.items()}
    assert found["transfer"] == {"ok", "meaningless here"}
    assert content["device"]["num_gpus"] == 0
    assert "handoff, beyond a copy" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_cuda_the_error_is_one_sentence() -> None:
    with pytest.raises(InvalidSetting, match=r"^--device cuda[^\n]*$"):
        main([])


def test_what_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="there is no such folder"):
        main(["--device", "cpu", "--json", str(tmp_path / "missing" / "file.json")])


def test_baton_bench_knows_it() -> None:
    with pytest.raises(InvalidSetting, match="--only 'nothing' is not one of attention"):
        bench_command.main(["gpu-check", "--device", "cpu", "--only", "nothing"])


@pytest.mark.parametrize("quick", [False, True])
def test_all_groups_fit_into_eight_minutes_and_their_tests_are_there(quick: bool) -> None:
    groups = all_groups(quick=quick)
    assert sum(group.limit_s for group in groups) <= TOTAL_S
    assert all((TESTS / group.tests).is_file() for group in groups if group.tests)
    assert all(group.tests or group.measures for group in groups)


def test_groups_are_chosen_by_name() -> None:
    assert [group.name for group in chosen_groups("graphs, attention", quick=True)] == ["attention", "graphs"]
    assert chosen_groups("", quick=True) == all_groups(quick=True)
