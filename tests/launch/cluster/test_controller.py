"""A controller over a backend that the test plays, on a clock that the test turns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from baton.launch.api_client import ApiClient
from baton.launch.cluster.backend import Phase
from baton.launch.cluster.controller import LEAVE_MARGIN_S, Controller
from baton.launch.cluster.file import parse_cluster_file
from baton.launch.cluster.policy import Load, Reading
from baton.launch.cluster.readings import RouterView
from baton.launch.cluster.status import Status
from baton.wire.errors import ChildFailed, RequestFailed
from tests.launch.cluster.fake_backend import FakeBackend, World

FILE = """
name = "tests"
[goals]
ttft_ms = 400
tpot_ms = 50
[scaling]
up_after_s = 10
down_after_s = 20
settle_s = 5
[router.flags]
port = 0
control_port = 0
shutdown-timeout-s = 30
[prefill]
min = 1
max = 2
[decode]
min = 1
max = 3
flags = { shutdown-timeout-s = 30 }
"""
_TWO_ROUTERS = "[router]\ncount = 2\n[router.flags]\nport = 7000\ncontrol_port = 7001"
SLOW = Reading(10.0, queue_s=0.01, tpot_s=0.2, prefill=Load(1, num_busy=0.9), decode=Load(9, seqs_share=0.9))
QUEUES = Reading(10.0, queue_s=0.5, tpot_s=0.04, prefill=Load(9, num_busy=1.8), decode=Load(9, seqs_share=0.9))
CALM = Reading(10.0)


class PlayedView(RouterView):
    """A router that measures what the test says. `None`: it does not answer."""

    def __init__(self) -> None:
        super().__init__([ApiClient("http://127.0.0.1:1")], 1.0)
        self.says: Reading | None = CALM
        self.loads: dict[str, int] = {}

    def look(self, now_s: float) -> None:
        if self.says is None:
            raise RequestFailed("nothing listens")

    def reading(self) -> Reading | None:
        return self.says

    @property
    def nodes(self) -> list[dict[str, Any]]:
        """A name with a slash is that of a node in a group."""
        groups = {name: name.partition("/")[0] if "/" in name else "" for name in self.loads}
        return [{"id": name, "group": groups[name], "load": load} for name, load in self.loads.items()]


class Deployment:
    """A controller, its world and its clock."""

    def __init__(self, text: str = FILE) -> None:
        self.file = parse_cluster_file(text, "it")
        self.world = World()
        self.view = PlayedView()
        self.now_s = 1000.0
        self.begin()

    def begin(self) -> None:
        """A (new) life of the controller."""
        self.controller = Controller(
            self.file, FakeBackend(self.world), lambda _addresses: self.view, clock=lambda: self.now_s
        )

    def run(self, seconds: int = 10) -> None:
        for _ in range(seconds):
            self.controller.tick()
            self.now_s += 1.0

    @property
    def status(self) -> Status:
        return self.controller.status()

    @property
    def notes(self) -> list[str]:
        return [note.text for note in self.status.changes]

    def ready(self) -> list[str]:
        return sorted(member.name for member in self.status.members if member.phase == "ready")

    def lose(self, name: str, phase: Phase = Phase.LOST) -> None:
        FakeBackend(self.world).end(name, phase, "its machine is gone")

    def program(self, name: str) -> tuple[str, ...]:
        return self.world.members[name].program.arguments

    def scale_up(self) -> None:
        """To two prefill nodes and three decode nodes."""
        self.view.says = SLOW
        self.run(45)
        self.view.says = QUEUES
        self.run(25)


@pytest.fixture
def deployment() -> Deployment:
    """One that is up."""
    made = Deployment()
    made.run()
    assert made.status.is_ready
    return made


def test_the_router_comes_first_and_nodes_are_told_where_it_is(deployment: Deployment) -> None:
    assert deployment.ready() == ["decode-0", "prefill-0", "router"]
    assert deployment.world.log[0] == "start router"
    assert "--router=tcp://10.0.0.1:0" in deployment.program("decode-0")
    assert deployment.status.addresses == ["http://10.0.0.1:0"]


def test_what_died_is_started_again_at_once_and_then_ever_slower(deployment: Deployment) -> None:
    deployment.lose("decode-0", Phase.EXITED)
    deployment.run(1)
    assert "decode-0 stopped: its machine is gone; starting it again now" in deployment.notes
    deployment.run(5)
    assert "decode-0" in deployment.ready()
    deployment.lose("decode-0")
    deployment.run(5)
    deployment.lose("decode-0")
    deployment.run(5)
    assert "decode-0 was lost: its machine is gone; starting it again in 0.5 s" in deployment.notes
    assert "decode-0 was lost: its machine is gone; starting it again in 1 s" in deployment.notes
    assert deployment.status.is_ready


def test_what_cannot_be_started_is_tried_again_and_holds_nobody_up() -> None:
    deployment = Deployment()
    deployment.world.behaviours["decode-0"] = "unstartable"
    deployment.run()
    assert deployment.ready() == ["prefill-0", "router"]
    assert "decode-0 cannot be started: Ray does not answer" in deployment.notes
    del deployment.world.behaviours["decode-0"]
    deployment.run(20)
    assert deployment.status.is_ready


def test_what_runs_is_left_alone_while_the_backend_is_away(deployment: Deployment) -> None:
    pid = deployment.world.members["prefill-0"].report.pid
    num_done = len(deployment.world.log)
    deployment.world.is_away = True
    for _ in range(600):
        with pytest.raises(ChildFailed, match="does not answer"):
            deployment.run(1)
        deployment.now_s += 1.0
    deployment.lose("decode-0")
    deployment.world.is_away = False
    deployment.run(5)
    assert deployment.world.log[num_done:] == ["start decode-0"]
    assert deployment.world.members["prefill-0"].report.pid == pid
    assert deployment.status.is_ready


def test_a_program_that_cannot_start_says_why_in_the_status() -> None:
    deployment = Deployment()
    deployment.world.behaviours["decode-0"] = "broken"
    deployment.run(4)
    (member,) = [member for member in deployment.status.members if member.name == "decode-0"]
    assert member.num_failures > 0
    assert any("decode-0 stopped: no such model: llama-17" in note for note in deployment.notes)
    assert not deployment.status.is_ready


def test_a_router_that_died_keeps_its_ports_and_the_nodes_stay(deployment: Deployment) -> None:
    deployment.world.members["router"].report = _at(deployment, "http://10.0.0.1:4711", "tcp://10.0.0.1:4712")
    deployment.run(5)
    pid = deployment.world.members["decode-0"].report.pid
    deployment.lose("router")
    deployment.run(5)
    assert {"--port=4711", "--control-port=4712"} <= set(deployment.program("router"))
    assert deployment.world.members["decode-0"].report.pid == pid
    assert deployment.status.is_ready


def test_nodes_are_started_anew_when_the_router_is_somewhere_else(deployment: Deployment) -> None:
    deployment.world.members["router"].report = _at(deployment, "http://10.0.0.2:8000", "tcp://10.0.0.2:8001")
    deployment.run(5)
    assert "--router=tcp://10.0.0.2:8001" in deployment.program("decode-0")
    assert "prefill-0 is started anew: the router is at tcp://10.0.0.2:8001 now" in deployment.notes
    assert deployment.status.is_ready


def test_nodes_are_told_all_routers_which_have_ports_of_their_own() -> None:
    deployment = Deployment(FILE.replace("[router.flags]\nport = 0\ncontrol_port = 0", _TWO_ROUTERS))
    deployment.world.behaviours["router-1"] = "mute"
    deployment.run()
    assert deployment.ready() == ["router-0"], "nodes have to know where all of them are"
    assert not deployment.status.is_ready
    deployment.world.behaviours.clear()
    deployment.lose("router-1")
    deployment.run()
    assert deployment.status.is_ready
    assert "--router=tcp://10.0.0.1:7001,tcp://10.0.0.1:7003" in deployment.program("decode-0")
    assert deployment.status.as_text().startswith("tests is ready, at http://10.0.0.1:7000 and http://10.0.0.1:7002\n")
    deployment.controller.stop()
    deployment.run(6)
    assert deployment.status.is_over
    assert {"terminate router-0", "terminate router-1"} <= set(deployment.world.log)


def test_nodes_drain_one_after_another_when_one_of_several_routers_is_somewhere_else() -> None:
    deployment = Deployment(FILE.replace("[router.flags]\nport = 0\ncontrol_port = 0", _TWO_ROUTERS))
    deployment.run()
    deployment.scale_up()
    num_done = len(deployment.world.log)
    at = deployment.world.members["router-1"]
    at.report = replace(at.report, address="http://10.0.0.2:7002", control_address="tcp://10.0.0.2:7003")
    nodes = [name for name in deployment.ready() if not name.startswith("router")]
    for _ in range(60):
        deployment.run(1)
        assert len(set(nodes) - set(deployment.ready())) <= 1
    assert len(nodes) == 5
    done = deployment.world.log[num_done:]
    assert sorted(done) == sorted(f"{what} {name}" for name in nodes for what in ("terminate", "start"))
    assert all("tcp://10.0.0.2:7003" in str(deployment.program(name)) for name in nodes)
    assert deployment.status.is_ready


def test_a_node_that_does_not_drain_in_time_is_started_anew_all_the_same() -> None:
    deployment = Deployment(FILE.replace("[router.flags]\nport = 0\ncontrol_port = 0", _TWO_ROUTERS))
    deployment.world.behaviours["decode-0"] = "stubborn"
    deployment.run()
    at = deployment.world.members["router-0"]
    at.report = replace(at.report, control_address="tcp://10.0.0.2:7001")
    deployment.run(20)
    assert "tcp://10.0.0.2:7001" not in str(deployment.program("decode-0"))
    deployment.run(30)
    assert all("tcp://10.0.0.2:7001" in str(deployment.program(name)) for name in ("decode-0", "prefill-0"))
    assert deployment.status.is_ready


def test_groups_scale_apart_under_load_and_back(deployment: Deployment) -> None:
    deployment.scale_up()
    assert deployment.ready() == ["decode-0", "decode-1", "decode-2", "prefill-0", "prefill-1", "router"]
    assert "decode nodes: 2 instead of 1, because TPOT is 200 ms, the goal 50 ms" in deployment.notes
    assert "prefill nodes: 2 instead of 1, because prompts wait 500 ms, of 200 ms that they may" in deployment.notes
    deployment.view.says = CALM
    deployment.run(120)
    assert deployment.ready() == ["decode-0", "prefill-0", "router"]
    assert "decode nodes: 2 instead of 3, because 2 would do: 0% of the KV is held, of 90% that may be" in (
        deployment.notes
    )
    assert {"terminate decode-1", "terminate decode-2", "terminate prefill-1"} <= set(deployment.world.log)


def test_only_one_change_is_under_way(deployment: Deployment) -> None:
    deployment.world.behaviours["decode-1"] = "mute"
    deployment.view.says = SLOW
    deployment.run(100)
    assert deployment.status.groups["decode"].desired == 2
    del deployment.world.behaviours["decode-1"]
    deployment.lose("decode-1")
    deployment.run(100)
    assert deployment.status.groups["decode"].desired == 3


@pytest.mark.parametrize(
    "loads",
    [
        pytest.param({"decode-0": 5, "decode-1": 1, "decode-2": 3}, id="nodes"),
        pytest.param(
            {"decode-0/0": 2, "decode-0/1": 2, "decode-1/0": 3, "decode-2/0": 2, "decode-2/1": 2}, id="groups"
        ),
    ],
)
def test_the_node_with_the_least_to_finish_is_drained(deployment: Deployment, loads: dict[str, int]) -> None:
    deployment.scale_up()
    deployment.view.loads = loads
    deployment.view.says = CALM
    deployment.run(60)
    assert next(line for line in deployment.world.log if line.startswith("terminate decode")) == "terminate decode-1"
    deployment.view.says = SLOW
    deployment.run(60)
    assert "decode-1" in deployment.ready(), "its name is free again"


def test_one_that_does_not_finish_in_time_is_ended(deployment: Deployment) -> None:
    deployment.world.behaviours["decode-1"] = "stubborn"
    deployment.view.says = SLOW
    deployment.run(20)
    deployment.view.loads = {"decode-0": 9}
    deployment.view.says = CALM
    deployment.run(30)
    assert ("decode-1", True) in [(member.name, member.is_leaving) for member in deployment.status.members]
    deployment.run(int(30 + LEAVE_MARGIN_S))
    assert "decode-1 has left, ended because it did not finish in time" in deployment.notes
    assert deployment.ready() == ["decode-0", "prefill-0", "router"]


def test_without_a_reading_nothing_is_scaled(deployment: Deployment) -> None:
    deployment.view.says = None
    deployment.run(60)
    assert deployment.status.problem == "nothing listens"
    assert deployment.status.groups["decode"].desired == 1


def test_down_drains_the_nodes_then_the_router_and_leaves_nothing(deployment: Deployment) -> None:
    deployment.controller.stop()
    deployment.run(6)
    assert deployment.status.is_over
    assert deployment.world.members == {}
    ends = [line for line in deployment.world.log if line.startswith("terminate")]
    assert set(ends[:2]) == {"terminate prefill-0", "terminate decode-0"}
    assert ends[2:] == ["terminate router"]


def test_down_does_not_wait_for_what_is_not_ready(deployment: Deployment) -> None:
    deployment.lose("decode-0")
    deployment.world.behaviours["decode-0"] = "mute"
    deployment.run(3)
    deployment.lose("prefill-0")
    deployment.controller.stop()
    deployment.run(4)
    assert deployment.status.is_over
    assert deployment.world.log.count("start prefill-0") == 1, "what died is not started again"


def test_a_later_life_of_the_controller_goes_on_with_what_runs(deployment: Deployment) -> None:
    deployment.view.says = SLOW
    deployment.run(20)
    running = deployment.ready()
    assert running == ["decode-0", "decode-1", "prefill-0", "router"]
    started = deployment.world.log.count("start decode-1")
    deployment.begin()
    deployment.view.says = QUEUES
    deployment.run(5)
    assert deployment.ready() == running
    assert deployment.status.groups["decode"].desired == 2
    assert deployment.world.log.count("start decode-1") == started
    deployment.lose("decode-1")
    deployment.run(5)
    assert deployment.ready() == running


def test_a_status_is_told_as_text_and_as_json(deployment: Deployment) -> None:
    deployment.view.says = SLOW
    deployment.run(20)
    text = deployment.status.as_text()
    assert text.startswith("tests is ready, at http://10.0.0.1:0\n")
    assert "decode: 2 ready, 2 running of 2, from 1 to 3; pressure 4.00: TPOT is 200 ms, the goal 50 ms" in text
    assert "  machine-1  10.0.0.1  8 CPU" in text
    assert "decode nodes: 2 instead of 1" in text
    assert '"is_ready": true' in deployment.status.as_json()


def _at(deployment: Deployment, address: str, control_address: str) -> Any:
    report = deployment.world.members["router"].report
    return replace(report, address=address, control_address=control_address)
