from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from baton.kvtransfer import process_identity
from baton.kvtransfer.messages import ProcessIdentity
from baton.kvtransfer.process_identity import is_elsewhere, is_gone, shares_memory, shares_processes, this_process

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


MINE, UNKNOWN = ProcessIdentity("boot:1:5", 10, 20), ProcessIdentity("", 10, 20)


@pytest.mark.parametrize(
    ("theirs", "memory", "processes", "elsewhere"),
    [
        ("boot:1:5", True, True, False),
        ("boot:1:6", False, True, False),
        ("boot:2:5", False, False, True),
        ("other:1:5", False, False, True),
        ("", False, False, False),
    ],
)
def test_what_two_processes_share_is_told_by_their_hosts(
    theirs: str, memory: bool, processes: bool, elsewhere: bool
) -> None:
    other = ProcessIdentity(theirs, 11, 21)
    assert (shares_memory(MINE, other), shares_processes(MINE, other)) == (memory, processes)
    assert is_elsewhere(MINE, other) is elsewhere
    assert is_elsewhere(other, MINE) is elsewhere
    for nothing in (shares_memory(UNKNOWN, other), shares_processes(UNKNOWN, other), is_elsewhere(UNKNOWN, other)):
        assert nothing is False


def test_an_identity_names_boot_processes_and_memory() -> None:
    boot, processes, memory = this_process().host.split(":")
    assert boot == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert (int(processes), int(memory)) == (os.stat("/proc/self/ns/pid").st_ino, os.stat("/dev/shm").st_dev)
    assert this_process().pid == os.getpid()


@pytest.mark.parametrize(("state", "gone"), [("R", False), ("T", False), ("Z", True), ("X", True)])
def test_a_process_is_known_by_its_start_although_its_name_has_spaces(
    monkeypatch: pytest.MonkeyPatch, state: str, gone: bool
) -> None:
    fields = [state, *map(str, range(100, 119))]
    monkeypatch.setattr(Path, "read_text", lambda path: f"7 (a ) b) {' '.join(fields)}")
    assert is_gone(ProcessIdentity("boot:1:5", 7, 118)) is gone
    assert is_gone(ProcessIdentity("boot:1:5", 7, 117))


def test_on_a_system_that_does_not_say_a_host_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_identity, "_start_ticks", lambda pid: 5)
    monkeypatch.setattr(os, "stat", lambda path: (_ for _ in ()).throw(OSError(13, "Permission denied")))
    assert this_process() == ProcessIdentity("", os.getpid(), 5)
