from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from node import heartbeat
from node.heartbeat import HeartbeatThread
from tests.node.conftest import EPOCH, SETTINGS, STATUS, FakeRouter
from wire.messages import Heartbeat

INTERVAL_S = 0.05
Context = zmq.Context[zmq.Socket[bytes]]


@pytest.fixture(autouse=True)
def short_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "INTERVAL_S", INTERVAL_S)


@pytest.fixture
def make_thread(context: Context) -> Iterator[Callable[[str], HeartbeatThread]]:
    made: list[HeartbeatThread] = []

    def make(address: str) -> HeartbeatThread:
        made.append(HeartbeatThread(context, address, SETTINGS, EPOCH, STATUS))
        return made[-1]

    yield make
    for thread in made:
        thread.stop()


def test_beats_come_by_themselves_and_show_how_old_the_status_is(
    router: FakeRouter, make_thread: Callable[[str], HeartbeatThread]
) -> None:
    make_thread(router.address).start()
    first, second = router.receive(), router.receive()
    assert isinstance(first, Heartbeat)
    assert (first.epoch, first.status.num_held_blocks) == (EPOCH, STATUS.num_held_blocks)
    assert second.status.loop_age_s >= first.status.loop_age_s + 0.8 * INTERVAL_S


def test_publishing_makes_the_status_young_again(
    router: FakeRouter, make_thread: Callable[[str], HeartbeatThread]
) -> None:
    thread = make_thread(router.address)
    thread.publish(time.monotonic() - 100.0, STATUS)
    thread.start()
    assert router.receive().status.loop_age_s >= 100.0
    thread.publish(time.monotonic(), STATUS)
    while router.receive().status.loop_age_s > 50.0:
        pass


def test_no_beats_are_kept_for_a_router_that_comes_later(
    router: FakeRouter, make_thread: Callable[[str], HeartbeatThread], make_router: Callable[[int], FakeRouter]
) -> None:
    port = int(router.address.rsplit(":", 1)[1])
    router.socket.close()
    make_thread(router.address).start()
    time.sleep(12 * INTERVAL_S)
    later = make_router(port)
    later.receive()
    time.sleep(0.01)
    num_queued = 0
    while later.socket.poll(0):
        later.receive()
        num_queued += 1
    assert num_queued <= 3


def test_a_heartbeat_that_was_never_started_can_be_stopped(make_thread: Callable[[str], HeartbeatThread]) -> None:
    make_thread("tcp://127.0.0.1:9").stop()


def test_a_stopped_heartbeat_is_silent(router: FakeRouter, make_thread: Callable[[str], HeartbeatThread]) -> None:
    thread = make_thread(router.address)
    thread.start()
    router.receive()
    thread.stop()
    while router.socket.poll(0):
        router.receive()
    assert not router.socket.poll(int(4000 * INTERVAL_S))
