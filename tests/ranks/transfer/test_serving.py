"""A rank's thread for its driver: how long it looks for an order, and who may begin."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton.ranks.transfer import serving
from baton.ranks.transfer.messages import Forget, Taken, TransferChannel
from tests.request_keys import A

Ends = tuple[TransferChannel, TransferChannel]


@pytest.fixture
def ends() -> Iterator[Ends]:
    channels = [TransferChannel(end, "the other") for end in socket.socketpair()]
    yield channels[0], channels[1]
    for channel in channels:
        channel.close()


def test_what_an_order_is_about_may_come_before_it_by_so_many_seconds(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, waits, taken = [100.0], list[float](), list[Any]()
    driver, rank = ends

    def wait(readers: list[Any], writers: list[Any], others: list[Any], left_s: float) -> None:
        assert (readers, writers, others) == ([rank], [], [])
        waits.append(left_s)
        now_s[0] += 0.75
        driver.send(Forget(transport="nixl", key=A), 5.0)

    monkeypatch.setattr(serving, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(serving, "select", SimpleNamespace(select=wait))
    end: Any = SimpleNamespace(take=taken.append)
    serving._look(end, rank, lambda: False, 2.0)
    assert (waits, len(taken)) == ([2.0, 1.25, 0.5], 3)
    serving._look(end, rank, lambda: len(taken) > 3, 2.0)
    assert len(waits) == 4, "it is there now"
    serving._look(end, rank, lambda: True, 2.0)
    assert len(waits) == 4


def test_a_driver_that_begins_with_something_else_is_left(ends: Ends) -> None:
    driver, rank = ends
    driver.send(Taken(number=1), 5.0)
    opened: list[Any] = []
    serving._serve(cast("Any", None), rank, cast("Any", opened.append), 2.0)
    assert opened == []
    assert rank.fileno() == -1
