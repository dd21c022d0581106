"""The thread of a controller."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from baton.launch.cluster.backend import Report
from baton.launch.cluster.controller import Controller
from baton.launch.cluster.file import parse_cluster_file
from baton.launch.cluster.loop import ControllerLoop
from baton.wire.errors import ChildFailed
from tests.launch.cluster.fake_backend import FakeBackend, World
from tests.launch.cluster.test_controller import PlayedView

WAIT_S = 60.0


class Flaky(FakeBackend):
    """Does not answer every third time."""

    num_asked = 0

    def reports(self) -> Mapping[str, Report]:
        self.num_asked += 1
        if self.num_asked % 3 == 0:
            raise ChildFailed("Ray does not answer")
        return super().reports()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_deployment_comes_up_and_goes_down_although_rounds_fail() -> None:
    world = World()
    controller = Controller(parse_cluster_file("", "it"), Flaky(world), lambda _address: PlayedView())
    loop = ControllerLoop(controller, tick_s=0.01)
    wait_until(lambda: loop.status().is_ready)
    wait_until(lambda: loop.status().problem == "the last round failed: Ray does not answer")
    assert loop.status().num_errors > 0
    loop.stop()
    assert loop.join(WAIT_S)
    assert loop.status().is_over
    assert world.members == {}
