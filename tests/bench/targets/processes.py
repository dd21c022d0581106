"""Helpers: targets that are mock servers with workers, and what the system says of processes."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

from baton.bench.targets.process import RunningTarget
from baton.bench.targets.spec import Target, parse_target
from tests.bench.targets.mocks import mock_target

WAIT_S = 20.0


def target_of(behaviour: str = "workers") -> Target:
    return parse_target(mock_target("mock", behaviour))


def start(target: Target, ready_timeout_s: float = WAIT_S, patience_s: float = WAIT_S) -> RunningTarget:
    return RunningTarget(target, ready_timeout_s, lambda _: None, patience_s)


def status_of(pid: int) -> str:
    """ "" when it has gone."""
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return ""


def is_running(pid: int) -> bool:
    return status_of(pid) not in ("", psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def wait_for(is_true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not is_true():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
