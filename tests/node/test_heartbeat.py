from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from baton.node.heartbeat import HeartbeatThread
from baton.wire.messages.membership import Heartbeat
from tests.node.conftest import EPOCH, SETTINGS, STATUS, FakeRouter
from tests.wire.turned_bit import turned_once

INTERVAL_S = 0.005
Context = zmq.Context[zmq.Socket[bytes]]
Start = Callable[[str], HeartbeatThread]


@pytest.fixture
def start(context: Context) -> Iterator[Start]:
    """`start(address)`: a heartbeat towards that router."""
    started: list[HeartbeatThread] = []

    def begin(address: str) -> HeartbeatThread:
        started.append(HeartbeatThread(context, [address], SETTINGS, EPOCH, STATUS, INTERVAL_S))
        return started[-1]

    yield begin
    for thread in started:
        thread.stop()


def test_beats_come_by_themselves_and_show_how_old_the_status_is(router: FakeRouter, start: Start) -> None:
    start(router.address)
    first, second = router.receive(), router.receive()
    assert isinstance(first, Heartbeat)
    assert (first.epoch, first.status.num_held_blocks) == (EPOCH, STATUS.num_held_blocks)
    assert second.status.loop_age_s > first.status.loop_age_s >= 0.0


def test_publishing_makes_the_status_young_again(router: FakeRouter, start: Start) -> None:
    thread = start(router.address)
    thread.publish(time.monotonic() - 1000.0, STATUS)
    while router.receive().status.loop_age_s < 1000.0:
        pass
    thread.publish(time.monotonic(), STATUS)
    while router.receive().status.loop_age_s > 500.0:
        pass


def test_no_beats_are_kept_for_a_router_that_comes_later(
    router: FakeRouter, start: Start, make_router: Callable[[int], FakeRouter]
) -> None:
    port = int(router.address.rsplit(":", 1)[1])
    router.socket.close()
    start(router.address)
    begun_s = time.monotonic()
    time.sleep(12 * INTERVAL_S)
    later = make_router(port)
    away_s = time.monotonic() - begun_s
    # the age in a beat is the time from the thread's start to the beat
    assert later.receive().status.loop_age_s > away_s


def test_a_router_that_comes_is_told_at_once(
    context: Context, router: FakeRouter, make_router: Callable[[int], FakeRouter]
) -> None:
    thread = HeartbeatThread(context, [router.address], SETTINGS, EPOCH, STATUS, interval_s=1000.0)
    try:
        assert isinstance(router.receive(), Heartbeat)
        router.socket.close()
        assert isinstance(make_router(int(router.address.rsplit(":", 1)[1])).receive(), Heartbeat)
    finally:
        thread.stop()


def test_a_new_connection_has_a_few_beats_at_once(context: Context, router: FakeRouter) -> None:
    """The first may be lost: the router answers on another connection, which can be made later."""
    thread = HeartbeatThread(context, [router.address], SETTINGS, EPOCH, STATUS, interval_s=1000.0)
    try:
        assert all(isinstance(router.receive(), Heartbeat) for _ in range(4))
    finally:
        thread.stop()


def test_beats_come_although_a_bit_of_the_handshake_was_turned(router: FakeRouter, start: Start) -> None:
    with turned_once(int(router.address.rsplit(":", 1)[1])) as address:
        thread = start(address)
        assert isinstance(router.receive(), Heartbeat)
        thread.stop()


def test_a_heartbeat_that_was_stopped_has_no_thread(router: FakeRouter, start: Start) -> None:
    threads = set(threading.enumerate())
    thread = start(router.address)
    router.receive()
    assert len(set(threading.enumerate()) - threads) == 1
    thread.stop()
    assert set(threading.enumerate()) <= threads


def test_each_router_gets_beats_whether_or_not_the_others_are_there(context: Context, router: FakeRouter) -> None:
    other = FakeRouter(context)
    thread = HeartbeatThread(context, [router.address, other.address], SETTINGS, EPOCH, STATUS, INTERVAL_S)
    try:
        assert isinstance(router.receive(), Heartbeat)
        assert isinstance(other.receive(), Heartbeat)
        other.socket.close()
        for _ in range(20):
            assert isinstance(router.receive(), Heartbeat)
    finally:
        thread.stop()
        other.socket.close()
