"""Waiting for a CUDA device, with events that are told when to pass: deadlines, order and failures need no GPU."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from baton.device import cuda
from baton.device.base import DeviceFailed
from baton.device.events import CudaEvent
from baton.device.notices import MAX_NOTICES, NoticeThread


class NativeEvent:
    """Stands for torch's event: passes when the test says so. `error` is raised by a query, as CUDA does for what
    failed before.
    """

    def __init__(self, error: Exception | None = None) -> None:
        self.has_passed = threading.Event()
        self.error = error

    def query(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.has_passed.is_set()


@pytest.fixture
def notices() -> Iterator[NoticeThread]:
    thread = NoticeThread(begin=lambda: None)
    yield thread
    thread.close()
    assert not thread._thread.is_alive()


def test_a_device_that_makes_no_progress_is_a_failed_device() -> None:
    with pytest.raises(DeviceFailed, match=r"did not get anything done for 0\.01 s"):
        CudaEvent(native=NativeEvent()).wait(0.01)


def test_an_error_of_the_device_is_its_end() -> None:
    with pytest.raises(DeviceFailed, match=r"the CUDA device failed: illegal memory access$"):
        CudaEvent(native=NativeEvent(RuntimeError("illegal memory access\nmore lines"))).wait(1.0)


def test_an_error_of_the_device_names_what_came_before_it() -> None:
    try:
        raise ValueError("a value was asked for\nmore lines")
    except ValueError:
        with pytest.raises(DeviceFailed, match=r"failed: capture invalidated \(after: a value was asked for\)$"):
            CudaEvent(native=NativeEvent(RuntimeError("capture invalidated"))).wait(1.0)


@pytest.mark.parametrize("was_enabled", [True, False])
def test_nothing_is_collected_while_recording(was_enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(gc, "isenabled", lambda: was_enabled)
    monkeypatch.setattr(gc, "disable", lambda: calls.append("disable"))
    monkeypatch.setattr(gc, "enable", lambda: calls.append("enable"))
    with contextlib.suppress(ValueError), cuda._without_collection():
        calls.append("inside")
        raise ValueError
    assert calls == ["disable", "inside", *(["enable"] if was_enabled else [])]


def test_notices_wait_for_their_events_and_keep_their_order(notices: NoticeThread) -> None:
    events, heard = [NativeEvent(), NativeEvent()], list[int]()
    for number, event in enumerate(events):
        notices.add(CudaEvent(native=event), partial(heard.append, number))
    events[1].has_passed.set()
    with pytest.raises(DeviceFailed, match="did not come within"):
        notices.settle(0.05)
    assert heard == []
    events[0].has_passed.set()
    notices.settle(5.0)
    assert heard == [0, 1]


@pytest.mark.parametrize("where", ["event", "call"])
def test_a_notice_that_fails_is_raised_when_settling(notices: NoticeThread, where: str) -> None:
    event = NativeEvent(RuntimeError("lost") if where == "event" else None)
    event.has_passed.set()

    def call() -> None:
        raise ValueError("lost")

    notices.add(CudaEvent(native=event), call)
    with pytest.raises(DeviceFailed, match="lost"):
        notices.settle(5.0)


def test_notices_are_bounded(notices: NoticeThread) -> None:
    event = NativeEvent()
    for _ in range(MAX_NOTICES):
        notices.add(CudaEvent(native=event), lambda: None)
    with pytest.raises(DeviceFailed, match="notices wait for the device"):
        add_two(notices, event)  # the thread may hold one of them already
    event.has_passed.set()
    notices.settle(10.0)


def add_two(notices: NoticeThread, event: NativeEvent) -> None:
    for _ in range(2):
        notices.add(CudaEvent(native=event), lambda: None)
