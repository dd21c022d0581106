from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from engine.api.errors import TransferFailed
from kvtransfer.integrity import block_checksum, damaged_blocks
from kvtransfer.messages import HandoffKey
from kvtransfer.pusher import Pusher, PushJob, PushReport
from kvtransfer.transports.base import Blocks, Move
from tests.kvtransfer.pools import key_of

_FAST_S = 0.2


class RecordingSender:
    """Notes what it was asked to push; `before` runs first, on the pushing thread."""

    def __init__(self, before: Callable[[], object] = lambda: None) -> None:
        self.pushed: list[int] = []
        self.is_closed = False
        self._before = before

    def push(self, key: HandoffKey, moves: Sequence[Move]) -> None:
        self._before()
        self.pushed.extend(move.source for move in moves)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def blocks() -> Blocks:
    return np.random.default_rng(0).integers(0, 256, (64, 128), dtype=np.uint8)


@pytest.fixture
def pusher(blocks: Blocks) -> Iterator[Pusher]:
    pusher = Pusher(blocks)
    yield pusher
    pusher.close()


def job(sender: RecordingSender, *sources: int, number: int = 1) -> PushJob:
    return PushJob(key_of(number), sender, [Move(index, source, source, 1) for index, source in enumerate(sources)])


def collect(pusher: Pusher, count: int) -> list[PushReport]:
    reports: list[PushReport] = []
    deadline_s = time.monotonic() + 5
    while len(reports) < count and time.monotonic() < deadline_s:
        pusher.wakeup.settimeout(0)
        reports += pusher.reports()
        time.sleep(0.001)
    time.sleep(0.01)
    return reports + pusher.reports()


def test_every_job_is_reported_once_with_the_checksums_of_its_blocks(pusher: Pusher, blocks: Blocks) -> None:
    sender = RecordingSender()
    for number in range(20):
        pusher.submit(job(sender, number, number + 20, number=number))
    reports = collect(pusher, 20)
    assert [report.key for report in reports] == [key_of(number) for number in range(20)]
    for number, report in enumerate(reports):
        assert report.error == ""
        assert report.checksums == [block_checksum(blocks[number]), block_checksum(blocks[number + 20])]


def test_wakes_whoever_waits_for_reports(pusher: Pusher) -> None:
    pusher.submit(job(RecordingSender(), 1))
    pusher.wakeup.settimeout(5)
    assert pusher.wakeup.recv(1)


def test_a_failing_sender_costs_its_job_only(pusher: Pusher) -> None:
    def refuse() -> None:
        raise TransferFailed("nobody there")

    def break_down() -> None:
        raise ZeroDivisionError("by zero")

    pusher.submit(job(RecordingSender(refuse), 1))
    pusher.submit(job(RecordingSender(break_down), 2))
    pusher.submit(job(RecordingSender(), 3))
    reports = collect(pusher, 3)
    assert [report.error for report in reports] == ["nobody there", "ZeroDivisionError: by zero", ""]
    assert [len(report.checksums) for report in reports] == [0, 0, 1]


def test_a_slow_sender_does_not_hold_up_whoever_submits(pusher: Pusher) -> None:
    gate = threading.Event()
    slow = RecordingSender(lambda: gate.wait(5))
    started_s = time.monotonic()
    for number in range(100):
        pusher.submit(job(slow, 1, number=number))
    assert time.monotonic() - started_s < _FAST_S
    assert pusher.reports() == []
    gate.set()
    assert len(collect(pusher, 100)) == 100


def test_cancel_stops_between_blocks_and_is_reported(pusher: Pusher) -> None:
    reached, gate = threading.Event(), threading.Event()

    def wait() -> None:
        reached.set()
        gate.wait(5)

    sender = RecordingSender(wait)
    pusher.submit(job(sender, *range(64)))
    pusher.submit(job(sender, 1))
    pusher.submit(job(sender, 7, number=2))
    assert reached.wait(5)
    pusher.cancel(key_of(1))
    gate.set()
    reports = collect(pusher, 3)
    assert [(report.key, report.error) for report in reports] == [
        (key_of(1), "cancelled"),
        (key_of(1), "cancelled"),
        (key_of(2), ""),
    ]
    assert len(sender.pushed) < 64
    assert sender.pushed[-1] == 7


def test_after_forget_the_key_can_be_pushed_again(pusher: Pusher) -> None:
    pusher.cancel(key_of(1))
    pusher.forget(key_of(1))
    pusher.submit(job(RecordingSender(), 1))
    assert [report.error for report in collect(pusher, 1)] == [""]


def test_a_sender_is_retired_after_its_jobs(pusher: Pusher) -> None:
    gate = threading.Event()
    sender = RecordingSender(lambda: gate.wait(5))
    pusher.submit(job(sender, 1))
    pusher.retire(sender)
    pusher.submit(job(RecordingSender(), 2))
    assert not sender.is_closed
    gate.set()
    assert [report.error for report in collect(pusher, 2)] == ["", ""]
    assert sender.is_closed


def test_a_sender_that_cannot_be_closed_does_not_end_the_thread(pusher: Pusher) -> None:
    class Stubborn(RecordingSender):
        def close(self) -> None:
            raise OSError("no")

    pusher.retire(Stubborn())
    pusher.submit(job(RecordingSender(), 2))
    assert [report.error for report in collect(pusher, 1)] == [""]


def test_checksums_find_a_single_changed_bit(blocks: Blocks) -> None:
    checksums = [block_checksum(block) for block in blocks]
    blocks[5, 100] ^= 1
    blocks[[7, 8]] = blocks[[8, 7]]
    assert damaged_blocks(blocks, list(range(64)), checksums) == [5, 7, 8]
