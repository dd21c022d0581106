from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from baton.bench.child import Child
from baton.bench.facts import ROOT
from baton.wire.errors import RequestFailed
from tests.bench.targets.processes import is_running, wait_for

ECHO = "tests.bench.echo_worker"
STARTS_A_CHILD = f"""
from baton.bench.child import Child
child = Child({ECHO!r}, {{}})
child.hear()
print(child.pid, flush=True)
child.ask("echo")
input()
"""


@pytest.fixture
def echo() -> Iterator[Child]:
    with Child(ECHO, {}) as child:
        child.hear()
        yield child


def test_a_command_is_answered(echo: Child) -> None:
    assert echo.ask("echo", number=1, text="a") == {"number": 1, "text": "a"}


def test_what_a_library_prints_is_no_answer(echo: Child) -> None:
    assert echo.ask("print") == "printed"


def test_a_failed_command_is_an_error_and_the_child_goes_on(echo: Child) -> None:
    with pytest.raises(RequestFailed, match="ValueError: strange"):
        echo.ask("strange")
    assert echo.ask("echo") == {}


def test_a_child_that_dies_is_an_error(echo: Child) -> None:
    with pytest.raises(RequestFailed, match="exited with status 3"):
        echo.ask("die")


def test_an_answer_that_does_not_come_is_an_error(echo: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.bench.child._LEAVE_S", 0.1)
    echo.tell("sleep")
    with pytest.raises(RequestFailed, match=r"within 0\.1 s"):
        echo.hear(timeout_s=0.1)
    echo.close()
    wait_for(lambda: not is_running(echo.pid))


def test_a_child_does_not_outlive_a_parent_that_was_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STARTS_A_CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.kill()
    wait_for(lambda: not is_running(pid))
