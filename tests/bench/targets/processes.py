"""Helpers: targets that are stub servers, and what the system says of their processes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from baton.bench.targets.process import RunningTarget
from baton.bench.targets.spec import Target
from tests.free_port import free_port

STUB = Path(__file__).with_name("stub_server.py")
WAIT_S = 20.0


def stub_target(*behaviours: str, name: str = "stub") -> Target:
    port = free_port()
    return Target(name, f"http://127.0.0.1:{port}", (sys.executable, str(STUB), str(port), *behaviours))


def start(target: Target, ready_timeout_s: float = WAIT_S, patience_s: float = WAIT_S) -> RunningTarget:
    return RunningTarget(target, ready_timeout_s, lambda _: None, patience_s)


def state_of(pid: int) -> str:
    """The letter of its state, "" when it has gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def is_running(pid: int) -> bool:
    return state_of(pid) not in ("", "Z", "X")


def wait_for(is_true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not is_true():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
