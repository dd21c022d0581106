"""What every backend of a deployment has to do, as functions over a `Rig`: the suite runs them over the backend that
tests play, `python -m tests.cluster.ray_trial` over Ray.

Each takes a rig without members and may leave some: whoever runs them removes those.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from baton.launch.cluster.backend import Backend, Phase, Program, Report

MODULE = "tests.launch.cluster.member_program"
WAIT_S = 60.0
_POLL_S = 0.05


class Rig(Protocol):
    """A backend, and the faults that it has to survive."""

    backend: Backend
    address: str
    """At which a member that has `host_flags` has to listen."""

    def kill(self, name: str) -> None:
        """Kill the process of a member."""
        ...

    def lose(self, name: str) -> None:
        """Kill what watches over a member."""
        ...

    def reopen(self) -> Backend:
        """A backend as a later life of the controller opens it."""
        ...

    def is_running(self, pid: int) -> bool:
        """Whether a process exists."""
        ...

    def pause(self, seconds: float) -> None:
        """Let time pass."""
        ...


def program(name: str, behaviour: str = "steady", cpus: float = 1.0) -> Program:
    """A member that needs `cpus`."""
    return Program(name, MODULE, (behaviour,), {}, ("--host",), {"CPU": cpus})


def wait_for(rig: Rig, name: str, phase: Phase, backend: Backend | None = None) -> Report:
    """The report of a member once it is in that phase."""
    report = None
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        report = (backend or rig.backend).reports().get(name)
        if report is not None and report.phase == phase:
            return report
        rig.pause(_POLL_S)
    raise AssertionError(f"{name} is not {phase} after {WAIT_S:g} s: {report}")


def start_ready(rig: Rig, name: str, behaviour: str = "steady") -> Report:
    """A member that is ready."""
    rig.backend.start(program(name, behaviour))
    return wait_for(rig, name, Phase.READY)


def a_member_becomes_ready_where_its_machine_listens(rig: Rig) -> None:
    report = start_ready(rig, "decode-0")
    assert report.address == f"http://{rig.address}:{report.pid}"
    assert report.control_address == "tcp://127.0.0.1:1"
    assert report.arguments == ("steady",), "as its program says, without what its machine added"
    assert report.machine in {machine.name for machine in rig.backend.machines()}
    assert rig.is_running(report.pid)


def one_that_cannot_start_says_why(rig: Rig) -> None:
    rig.backend.start(program("decode-0", "broken"))
    assert wait_for(rig, "decode-0", Phase.EXITED).reason == "no such model: llama-17"


def one_that_is_not_ready_yet_is_starting(rig: Rig) -> None:
    rig.backend.start(program("decode-0", "mute"))
    assert not wait_for(rig, "decode-0", Phase.STARTING).address


def one_that_was_killed_starts_anew(rig: Rig) -> None:
    before = start_ready(rig, "decode-0")
    rig.kill("decode-0")
    assert "SIGKILL" in wait_for(rig, "decode-0", Phase.EXITED).reason
    rig.backend.start(program("decode-0"))
    assert rig.backend.reports()["decode-0"].phase != Phase.EXITED, "that was its earlier life"
    assert wait_for(rig, "decode-0", Phase.READY).pid != before.pid


def one_that_is_asked_to_finish_exits(rig: Rig) -> None:
    report = start_ready(rig, "decode-0")
    rig.backend.terminate("decode-0")
    assert wait_for(rig, "decode-0", Phase.EXITED).reason == "exited with status 0"
    assert not rig.is_running(report.pid)


def one_that_does_not_finish_is_stopping_until_it_is_removed(rig: Rig) -> None:
    report = start_ready(rig, "decode-0", "stubborn")
    rig.backend.terminate("decode-0")
    wait_for(rig, "decode-0", Phase.STOPPING)
    assert rig.is_running(report.pid)
    require_removed(rig, "decode-0", report)


def one_that_is_removed_leaves_nothing_and_its_name_is_free(rig: Rig) -> None:
    before = start_ready(rig, "decode-0")
    require_removed(rig, "decode-0", before)
    assert start_ready(rig, "decode-0").pid != before.pid


def one_whose_watcher_was_lost_does_not_go_on_and_starts_anew(rig: Rig) -> None:
    before = start_ready(rig, "decode-0")
    rig.lose("decode-0")
    assert wait_for(rig, "decode-0", Phase.LOST).reason
    wait_until(rig, lambda: not rig.is_running(before.pid), "its process is gone")
    assert start_ready(rig, "decode-0").pid != before.pid


def one_that_runs_is_not_started_again(rig: Rig) -> None:
    before = start_ready(rig, "decode-0")
    rig.backend.start(program("decode-0"))
    rig.pause(_POLL_S)
    assert wait_for(rig, "decode-0", Phase.READY).pid == before.pid


def a_later_controller_finds_what_runs(rig: Rig) -> None:
    before = start_ready(rig, "decode-0")
    later = rig.reopen()
    assert wait_for(rig, "decode-0", Phase.READY, later).pid == before.pid
    later.terminate("decode-0")
    wait_for(rig, "decode-0", Phase.EXITED, later)
    later.remove("decode-0")
    assert "decode-0" not in later.reports()


def one_without_a_place_waits_for_it(rig: Rig) -> None:
    most = max(machine.resources["CPU"] for machine in rig.backend.machines())
    rig.backend.start(program("decode-0", cpus=most))
    wait_for(rig, "decode-0", Phase.READY)
    rig.backend.start(program("decode-1", cpus=most + 1))
    report = wait_for(rig, "decode-1", Phase.PLACING)
    assert not report.machine
    assert f"{most + 1:g} CPU" in report.reason
    wait_for(rig, "decode-0", Phase.READY)


def names_that_are_not_there_are_no_error(rig: Rig) -> None:
    rig.backend.terminate("decode-7")
    rig.backend.remove("decode-7")
    assert rig.backend.reports() == {}


def require_removed(rig: Rig, name: str, report: Report) -> None:
    """Remove a member; fails when something of it is left."""
    rig.backend.remove(name)
    assert name not in rig.backend.reports()
    wait_until(rig, lambda: not rig.is_running(report.pid), "its process is gone")


def wait_until(rig: Rig, condition: Callable[[], bool], what: str) -> None:
    """Return once `condition()` holds."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"after {WAIT_S:g} s still not: {what}"
        rig.pause(_POLL_S)


CASES: tuple[Callable[[Rig], None], ...] = (
    a_member_becomes_ready_where_its_machine_listens,
    one_that_cannot_start_says_why,
    one_that_is_not_ready_yet_is_starting,
    one_that_was_killed_starts_anew,
    one_that_is_asked_to_finish_exits,
    one_that_does_not_finish_is_stopping_until_it_is_removed,
    one_that_is_removed_leaves_nothing_and_its_name_is_free,
    one_whose_watcher_was_lost_does_not_go_on_and_starts_anew,
    one_that_runs_is_not_started_again,
    a_later_controller_finds_what_runs,
    one_without_a_place_waits_for_it,
    names_that_are_not_there_are_no_error,
)
