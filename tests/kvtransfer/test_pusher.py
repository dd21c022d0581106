from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import xxhash

from baton.kvtransfer.integrity import DOT64, NONE, block_checksum
from baton.kvtransfer.layers import LayerProgress
from baton.kvtransfer.messages import ProcessIdentity
from baton.kvtransfer.pools.host import HostPool
from baton.kvtransfer.pusher import CONNECT_S, STANDSTILL_S, Pusher, PushJob, PushReport
from baton.kvtransfer.transports.base import Blocks, Move
from baton.wire.errors import TransferFailed
from baton.wire.request_key import RequestKey
from tests.kvtransfer.late_stream import late_pool
from tests.kvtransfer.pools import key_of

_BLOCK_BYTES = 128
LAYER_ENDS = (32, 48, 96, 128)
"""Four layers of different sizes."""


class RecordingSender:
    """Records what it was asked to push. `before` runs first, and may say that no piece is accepted now."""

    is_silent = True
    pushes_parts = True
    needs_fence = False
    piece_bytes = 2 * _BLOCK_BYTES
    writers: Sequence[ProcessIdentity] = ()

    def __init__(self, before: Callable[[], object] = lambda: True) -> None:
        self.pushed: list[int] = []
        self.parts: list[tuple[tuple[int, ...], int, int]] = []
        self.reading: set[RequestKey] = set()
        self.num_polls = 0
        self.is_closed = False
        self._before = before

    def push(self, key: RequestKey, moves: Sequence[Move]) -> bool:
        if not self._before():
            return False
        self.pushed.extend(move.source for move in moves)
        return True

    def push_part(self, key: RequestKey, moves: Sequence[Move], begin_byte: int, end_byte: int) -> None:
        self.parts.append((tuple(move.source for move in moves), begin_byte, end_byte))

    def poll(self) -> None:
        self.num_polls += 1

    def wait_on(self) -> Sequence[Any]:
        return ()

    def is_reading(self, key: RequestKey) -> bool:
        return key in self.reading

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def blocks() -> Blocks:
    return np.random.default_rng(0).integers(0, 256, (64, _BLOCK_BYTES), dtype=np.uint8)


@pytest.fixture
def pusher(blocks: Blocks) -> Pusher:
    return Pusher(HostPool(blocks))


def job(sender: RecordingSender, *sources: int, number: int = 1, layers: LayerProgress | None = None) -> PushJob:
    moves = [Move(index, source, source, 1) for index, source in enumerate(sources)]
    return PushJob(key_of(number), sender, moves, layers)


def run(pusher: Pusher, now_s: float = 0.0) -> list[PushReport]:
    """Call `work` until there is nothing to do right now."""
    reports: list[PushReport] = []
    for _ in range(1000):
        wait_s = pusher.work(now_s)
        reports += pusher.reports()
        if wait_s:
            return reports
    raise AssertionError("there is always more to do")


def test_every_job_is_reported_once_with_the_checksums_of_its_blocks(pusher: Pusher, blocks: Blocks) -> None:
    sender = RecordingSender()
    for number in range(20):
        pusher.submit(job(sender, number, number + 20, number + 40, number=number), 0.0)
    reports = run(pusher)
    assert [report.key for report in reports] == [key_of(number) for number in range(20)]
    for number, report in enumerate(reports):
        assert report.error == ""
        assert report.checksums == [block_checksum(blocks[number + shift]) for shift in (0, 20, 40)]
    assert run(pusher) == []


def test_a_piece_is_consecutive_in_its_grant(pusher: Pusher) -> None:
    pieces: list[list[int]] = []

    class Listing(RecordingSender):
        piece_bytes = 3 * _BLOCK_BYTES

        def push(self, key: RequestKey, moves: Sequence[Move]) -> bool:
            pieces.append([move.index for move in moves])
            return True

    moves = [Move(index, index, index, 1) for index in (0, 1, 2, 3, 7, 9, 10)]
    pusher.submit(PushJob(key_of(1), Listing(), moves), 0.0)
    assert [report.error for report in run(pusher)] == [""]
    assert pieces == [[0, 1, 2], [3], [7], [9, 10]]


