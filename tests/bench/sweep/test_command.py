from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from baton.bench.documents import load_result
from baton.bench.facts import ROOT
from baton.bench.sweep.command import main
from baton.wire.errors import InvalidSetting
from tests.bench.targets.mocks import LOAD, mock_target
from tests.bench.targets.processes import wait_for

SWEEP = "import sys; from baton.bench.sweep.command import main; sys.exit(main(sys.argv[1:]))"


def read(path: Path) -> dict[str, Any]:
    """{} as long as there is no file."""
    document: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return document


def num_points(path: Path) -> int:
    return sum(len(configuration["points"]) for configuration in read(path).get("configurations", []))


def test_a_sweep_that_was_killed_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    target = mock_target("bad", ttft_ms=1, itl_ms=1, status=400)
    goals = ["--goodput=ttft:60000", "--rates=100,200,400", "--num-prompts=6", "--warmup-runs=0"]
    arguments = [*LOAD, "--target", target, *goals, f"--json={path}"]
    with subprocess.Popen([sys.executable, "-c", SWEEP, *arguments], cwd=ROOT, stderr=subprocess.DEVNULL) as sweep:
        wait_for(lambda: num_points(path) >= 1)
        sweep.kill()
    before = read(path)
    # the server went with the sweep, or its port would be taken now
    wait_for(lambda: not _answers(target))
    assert main(arguments) == 1
    after = read(path)
    assert len(after["sessions"]) == 2
    for old, new in zip(before["configurations"], after["configurations"], strict=True):
        assert new["points"][: len(old["points"])] == old["points"]
        assert [point["rate"] for point in new["points"]] == [100.0, 200.0, 400.0]
    assert after["configurations"][0]["goodput_rate"] is None
    assert "goodput (requests/s)" in capsys.readouterr().out
    load_result(path)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--goodput=ttft:1"], "--target is needed"),
        (["--target", "a=http://x:1"], "--goodput is needed"),
        (["--target", "a=http://x:1", "--goodput=ttft:1", "--attainment=90"], "--attainment: 90"),
        (["--target", "a=http://x:1", "--goodput=ttft:1", "--precision=0"], "--precision: 0"),
        (["--target", "a=http://x:1", "--goodput=ttft:1", "--start-rate=0"], "--start-rate: 0"),
        (["--target", "a=http://x:1", "--goodput=ttft:1", "--rates=inf"], "needs --num-prompts"),
    ],
)
def test_what_cannot_be_used_is_said_before_anything_starts(arguments: list[str], reason: str) -> None:
    with pytest.raises(InvalidSetting, match=reason):
        main(arguments)


def _answers(target: str) -> bool:
    port = int(target.rpartition(":")[2])
    with socket.socket() as asked:
        return asked.connect_ex(("127.0.0.1", port)) == 0
