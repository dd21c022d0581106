from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from baton.bench.facts import ROOT
from baton.bench.targets.process import RunningTarget, why_not_ready
from baton.bench.targets.spec import Target
from baton.wire.errors import InvalidSetting, RequestFailed
from tests.bench.mock_server.schedule import Fault, FaultKind, Steady
from tests.bench.mock_server.server import mock_server
from tests.bench.targets.processes import start, target_of, wait_for

HOLDS_A_TARGET = """
import json, sys
from baton.bench.targets.process import RunningTarget
from baton.bench.targets.spec import Target
name, url, *command = json.loads(sys.argv[1])
RunningTarget(Target(name, url, tuple(command)), 20.0, lambda _: None).pause()
print(flush=True)
input()
"""


@pytest.fixture(scope="module")
def running() -> Iterator[RunningTarget]:
    """A target whose workers lead sessions of their own."""
    with start(target_of("detached")) as found:
        yield found
    assert not _processes_of(found.target)


@pytest.mark.parametrize("behaviour", ["workers", "stubborn", "leaves"])
def test_nothing_of_a_target_is_left(behaviour: str) -> None:
    with start(target_of(behaviour), patience_s=1.0) as running:
        assert len(_processes_of(running.target)) == 3
        assert why_not_ready(running.url, 5.0) == ""
    assert not _processes_of(running.target)


def test_a_halted_target_does_not_outlive_a_benchmark_that_was_killed() -> None:
    target = target_of("detached")
    spec = json.dumps([target.name, target.url, *target.command])
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS_A_TARGET, spec],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as benchmark:
        assert benchmark.stdout is not None
        assert benchmark.stdout.readline() == "\n"
        assert len(_processes_of(target)) == 3
        benchmark.kill()
    wait_for(lambda: not _processes_of(target))


def test_a_halted_target_rests_and_answers_again_when_it_is_continued(running: RunningTarget) -> None:
    running.pause()
    assert [process.status() for process in _processes_of(running.target)] == [psutil.STATUS_STOPPED] * 3
    assert "timed out" in why_not_ready(running.url, 0.1)
    running.resume()
    assert why_not_ready(running.url, 5.0) == ""
    assert all(process.status() != psutil.STATUS_STOPPED for process in _processes_of(running.target))


def test_a_relay_is_not_ready_before_its_launcher_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.bench.targets.process._BATON_IS_READY", "words that it never says")
    with pytest.raises(RequestFailed, match="its nodes were not all there"):
        start(Target("pd", "", ("baton", "serve", "--prefill=0")), ready_timeout_s=0.1)


def test_a_target_that_never_answers_is_given_up_and_ended() -> None:
    target = target_of("mute")
    with pytest.raises(RequestFailed, match=r"did not answer within 0\.5 s.*refused"):
        start(target, ready_timeout_s=0.5)
    assert not _processes_of(target)


async def test_ready_is_what_answers_a_request() -> None:
    loading = Steady(0.0, 0.0, Fault(FaultKind.HTTP_ERROR, message="still loading"))
    async with mock_server(loading) as server:
        said = await asyncio.to_thread(why_not_ready, server.url, 5.0)
    assert "answered 503" in said
    assert "still loading" in said


def test_a_server_that_is_there_already_is_not_taken_for_the_one_that_is_started(running: RunningTarget) -> None:
    with pytest.raises(InvalidSetting, match="something else answers at"):
        start(running.target)


def test_a_server_that_runs_already_is_only_asked(running: RunningTarget) -> None:
    with start(Target("theirs", running.url)) as theirs:
        theirs.pause()
        assert why_not_ready(running.url, 5.0) == ""
        theirs.close()
        assert why_not_ready(running.url, 5.0) == ""


def _processes_of(target: Target) -> list[psutil.Process]:
    """The living ones, which all have its command line; zombies have none."""
    return [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == [*target.command]]