def test_without_checksums_none_are_computed(blocks: Blocks) -> None:
    pusher = Pusher(HostPool(blocks), NONE)
    pusher.submit(job(RecordingSender(), 1, 2, 3), 0.0)
    assert [report.checksums for report in run(pusher)] == [[0, 0, 0]]


def test_a_failing_sender_fails_only_its_own_jobs(pusher: Pusher) -> None:
    def refuse() -> None:
        raise TransferFailed("not reachable")

    def break_down() -> None:
        raise ZeroDivisionError("by zero")

    refusing, broken, fine = RecordingSender(refuse), RecordingSender(break_down), RecordingSender()
    for number, sender in enumerate((refusing, broken, fine)):
        pusher.submit(job(sender, 1, number=number), 0.0)
        pusher.submit(job(sender, 2, number=number), 0.0)
    reports = {key_of(number): [] for number in range(3)}  # type: dict[RequestKey, list[str]]
    for report in run(pusher):
        reports[report.key].append(report.error)
    assert list(reports.values()) == [["not reachable"] * 2, ["ZeroDivisionError: by zero"] * 2, ["", ""]]
    assert pusher.failures() == [(refusing, "not reachable"), (broken, "ZeroDivisionError: by zero")]
    assert (refusing.is_closed, broken.is_closed, fine.is_closed) == (True, True, False)


def test_a_sender_that_accepts_nothing_does_not_delay_others(pusher: Pusher) -> None:
    slow, quick = RecordingSender(lambda: False), RecordingSender()
    pusher.submit(job(slow, 1, number=1), 0.0)
    pusher.submit(job(quick, 2, number=2), 0.0)
    assert [report.key for report in run(pusher)] == [key_of(2)]
    assert 0 < pusher.work(0.0) <= 0.001


def test_a_sender_that_makes_no_progress_fails(pusher: Pusher) -> None:
    taking = [True]
    sender = RecordingSender(lambda: taking.pop() if taking else False)
    pusher.submit(job(sender, *range(8)), 100.0)
    assert run(pusher, 100.0) == []
    assert run(pusher, 100.0 + STANDSTILL_S) == []
    (report,) = run(pusher, 100.1 + STANDSTILL_S)
    assert "took nothing for 5 s" in report.error
    assert sender.is_closed


def test_a_sender_may_take_longer_to_connect(pusher: Pusher) -> None:
    pusher.submit(job(RecordingSender(lambda: False), 1), 100.0)
    assert run(pusher, 100.0 + CONNECT_S) == []
    (report,) = run(pusher, 100.1 + CONNECT_S)
    assert "took nothing for 12 s" in report.error


def test_time_without_work_is_no_standstill(pusher: Pusher) -> None:
    sender = RecordingSender()
    pusher.submit(job(sender, 1), 0.0)
    run(pusher, 0.0)
    pusher.submit(job(sender, 2), 1000.0)
    assert [report.error for report in run(pusher, 1000.0)] == [""]


def test_cancel_begins_no_further_piece_and_is_reported(pusher: Pusher) -> None:
    taking = [True]
    sender = RecordingSender(lambda: taking.pop() if taking else False)
    pusher.submit(job(sender, *range(64)), 0.0)
    pusher.submit(job(sender, 1), 0.0)
    pusher.submit(job(sender, 7, number=2), 0.0)
    assert run(pusher) == []
    pusher.cancel(key_of(1))
    taking += [True]
    assert [(report.key, report.error) for report in run(pusher)] == [
        (key_of(1), "cancelled"),
        (key_of(1), "cancelled"),
        (key_of(2), ""),
    ]
    assert sender.pushed == [0, 1, 7]


def test_a_handoff_is_read_after_its_report_until_the_sender_is_done(pusher: Pusher) -> None:
    sender = RecordingSender()
    sender.reading.add(key_of(1))
    pusher.submit(job(sender, 1), 0.0)
    assert len(run(pusher)) == 1
    assert pusher.is_reading(key_of(1))
    pusher.retire(sender, "gone")
    num_polls = sender.num_polls
    pusher.work(0.0)
    assert sender.num_polls > num_polls, "a closed sender may still have to learn that nothing is read any more"
    sender.reading.clear()
    assert not pusher.is_reading(key_of(1))
    pusher.forget(key_of(1))
    num_polls = sender.num_polls
    pusher.work(0.0)
    assert sender.num_polls == num_polls


