"""What watches over one program on its machine."""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton.launch.cluster.backend import Phase, Program, Report
from baton.launch.cluster.keeper import Keeper, Secrets
from baton.launch.console import Console
from tests.launch.cluster.conformance import MODULE

KEY = "k" * 40
SECRETS = Secrets(KEY + "\n", "api-key-of-the-router")
WAIT_S = 60.0


class Kept:
    """A keeper, and what it has logged."""

    def __init__(self, machine: str = "machine-1") -> None:
        self.log = io.StringIO()
        self.keeper = Keeper(machine, "127.0.0.1", Console(self.log))

    def start(self, behaviour: str = "steady", host_flags: tuple[str, ...] = ("--host",)) -> None:
        self.keeper.start(Program("decode-0", MODULE, (behaviour,), {"SOME": "variable"}, host_flags), SECRETS)

    def wait(self, phase: Phase) -> Report:
        self.until(lambda: self.keeper.report().phase == phase, str(phase))
        return self.keeper.report()

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline_s, f"waited for {what}: {self.keeper.report()}\n{self.log.getvalue()}"
            time.sleep(0.01)


@pytest.fixture
def kept() -> Iterator[Kept]:
    """One without a program."""
    made = Kept()
    yield made
    made.keeper.close()


def test_a_program_gets_the_key_in_memory_and_nobody_sees_it(kept: Kept) -> None:
    kept.start()
    report = kept.wait(Phase.READY)
    assert report.address == f"http://127.0.0.1:{report.pid}"
    kept.until(lambda: "a key of 40 characters" in kept.log.getvalue(), "the program read the key")
    shown = Path(f"/proc/{report.pid}/cmdline").read_bytes() + Path(f"/proc/{report.pid}/environ").read_bytes()
    assert KEY.encode() not in shown
    assert b"SOME=variable" in shown
    assert SECRETS.api_key.encode() not in shown, "that is the router's"
    assert KEY not in kept.log.getvalue() + repr(SECRETS) + repr(report)


def test_a_program_that_exits_may_be_started_again(kept: Kept) -> None:
    kept.start()
    before = kept.wait(Phase.READY)
    kept.keeper.terminate()
    assert kept.keeper.report().phase in (Phase.STOPPING, Phase.EXITED)
    assert kept.wait(Phase.EXITED).reason == "exited with status 0"
    kept.start()
    assert kept.wait(Phase.READY).pid != before.pid


def test_a_program_that_runs_is_left_alone(kept: Kept) -> None:
    kept.start()
    before = kept.wait(Phase.READY)
    kept.start()
    assert kept.keeper.report() == before


def test_what_runs_on_a_further_machine_is_told_where_its_member_waits(kept: Kept) -> None:
    place = kept.keeper.meeting_place()
    host, port = place.split(":")
    assert (host, kept.keeper.meeting_place()) == ("127.0.0.1", place)
    member = Program("decode-0", MODULE, ("steady",), {}, wait_flag="--rank-port")
    kept.keeper.start(member, SECRETS)
    said = Path(f"/proc/{kept.wait(Phase.READY).pid}/cmdline").read_bytes().split(b"\0")
    assert f"--rank-port={port}".encode() in said
    with socket.socket() as listener:  # as ZMQ listens: the port is kept for this
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, int(port)))
        listener.listen()
    other = Kept("machine-2")
    try:
        other.keeper.start(Program("decode-0/1", MODULE, ("steady",), {}, dial_flag="--driver"), SECRETS, place)
        said = Path(f"/proc/{other.wait(Phase.READY).pid}/cmdline").read_bytes().split(b"\0")
    finally:
        other.keeper.close()
    assert f"--driver={place}".encode() in said


def test_an_end_comes_with_its_reason(kept: Kept) -> None:
    kept.start("broken")
    assert kept.wait(Phase.EXITED).reason == "no such model: llama-17"


def test_closing_ends_even_what_is_deaf(kept: Kept) -> None:
    kept.start("stubborn")
    pid = kept.wait(Phase.READY).pid
    kept.keeper.terminate()
    kept.keeper.close()
    assert kept.keeper.report().phase == Phase.EXITED
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_who_listens_everywhere_is_reached_at_its_machine(kept: Kept) -> None:
    kept.keeper = Keeper("machine-1", "10.0.0.7", Console(kept.log))
    kept.keeper.start(Program("router", MODULE, ("steady", "--host=0.0.0.0"), {}), SECRETS)
    report = kept.wait(Phase.READY)
    assert report.address == f"http://10.0.0.7:{report.pid}"
