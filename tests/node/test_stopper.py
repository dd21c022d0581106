from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator

import pytest

from baton.node.stopper import Stopper


@pytest.fixture
def stopper() -> Iterator[Stopper]:
    with Stopper(timeout_s=30.0) as stopper:
        yield stopper


def is_readable(stopper: Stopper) -> bool:
    return bool(select.select([stopper.wakeup], [], [], 0)[0])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_signal_asks_to_finish_and_wakes_the_loop(stopper: Stopper, number: int) -> None:
    assert not stopper.is_asked
    os.kill(os.getpid(), number)
    assert stopper.is_asked
    assert is_readable(stopper)
    now_s = time.monotonic()
    assert not stopper.is_overdue(now_s + 29.0)
    assert stopper.is_overdue(now_s + 31.0)


def test_a_second_signal_ends_at_once(stopper: Stopper) -> None:
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
    assert stopper.is_overdue(time.monotonic())


def test_the_router_asks_to_finish_and_a_signal_then_changes_nothing(stopper: Stopper) -> None:
    now_s = time.monotonic()
    stopper.ask(now_s, starts_again=False)
    assert (stopper.is_asked, stopper.stays_away) == (True, True)
    os.kill(os.getpid(), signal.SIGTERM)
    assert not stopper.is_overdue(now_s + 29.0)
    assert stopper.is_overdue(now_s + 30.0)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stopper.is_overdue(time.monotonic())


def test_the_router_asks_after_a_signal(stopper: Stopper) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    stopper.ask(time.monotonic() + 20.0, starts_again=True)
    assert not stopper.stays_away
    assert stopper.is_overdue(time.monotonic() + 31.0)


def test_draining_empties_the_wake_up_socket(stopper: Stopper) -> None:
    for _ in range(100):
        os.kill(os.getpid(), signal.SIGTERM)
    stopper.drain()
    assert not is_readable(stopper)
    stopper.drain()


def test_nothing_is_overdue_before_a_signal(stopper: Stopper) -> None:
    assert not stopper.is_overdue(float("inf"))


def test_what_handled_signals_before_handles_them_again() -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with Stopper(timeout_s=30.0):
        assert signal.getsignal(signal.SIGTERM) != handlers[0]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert signal.set_wakeup_fd(-1) == -1