def test_jobs_of_a_retired_sender_end_with_the_reason(pusher: Pusher) -> None:
    sender = RecordingSender(lambda: False)
    pusher.submit(job(sender, 1), 0.0)
    run(pusher)
    pusher.retire(sender, "the receiver said hello again")
    assert [report.error for report in pusher.reports()] == ["the receiver said hello again"]
    assert sender.is_closed


def test_a_sender_that_cannot_be_closed_does_no_harm(pusher: Pusher) -> None:
    class Stubborn(RecordingSender):
        def close(self) -> None:
            raise OSError("no")

    pusher.retire(Stubborn(), "gone")
    pusher.submit(job(RecordingSender(), 2), 0.0)
    assert [report.error for report in run(pusher)] == [""]


def test_layers_are_pushed_as_they_are_stored_and_hashed_as_whole_blocks(pusher: Pusher, blocks: Blocks) -> None:
    sender, layers = RecordingSender(), LayerProgress(LAYER_ENDS, lambda: None)
    pusher.submit(job(sender, 5, 9, layers=layers), 0.0)
    assert run(pusher) == []
    layers.count()
    assert run(pusher) == []
    layers.count()
    layers.count()
    assert run(pusher, 1000.0) == [], "a step may take longer than a sender may stand still"
    layers.count()
    (report,) = run(pusher, 1000.0)
    assert sender.parts == [((5, 9), 0, 32), ((5, 9), 32, 96), ((5, 9), 96, 128)]
    assert report.checksums == [xxhash.xxh3_64_intdigest(blocks[source].tobytes()) for source in (5, 9)]


def test_a_step_that_fails_ends_its_job_and_not_its_sender(pusher: Pusher) -> None:
    sender, layers = RecordingSender(), LayerProgress(LAYER_ENDS, lambda: None)
    pusher.submit(job(sender, 5, layers=layers), 0.0)
    pusher.submit(job(sender, 6, number=2), 0.0)
    layers.count()
    assert run(pusher) == []
    layers.abandon()
    assert [(report.key, report.error) for report in run(pusher)] == [
        (key_of(1), "the step could not be computed"),
        (key_of(2), ""),
    ]
    assert not sender.is_closed


def test_abandoning_a_complete_step_changes_nothing(pusher: Pusher) -> None:
    layers = LayerProgress(LAYER_ENDS[-1:], lambda: None)
    pusher.submit(job(RecordingSender(), 5, layers=layers), 0.0)
    layers.count()
    layers.abandon()
    assert [report.error for report in run(pusher)] == [""]


def test_layers_wake_the_thread_only_after_it_follows_them(pusher: Pusher) -> None:
    wakes: list[int] = []
    layers = LayerProgress(LAYER_ENDS[1:], lambda: wakes.append(layers.num_done))
    layers.count()
    assert wakes == []
    pusher.submit(job(RecordingSender(), 5, layers=layers), 0.0)
    run(pusher)
    layers.count()
    layers.abandon()
    assert wakes == [2, 2]


@pytest.fixture
def late_pusher(blocks: Blocks, monkeypatch: pytest.MonkeyPatch) -> Pusher:
    """A pusher with a device that computes checksums late. Its turns do not end early on a busy machine."""
    monkeypatch.setattr("baton.kvtransfer.pusher._SLICE_S", 3600.0)
    return Pusher(late_pool(blocks, patience=20), DOT64)


def dot64_of(blocks: Blocks, sources: Sequence[int]) -> Sequence[int] | None:
    return HostPool(blocks).checksums(DOT64).begin(sources).take()


def test_a_job_is_reported_when_the_device_has_its_checksums(late_pusher: Pusher, blocks: Blocks) -> None:
    sender = RecordingSender()
    late_pusher.submit(job(sender, *range(9), number=1), 0.0)
    late_pusher.submit(job(sender, 40, number=2), 0.0)
    assert late_pusher.work(0.0) == 0.0
    assert sender.pushed == [*range(9), 40], "the next job does not wait for the checksums of the last"
    assert late_pusher.reports() == []
    reports = run(late_pusher)
    assert [(report.key, report.error) for report in reports] == [(key_of(1), ""), (key_of(2), "")]
    assert [report.checksums for report in reports] == [dot64_of(blocks, range(9)), dot64_of(blocks, [40])]


