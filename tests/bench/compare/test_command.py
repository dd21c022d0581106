from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.bench.compare.command import main
from baton.bench.documents import load_result
from baton.wire.errors import InvalidSetting
from tests.bench.targets.mocks import LOAD, mock_target


def read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def test_two_servers_are_compared_from_start_to_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    targets = [mock_target("slow", ttft_ms=300, itl_ms=10), mock_target("fast", ttft_ms=15, itl_ms=10)]
    arguments = [*LOAD, "--target", *targets, "--rates=40", "--num-prompts=8", "--warmup-rounds=0", "--goodput=ttft:30"]
    assert main([*arguments, f"--json={path}"]) == 0
    document = read(path)
    assert len(document["runs"]) == 6
    assert len(document["control_runs"]) == 3
    assert document["facts"]["command"].startswith("baton bench compare '--target=slow=")
    assert ["{name}={command} @ {url}".format(**target) for target in document["targets"]] == targets
    by_metric = {ratio["metric"]: ratio for ratio in document["ratios"]}
    assert by_metric["median_ttft_ms"]["ratio"] < 0.8
    pairs = [
        (one["result"], other["result"])
        for one in document["runs"]
        for other in document["runs"]
        if one["target"] == "slow" and other["target"] == "fast"
        if one["round"] == other["round"]
    ]
    assert all(slow["total_input_tokens"] == fast["total_input_tokens"] == 8 * 16 for slow, fast in pairs)
    assert all(slow["seed"] == fast["seed"] for slow, fast in pairs)
    assert "ttfts" in document["runs"][-1]["result"]
    assert "ttfts" not in document["runs"][0]["result"]
    assert "slow against fast" in capsys.readouterr().out
    load_result(path)

    before = path.read_bytes()
    assert main([*arguments, f"--json={path}"]) == 0
    assert path.read_bytes() == before
    assert "everything is in" in capsys.readouterr().err
    with pytest.raises(InvalidSetting, match="other settings"):
        main([*arguments, f"--json={path}", "--rounds=4"])


def test_a_target_that_answers_nothing_is_the_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    a, b = mock_target("a"), mock_target("b", status=400)
    arguments = [*LOAD, "--target", a, b, "--rounds=1", "--no-control", "--num-prompts=2"]
    assert main([*arguments, "--rates=50", "--warmup-rounds=0", f"--json={path}"]) == 1
    assert "2 of 2" in capsys.readouterr().out
    document = read(path)
    assert [run["target"] for run in document["runs"]] == ["b", "a"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "--target is needed"),
        (["--target", "a=http://x:1", "--rounds=0"], "--rounds: 0"),
        (["--target", "a=http://x:1", "--rates=0,1"], "--rates '0'"),
        (["--target", "a=http://x:1", "--rates=1,1"], "a rate is there twice"),
        (["--target", "a=http://x:1"], "infinite rate needs --num-prompts"),
        (["--target", "a=http://x:1", "--rates=1", "--json=/no/such/folder/x.json"], "no such folder"),
        (["--target", "a=http://x:1", "--rates=1", "--goodput=speed:1"], "--goodput 'speed:1'"),
    ],
)
def test_what_cannot_be_used_is_said_before_anything_starts(arguments: list[str], reason: str) -> None:
    with pytest.raises(InvalidSetting, match=reason):
        main(arguments)
