from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from baton.kvtransfer.messages import ProcessIdentity
from baton.kvtransfer.process_identity import is_gone, shares_memory, this_process

_SHOW_IDENTITY = """
import sys, time
from baton.kvtransfer.process_identity import this_process
me = this_process()
print(me.host, me.pid, me.start_ticks, flush=True)
time.sleep(60)
"""


@pytest.fixture
def child() -> Iterator[tuple[subprocess.Popen[str], ProcessIdentity]]:
    """A living process and its own identity."""
    with subprocess.Popen([sys.executable, "-c", _SHOW_IDENTITY], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        host, pid, start_ticks = process.stdout.readline().split()
        yield process, ProcessIdentity(host, int(pid), int(start_ticks))
        process.kill()


def test_a_living_process_is_not_gone() -> None:
    assert not is_gone(this_process())


def test_the_same_pid_with_another_start_is_gone() -> None:
    assert is_gone(replace(this_process(), start_ticks=this_process().start_ticks + 1))


def test_stopped_killed_zombie_and_reaped(child: tuple[subprocess.Popen[str], ProcessIdentity]) -> None:
    process, identity = child
    assert shares_memory(this_process(), identity)
    assert not is_gone(identity)
    os.kill(process.pid, signal.SIGSTOP)
    assert not is_gone(identity)
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, not reaped
    assert is_gone(identity)
    process.wait()
    assert is_gone(identity)


def test_a_process_whose_state_cannot_be_read_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> str:
        raise OSError(24, "Too many open files")

    me = this_process()
    monkeypatch.setattr(Path, "read_text", fail)
    assert not is_gone(me)


def test_processes_with_unknown_hosts_share_nothing() -> None:
    unknown = replace(this_process(), host="")
    assert not shares_memory(unknown, unknown)
    assert not shares_memory(this_process(), replace(this_process(), host="another boot"))
