"""`baton cluster`, as far as it goes without Ray."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Mapping
from pathlib import Path

import pytest

import baton.launch.cluster.command
import baton.launch.serve
from baton.launch.cli import main
from baton.launch.cluster.controller import Controller
from baton.launch.cluster.file import ClusterFile
from baton.launch.cluster.keeper import Secrets
from baton.launch.cluster.loop import ControllerLoop
from baton.launch.layout import Layout
from baton.launch.settings import Deployment
from baton.wire.errors import InvalidSetting
from tests.launch.cluster.conformance import program
from tests.launch.cluster.fake_backend import FakeBackend, World
from tests.launch.cluster.test_controller import PlayedView

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

    monkeypatch.setattr(baton.launch.serve, "run", run)
    assert main(["cluster", "up", "--local", str(file)]) == 0
    ((deployment, environment),) = served
    assert (deployment.layout, deployment.router.goal_tpot_ms) == (Layout(1, 2), 30.0)
    assert environment["HF_HOME"] == "/models"
    assert "decode: 2 nodes; on one machine their number stays as it is" in capsys.readouterr().err


class PlayedRay(types.ModuleType):
    """In the place of `ray_backend`: a controller in this process over a played backend."""

    def __init__(self) -> None:
        super().__init__("played")
        self.world = World()
        self.loop: ControllerLoop | None = None
        self.secrets: list[Secrets] = []
        self.Deployed = type("Deployed", (), {"__new__": lambda _, __: self._find(), "begin": self._begin})

    def connect(self, deployment: str, address: str) -> None:
        sys.stdout.write("(raylet) a machine has joined\n")

    def disconnect(self) -> None:
        sys.stdout.write("(raylet) goodbye\n")

    def sweep(self, deployment: str) -> int:
        if self.loop is not None:
            self.loop.stop()
            assert self.loop.join(60.0)
        num_left = len(self.world.members)
        self.world.members.clear()
        self.loop = None
        return num_left

    def _begin(self, file: ClusterFile, text: str, origin: str, known: Secrets) -> ControllerLoop:
        self.secrets.append(known)
        controller = Controller(file, FakeBackend(self.world), lambda _address: PlayedView())
        self.loop = ControllerLoop(controller, tick_s=0.01)
        return self.loop

    def _find(self) -> ControllerLoop:
        if self.loop is None:
            raise InvalidSetting("no deployment called baton is up")
        return self.loop


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> PlayedRay:
    """What the command takes for Ray."""
    played = PlayedRay()
    monkeypatch.setattr(baton.launch.cluster.command, "_load_ray", lambda: played)
    monkeypatch.setattr(baton.launch.cluster.command, "_POLL_S", 0.01)
    return played


def test_up_status_and_down(ray: PlayedRay, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "up", str(file)]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("Baton ready at http://10.0.0.1:8000\n"), "and nothing of what Ray says"
    assert "decode-1 is ready" in told.err
    assert main(["cluster", "status", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["members"]) == 4
    assert main(["cluster", "down"]) == 0
    told = capsys.readouterr()
    assert told.out == "baton is down\n"
    assert "decode-1 drains" in told.err
    assert "is ready" not in told.err, "that is known"
    assert ray.world.members == {}
    assert len(ray.secrets[0].cluster_key.strip()) == 40
    assert ray.secrets[0].api_key == ""


def test_up_ends_with_the_error_of_a_program_that_cannot_start(
    ray: PlayedRay, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ray.world.behaviours["decode-1"] = "broken"
    assert main(["cluster", "up", str(file)]) == 1
    assert capsys.readouterr().err.endswith("error: decode-1: no such model: llama-17\n")
    assert ray.world.members == {}


def test_up_ends_when_not_everything_is_ready_in_time(
    ray: PlayedRay, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ray.world.behaviours["decode-1"] = "mute"
    file.write_text("start_timeout_s = 0.2\n" + FILE)
    assert main(["cluster", "up", str(file)]) == 1
    assert "error: not ready after 0.2 s: " in capsys.readouterr().err


def test_down_ends_what_has_no_controller(ray: PlayedRay, capsys: pytest.CaptureFixture[str]) -> None:
    FakeBackend(ray.world).start(program("decode-0"))
    assert main(["cluster", "down"]) == 1
    assert "not everything has finished: 1 programs were ended" in capsys.readouterr().err
    assert main(["cluster", "down"]) == 2
    assert capsys.readouterr().err.endswith("error: no deployment called baton is up\n")


def test_a_router_with_api_keys_gets_one_for_its_controller(ray: PlayedRay, file: Path) -> None:
    file.write_text(FILE + "[router.flags]\napi-key-file = '/keys.toml'\n")
    assert main(["cluster", "up", str(file)]) == 0
    assert len(ray.secrets[0].api_key) > 30
    assert main(["cluster", "down"]) == 0


@pytest.mark.parametrize("arguments", [["up", "{file}"], ["status"], ["down"]])
def test_without_ray_one_line_says_what_to_install(
    arguments: list[str], file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "baton.launch.cluster.ray_backend", raising=False)
    assert main(["cluster", *(argument.format(file=file) for argument in arguments)]) == 2
    assert capsys.readouterr().err == (
        "error: Ray is not installed: pip install 'baton-serve[ray]', here and on every machine\n"
    )


def test_a_file_that_cannot_be_used_is_one_line(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text("[decode]\ncount = 0")
    assert main(["cluster", "up", str(file)]) == 2
    assert "[decode]: min must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["upp"], ["up"], ["status", "--jsn"]])
def test_a_mistake_on_the_command_line_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["cluster", *arguments])
    assert capsys.readouterr().err.count("\n") == 1
