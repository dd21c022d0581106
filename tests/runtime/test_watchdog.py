"""The watchdog: what stands is noticed and named, what was stopped as a whole is not."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from baton.runtime.watchdog import EXIT_STATUS, LOOK_INTERVAL_S, Beat, Watchdog

ROOT = Path(__file__).parents[2]
LIMIT_S = 40.0
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="what a thread waits for is read from /proc")


@dataclass
class Program:
    """A program on a clock of its own, whose watchdog is called by hand."""

    now_s: float = 100.0
    ends: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.watchdog = Watchdog(self.ends.append, lambda: self.now_s)

    def lives(self, seconds: float, *touched: Beat) -> None:
        for _ in range(int(seconds / LOOK_INTERVAL_S)):
            self.now_s += LOOK_INTERVAL_S
            for beat in touched:
                beat.touch()
            self.watchdog.look()


@pytest.fixture
def program() -> Program:
    return Program()


def on_a_thread(run: Callable[[], None]) -> None:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def test_a_part_that_goes_on_is_left_alone(program: Program) -> None:
    beat = program.watchdog.beat("loop", LIMIT_S)
    program.lives(3 * LIMIT_S, beat)
    assert (program.watchdog.complaint, program.ends) == ("", [])


def test_a_part_that_stands_is_complained_of_and_ends_the_program_at_its_limit(program: Program) -> None:
    loop, thread = program.watchdog.beat("loop", LIMIT_S), program.watchdog.beat("transfer thread", LIMIT_S)
    thread.touch()
    program.lives(LIMIT_S / 4, loop)
    assert program.watchdog.complaint == ""
    program.lives(1.0, loop)
    assert program.watchdog.complaint == "the transfer thread has been still for 11 s"
    program.lives(LIMIT_S - 11.0, loop)
    assert program.ends == []
    program.lives(1.0, loop)
    (reason,) = program.ends
    assert reason.startswith("the transfer thread has been still for 41 s, in ")


def test_a_thread_that_is_gone_is_named_so(program: Program) -> None:
    on_a_thread(program.watchdog.beat("heartbeat thread", LIMIT_S).touch)
    program.lives(LIMIT_S + 1.0)
    assert program.ends == ["the heartbeat thread has been still for 41 s, its thread is gone"]


def test_time_in_which_the_whole_process_stood_does_not_count(program: Program) -> None:
    beat = program.watchdog.beat("loop", LIMIT_S)
    program.lives(1.0, beat)
    for _ in range(5):
        program.now_s += 10 * LIMIT_S
        program.watchdog.look()
    assert (program.watchdog.complaint, program.ends) == ("", [])
    program.lives(LIMIT_S)
    assert program.ends[0].startswith("the loop has been still for 41 s")


def test_a_part_that_has_not_begun_or_has_ended_may_be_still(program: Program) -> None:
    program.watchdog.beat("not begun", LIMIT_S)
    ended = program.watchdog.beat("ended", LIMIT_S)
    for_ever = program.watchdog.beat("allowed to be still", 0.0)
    program.lives(1.0, ended, for_ever)
    ended.rest()
    program.lives(2 * LIMIT_S)
    assert (program.watchdog.complaint, program.ends) == ("", [])


def test_metrics_say_for_how_long_a_part_has_been_still(program: Program) -> None:
    registry = CollectorRegistry()
    registry.register(program.watchdog)
    program.watchdog.beat("loop", LIMIT_S).touch()
    program.lives(7.0)
    assert registry.get_sample_value("baton:watchdog_still_seconds", {"part": "loop"}) == 7.0


HANGING = """
import ctypes, os, sys, threading
from baton.runtime import watchdog

watchdog.LOOK_INTERVAL_S = 0.05
guard = watchdog.Watchdog()
guard.start(float(sys.argv[1]))
libc = ctypes.PyDLL(None) if sys.argv[2] == "with the lock" else ctypes.CDLL(None)


def stand_still():
    libc.sleep(int(sys.argv[3]))


sys.stdout.write("stands\\n")
sys.stdout.flush()
stand_still()
guard.close()
"""


def standing(limit_s: float, how: str, for_s: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HANGING, str(limit_s), how, str(for_s)]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert program.stdout is not None
    assert program.stdout.readline() == "stands\n"
    return program


@linux_only
def test_a_program_whose_interpreter_stands_still_is_ended_and_its_log_says_where() -> None:
    program = standing(0.25, "with the lock", 600)
    _, log = program.communicate(timeout=60)
    assert program.returncode == -signal.SIGABRT
    first, *stacks = log.splitlines()
    assert first.startswith(f"critical: nothing of Python has run in process {program.pid} for 0.25 s")
    assert "stand_still" in "".join(stacks)


@linux_only
def test_a_program_that_was_stopped_or_lets_others_run_meanwhile_is_not_ended() -> None:
    """The limit is a quarter of a second. The one stands for a second, and the other is stopped for as long."""
    calling, stopped = standing(0.25, "without the lock", 1), standing(0.25, "without the lock", 600)
    stopped.send_signal(signal.SIGSTOP)
    assert calling.communicate(timeout=60)[1] == ""
    stopped.send_signal(signal.SIGTERM)
    stopped.send_signal(signal.SIGCONT)
    assert stopped.communicate(timeout=60)[1] == ""
    assert (calling.returncode, stopped.returncode) == (0, -signal.SIGTERM)


PROGRAM = """
import threading
from baton.runtime import watchdog
from baton.runtime.process import configure_logging

configure_logging("info")
watchdog.LOOK_INTERVAL_S = 0.05
guard = watchdog.Watchdog()
guard.start()
beat = guard.beat("loop", 0.5)
beat.touch()
threading.Event().wait()
"""


def test_a_program_that_hangs_ends_with_a_line_that_says_where() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=ROOT, check=False, timeout=60
    )
    assert ended.returncode == EXIT_STATUS
    (line,) = ended.stderr.splitlines()
    assert "CRITICAL baton.runtime.watchdog: the loop has been still for" in line
    assert line.endswith("wait: this process cannot go on and ends")
