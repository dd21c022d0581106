from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from baton.runtime.child import PIPE, Child, describe_end
from baton.runtime.events import Ready
from baton.wire.errors import ChildFailed
from tests.runtime.child_program import NAME

WAIT_S = 30.0

Start = Callable[..., Child]


@pytest.fixture
def start() -> Iterator[Start]:
    """`start("says", "a line\\n")` runs the program of these tests, whose standard input stays open."""
    children: list[Child] = []

    def begin(*arguments: str) -> Child:
        children.append(Child(NAME, *arguments, stdin=PIPE, stdout=PIPE))
        return children[-1]

    yield begin
    for child in children:
        child.end()


def until_gone(pid: int) -> None:
    """Poll, because a process that is not the parent gets no notice when a process ends."""
    deadline_s = time.monotonic() + WAIT_S
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline_s, "still there"
        time.sleep(0.01)


def test_lines_are_read_one_by_one(start: Start) -> None:
    child = start("says", "first\n\nthird\nno end")
    assert [child.read_line(WAIT_S) for _ in range(3)] == [b"first", b"", b"third"]
    with pytest.raises(ChildFailed, match=r"said nothing within 0\.01 s"):
        child.read_line(0.01)


def test_a_line_longer_than_a_pipe_holds_is_read_whole(start: Start) -> None:
    assert start("says", *["x" * 100_000] * 3, "\n").read_line(WAIT_S) == b"x" * 300_000


def test_what_is_written_has_to_be_taken_in_time(start: Start) -> None:
    much = b"x" * 300_000 + b"\n"
    child = start("echoes")
    child.write(much, WAIT_S)
    child.write(b"short\n", WAIT_S)
    assert [child.read_line(WAIT_S), child.read_line(WAIT_S)] == [much[:-1], b"short"]
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(ChildFailed, match=r"took nothing within 0\.01 s"):
        child.write(much, 0.01)
    child.kill()
    child.wait(WAIT_S)
    with pytest.raises(ChildFailed, match="reads no more: Broken pipe"):
        child.write(much, WAIT_S)


def test_waiting_for_a_line_reports_how_the_child_ended(start: Start) -> None:
    with pytest.raises(ChildFailed, match="child_program exited with status 3"):
        start("exits", "3").read_line(WAIT_S)


def test_a_child_is_ready_when_it_says_so(start: Start) -> None:
    assert start("starts").wait_ready(WAIT_S) == Ready("decode", "http://there")


def test_a_child_that_never_gets_ready_is_an_error(start: Start) -> None:
    with pytest.raises(ChildFailed, match="exited with status 1"):
        start("exits", "1").wait_ready(WAIT_S)


def test_a_child_leads_a_session_of_its_own(start: Start) -> None:
    child = start("says", "here\n")
    child.read_line(WAIT_S)
    assert os.getsid(child.pid) == os.getpgid(child.pid) == child.pid


def test_the_end_of_a_child_is_noticed(start: Start) -> None:
    child = start("says", "here\n")
    assert child.poll() is None
    assert child.wait(0.0) is None
    child.stdin.close()
    assert child.watch() == child.poll() == child.wait(0.0) == 0


def test_a_child_that_does_not_finish_in_time_is_killed(start: Start) -> None:
    child = start("stubborn")
    child.read_line(WAIT_S)
    assert child.end(patience_s=0.1) == -signal.SIGKILL


def test_a_child_that_finishes_in_time_is_not_killed(start: Start) -> None:
    child = start("says", "here\n")
    child.read_line(WAIT_S)
    assert child.end(patience_s=WAIT_S) == -signal.SIGTERM


def test_what_a_child_has_started_ends_with_it(start: Start) -> None:
    child = start("parent")
    sleeper = int(child.read_line(WAIT_S))
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait(WAIT_S) == -signal.SIGKILL
    until_gone(sleeper)


def test_a_child_does_not_outlive_its_parent(start: Start) -> None:
    until_gone(int(start("dies first", "sleeps").read_line(WAIT_S)))


def test_a_child_that_has_to_tidy_up_gets_to_it_when_its_parent_dies(start: Start, tmp_path: Path) -> None:
    until_gone(int(start("dies first", "tidy", str(tmp_path / "tidied")).read_line(WAIT_S)))
    assert (tmp_path / "tidied").exists()


def test_pipes_and_ends_need_no_living_child(start: Start) -> None:
    child = start("exits", "0")
    assert child.wait(WAIT_S) == 0
    child.terminate()
    child.kill()
    assert child.end(patience_s=1.0) == 0


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (3, "exited with status 3"),
        (-11, "was killed by SIGSEGV"),
        (-99, "was killed by signal 99"),
        (None, "closed its output"),
    ],
)
def test_an_end_is_described(status: int | None, words: str) -> None:
    assert describe_end(status) == words
