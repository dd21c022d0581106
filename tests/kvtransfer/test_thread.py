from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import pytest

from baton.kvtransfer.thread import MAX_IDLE_S, TransferThread
from baton.runtime.watchdog import Beat
from baton.wire.errors import RequestFailed

WAIT_S = 30.0
Thread: TypeAlias = TransferThread[Callable[[float], object]]


class RecordingSide:
    """Records when it was called. `wait_s` is what `round` returns; `error` is raised while it is set.

    Its commands are functions of the time.
    """

    def __init__(self) -> None:
        self.rounds: list[float] = []
        self.threads: set[int] = set()
        self.wait_s = 1000.0
        self.error: Exception | None = None
        self.is_closed = threading.Event()
        self.end, self.other_end = socket.socketpair()

    def do(self, command: Callable[[float], object], now_s: float) -> None:
        command(now_s)

    def wait_on(self) -> Sequence[Any]:
        return [self.end]

    def round(self, now_s: float) -> float:
        if self.error is not None:
            raise self.error
        self.rounds.append(now_s)
        self.threads.add(threading.get_ident())
        return self.wait_s

    def close(self) -> None:
        self.end.close()
        self.other_end.close()
        self.is_closed.set()


@pytest.fixture
def side() -> RecordingSide:
    return RecordingSide()


@pytest.fixture
def thread(side: RecordingSide) -> Iterator[Thread]:
    thread = TransferThread(side, "test", lambda: None)
    thread.start()
    yield thread
    thread.close()
    assert side.is_closed.is_set()


def run(thread: Thread) -> None:
    """Wait until all commands that were posted are done."""
    done = threading.Event()
    thread.post(lambda now_s: done.set())
    assert done.wait(WAIT_S)


def has_more_rounds(side: RecordingSide, num_rounds: int) -> bool:
    return len(side.rounds) > num_rounds


def until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_commands_run_in_order_on_the_thread_of_the_side(thread: Thread, side: RecordingSide) -> None:
    found: list[tuple[int, int]] = []

    def note(number: int, now_s: float) -> None:
        found.append((number, threading.get_ident()))

    for number in range(100):
        thread.post(partial(note, number))
    run(thread)
    assert [number for number, _ in found] == list(range(100))
    assert {ident for _, ident in found} == side.threads
    assert threading.get_ident() not in side.threads


def test_a_round_follows_a_command_and_whatever_becomes_readable(thread: Thread, side: RecordingSide) -> None:
    for stimulus in (lambda: run(thread), lambda: side.other_end.send(b"1"), thread.wake):
        num_rounds = len(side.rounds)
        stimulus()
        until(partial(has_more_rounds, side, num_rounds))
        side.end.setblocking(False)
        run(thread)


def test_an_idle_side_is_called_a_few_times_a_second_and_no_more(thread: Thread, side: RecordingSide) -> None:
    run(thread)
    num_rounds, begun_s = len(side.rounds), time.monotonic()
    until(lambda: len(side.rounds) >= num_rounds + 4)
    # the first two may have been due at once; on a busy machine they come later, and never sooner
    assert time.monotonic() - begun_s > 1.9 * MAX_IDLE_S


def test_a_side_with_more_to_do_is_called_at_once(thread: Thread, side: RecordingSide) -> None:
    side.wait_s = 0.0
    run(thread)
    num_rounds, begun_s = len(side.rounds), time.monotonic()
    until(lambda: len(side.rounds) >= num_rounds + 200)
    assert time.monotonic() - begun_s < 100 * MAX_IDLE_S


def test_what_the_side_waits_for_no_longer_wakes_it_no_more(thread: Thread, side: RecordingSide) -> None:
    ours, theirs = socket.socketpair()
    run(thread)
    former, side.end = side.end, ours
    run(thread)
    side.other_end.send(b"1")  # and nobody reads it
    run(thread)
    num_rounds, begun_s = len(side.rounds), time.monotonic()
    until(lambda: len(side.rounds) >= num_rounds + 4)
    assert time.monotonic() - begun_s > 1.9 * MAX_IDLE_S
    former.close()
    theirs.close()


def test_a_side_that_fails_is_closed_and_its_error_is_reported(thread: Thread, side: RecordingSide) -> None:
    thread.require_alive()
    side.error = ZeroDivisionError("by zero")
    thread.wake()
    assert side.is_closed.wait(WAIT_S)
    with pytest.raises(RequestFailed, match="transfer thread has failed: by zero"):
        thread.require_alive()
    thread.post(lambda now_s: None)


def test_the_thread_begins_before_its_side_does(side: RecordingSide) -> None:
    begun: list[tuple[int, int]] = []
    thread = TransferThread(side, "test", lambda: begun.append((threading.get_ident(), len(side.rounds))))
    thread.start()
    run(thread)
    thread.close()
    assert begun == [(ident, 0) for ident in side.threads]


def test_a_thread_that_cannot_begin_does_nothing_and_says_so(side: RecordingSide) -> None:
    thread = TransferThread(side, "test", lambda: [][0])
    thread.start()
    assert side.is_closed.wait(WAIT_S)
    assert not side.rounds
    assert isinstance(thread.failure, IndexError)
    thread.close()


def test_a_side_that_stands_lets_the_beat_grow_old(side: RecordingSide) -> None:
    now = itertools.count()
    beat = Beat("transfer thread", 60.0, lambda: float(next(now)))
    thread = TransferThread(side, "test", lambda: None, beat)
    thread.start()
    run(thread)
    stands, goes_on = threading.Event(), threading.Event()

    def stand(now_s: float) -> None:
        stands.set()
        goes_on.wait(WAIT_S)

    thread.post(stand)
    assert stands.wait(WAIT_S)
    last_s = next(now)
    assert beat.age_s(last_s + 100.0) >= 100.0
    goes_on.set()
    run(thread)
    assert beat.age_s(last_s + 100.0) < 100.0
    thread.close()
    assert beat.age_s(last_s + 1000.0) == 0.0


def test_a_command_that_fails_does_the_same(thread: Thread, side: RecordingSide) -> None:
    thread.post(lambda now_s: [][0])
    assert side.is_closed.wait(WAIT_S)
    assert isinstance(thread.failure, IndexError)


def test_a_thread_that_would_wait_for_long_is_woken_and_closed_at_once(
    side: RecordingSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.kvtransfer.thread.MAX_IDLE_S", 600.0)
    thread: Thread = TransferThread(side, "test", lambda: None)
    thread.start()
    until(lambda: len(side.rounds) == 1)
    thread.wake()
    until(lambda: len(side.rounds) == 2)
    thread.close()
    assert side.is_closed.is_set()


@pytest.mark.parametrize(
    ("wait_s", "wait_ms"), [(0.0, 0), (0.0001, 1), (0.001, 1), (0.0011, 2), (0.2, 200), (0.2001, 201)]
)
def test_a_wait_is_rounded_up_to_milliseconds(
    side: RecordingSide, monkeypatch: pytest.MonkeyPatch, wait_s: float, wait_ms: int
) -> None:
    waits: list[int] = []
    monkeypatch.setattr("baton.kvtransfer.thread.zmq.Poller.poll", lambda poller, timeout_ms: waits.append(timeout_ms))
    side.wait_s = wait_s
    thread: Thread = TransferThread(side, "test", lambda: None)
    thread._turn()
    assert waits == [wait_ms]
    thread.close()
    side.close()
