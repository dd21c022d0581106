"""`baton cluster`, as far as it goes without Ray."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import launch.serve
from launch.cli import main
from launch.settings import Deployment

FILE = """
environment = { HF_HOME = "/models" }
[goals]
tpot_ms = 30
[decode]
min = 1
max = 3
count = 2
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of a deployment."""
    path = tmp_path / "cluster.toml"
    path.write_text(FILE)
    return path


def test_with_local_this_machine_serves_each_group_at_its_count(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served: list[tuple[Deployment, Mapping[str, str]]] = []

    def run(deployment: Deployment, environment: Mapping[str, str]) -> int:
        served.append((deployment, environment))
        return 0

    monkeypatch.setattr(launch.serve, "run", run)
    assert main(["cluster", "up", "--local", str(file)]) == 0
    ((deployment, environment),) = served
    assert (deployment.serve.prefill, deployment.serve.decode, deployment.router.goal_tpot_ms) == (1, 2, 30.0)
    assert environment["HF_HOME"] == "/models"
    assert "decode: 2 nodes; on one machine their number stays as it is" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["up", "{file}"], ["status"], ["down"]])
def test_without_ray_one_line_says_what_to_install(
    arguments: list[str], file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "launch.cluster.ray_backend", raising=False)
    assert main(["cluster", *(argument.format(file=file) for argument in arguments)]) == 1
    assert capsys.readouterr().err == (
        "error: Ray is not installed: pip install 'baton-serve[ray]', here and on every machine\n"
    )


def test_a_file_that_cannot_be_used_is_one_line(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("[decode]\ncount = 0")
    assert main(["cluster", "up", str(file)]) == 1
    assert "[decode]: min must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["upp"], ["up"], ["status", "--jsn"]])
def test_a_mistake_on_the_command_line_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["cluster", *arguments])
    assert capsys.readouterr().err.count("\n") == 1
