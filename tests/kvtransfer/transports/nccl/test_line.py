"""What passes between the transfer thread and the thread of a pair, and how long it is waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from baton.kvtransfer.transports.nccl.line import Line, Stopped, begin_thread, reason_of
from baton.kvtransfer.transports.nccl.wire import PairAlive, StoreEntry

ENTRY = StoreEntry("key", b"value")


def test_items_come_in_their_order_and_none_after_the_wait() -> None:
    line = Line()
    assert (len(line), line.take(0.0), line.take(0.001)) == (0, None, None)
    for item in ("one", "two"):
        line.put(item)
    assert (len(line), line.take(0.0), line.take(5.0), line.take(0.0)) == (2, "one", "two", None)


def test_what_comes_before_an_entry_waits_for_its_turn() -> None:
    line = Line()
    for item in ("one", PairAlive(), ENTRY, "three"):
        line.put(item)
    assert line.take_entry(5.0) == ("key", b"value")
    assert [line.take(0.0) for _ in range(4)] == ["one", PairAlive(), "three", None]


def test_an_entry_that_does_not_come_in_time_leaves_the_rest() -> None:
    line = Line()
    line.put("one")
    begin_s = time.monotonic()
    with pytest.raises(TimeoutError, match="did not form the group in time"):
        line.take_entry(0.02)
    assert time.monotonic() - begin_s >= 0.02
    assert line.take(0.0) == "one"


@pytest.mark.parametrize("take", [lambda line: line.take(0.0), lambda line: line.take_entry(5.0)])
def test_one_that_was_stopped_gives_nothing_more(take: Callable[[Line], object]) -> None:
    line = Line()
    line.put(ENTRY)
    line.stop()
    with pytest.raises(Stopped):
        take(line)


def test_a_stop_wakes_who_waits() -> None:
    line, stopped = Line(), threading.Event()

    def wait() -> None:
        try:
            line.take(60.0)
        except Stopped:
            stopped.set()

    thread = threading.Thread(target=wait)
    thread.start()
    line.stop()
    thread.join(30.0)
    assert stopped.is_set()


def test_a_pair_ends_with_the_main_thread_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = threading.Thread(target=lambda: None)
    monkeypatch.setattr(threading, "main_thread", lambda: gone)
    with pytest.raises(Stopped):
        Line().take(0.0)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("nothing moved", "nothing moved"),
        ("[enforce fail at pair.cc:1] the peer is gone", "the peer is gone"),
        ("[x] failed Last error:\n the cable is cut", "the cable is cut"),
        ("y" * 300, "y" * 200),
    ],
)
def test_of_a_text_of_torch_the_end_counts(text: str, reason: str) -> None:
    assert reason_of(RuntimeError(text)) == f"RuntimeError: {reason}"


def test_only_a_thread_on_a_gpu_may_be_left_behind() -> None:
    ran = threading.Event()
    for name, is_daemon in (("cpu", False), ("cuda", True)):
        thread = begin_thread(ran.set, "kv-pair", torch.device(name))
        thread.join(30.0)
        assert (thread.daemon, thread.name, ran.is_set()) == (is_daemon, "kv-pair", True)
        ran.clear()