@pytest.mark.parametrize("how", ["cancelled", "gone"])
def test_a_job_that_ends_while_the_device_computes_is_reported_once(late_pusher: Pusher, how: str) -> None:
    sender = RecordingSender()
    late_pusher.submit(job(sender, 1, 2), 0.0)
    late_pusher.work(0.0)
    if how == "cancelled":
        late_pusher.cancel(key_of(1))
    else:
        late_pusher.retire(sender, how)
    assert [report.error for report in run(late_pusher)] == [how]
    assert run(late_pusher) == []


def test_layers_on_a_device_are_summed_as_they_are_stored(late_pusher: Pusher, blocks: Blocks) -> None:
    sender, layers = RecordingSender(), LayerProgress(LAYER_ENDS, lambda: None)
    true, blocks[[5, 9], 32:] = blocks.copy(), 0
    late_pusher.submit(job(sender, 5, 9, layers=layers), 0.0)
    bounds = list(pairwise((0, *LAYER_ENDS)))
    for begin, end in bounds:
        part = slice(begin, end)
        blocks[[5, 9], part] = true[[5, 9], part]
        layers.count()
        late_pusher.work(0.0)
    (report,) = run(late_pusher)
    assert sender.parts == [((5, 9), begin, end) for begin, end in bounds]
    assert report.checksums == dot64_of(true, [5, 9])


def test_each_piece_that_is_taken_gives_a_sender_more_time_and_layers_take_what_they_take(pusher: Pusher) -> None:
    taking = [True]
    sender = RecordingSender(lambda: taking.pop() if taking else False)
    pusher.submit(job(sender, *range(8)), 100.0)
    assert run(pusher, 100.0) == []
    taking.append(True)
    assert run(pusher, 104.0) == []
    assert run(pusher, 104.0 + STANDSTILL_S) == []
    (report,) = run(pusher, 104.1 + STANDSTILL_S)
    assert "took nothing" in report.error
    slow, layers = RecordingSender(), LayerProgress([_BLOCK_BYTES], lambda: None)
    pusher.submit(job(slow, 1, layers=layers), 200.0)
    pusher.submit(job(slow, 2), 200.0)
    assert run(pusher, 200.0) == []
    assert run(pusher, 300.0) == [], "the step that computes it takes long"
    layers.count()
    assert [each.error for each in run(pusher, 300.1)] == ["", ""]


def test_a_sender_may_take_one_block_at_a_time(pusher: Pusher) -> None:
    sizes: list[int] = []

    class Narrow(RecordingSender):
        piece_bytes = _BLOCK_BYTES - 1

        def push(self, key: RequestKey, moves: Sequence[Move]) -> bool:
            sizes.append(len(moves))
            return True

    pusher.submit(job(Narrow(), 1, 2, 3), 0.0)
    run(pusher)
    assert sizes == [1, 1, 1]


def test_a_job_behind_a_step_that_took_long_has_its_own_time(pusher: Pusher) -> None:
    sender, layers = RecordingSender(lambda: False), LayerProgress([_BLOCK_BYTES], lambda: None)
    pusher.submit(job(sender, 1, layers=layers), 200.0)
    pusher.submit(job(sender, 2), 200.0)
    assert run(pusher, 300.0) == []
    layers.abandon()
    assert [each.error for each in run(pusher, 300.1)] == ["the step could not be computed"]
    assert run(pusher, 300.0 + CONNECT_S) == []
    (report,) = run(pusher, 300.2 + CONNECT_S)
    assert "took nothing for 12 s" in report.error


def test_a_sender_is_polled_in_each_round_also_while_nothing_is_pushed(pusher: Pusher) -> None:
    sender = RecordingSender(lambda: False)
    pusher.submit(job(sender, 1), 0.0)
    for num_rounds in (1, 2, 3):
        pusher.work(0.0)
        assert sender.num_polls == num_rounds
