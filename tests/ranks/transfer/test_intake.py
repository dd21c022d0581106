"""What a rank receives by one transport, without a process and a driver."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from baton.kvtransfer.messages import Endpoint, RankEndpoint
from baton.kvtransfer.transports.base import BlocksArrived
from baton.kvtransfer.transports.part_registry import PartReceiver
from baton.ranks.transfer.intake import Intake
from baton.ranks.transfer.messages import Arrived, Expect, Forgotten, Listening
from tests.request_keys import key_of

KEY = key_of(1)


class Receiver:
    """Notes what it is told; `arrivals` come with the next look."""

    def __init__(self) -> None:
        self.endpoint = Endpoint("nixl", "first", b"metadata")
        self.is_ready = True
        self.num_bytes = 0
        self.arrivals: list[BlocksArrived] = []
        self.told: list[Any] = []

    def wait_on(self) -> Sequence[Any]:
        return ("a socket",)

    def expect(self, *order: Any) -> None:
        self.told.append(order)

    def forget(self, key: Any) -> None:
        self.told.append(("forget", key))

    def fence(self) -> None:
        self.told.append("fence")

    def poll(self) -> None:
        self.told.append("poll")

    def take_arrivals(self) -> Sequence[BlocksArrived]:
        arrivals, self.arrivals = self.arrivals, []
        return arrivals

    def close(self) -> None:
        self.told.append("close")


@pytest.fixture
def receiver() -> Receiver:
    return Receiver()


@pytest.fixture
def intake(receiver: Receiver) -> Intake:
    return Intake("nixl", cast("PartReceiver", receiver))


def test_an_endpoint_is_told_when_it_is_another(receiver: Receiver, intake: Intake) -> None:
    assert list(intake.work()) == [Listening("nixl", RankEndpoint("first", b"metadata"), True)]
    assert list(intake.work()) == []
    receiver.endpoint, receiver.is_ready = Endpoint("nixl", "", b""), False
    assert list(intake.work()) == [Listening("nixl", RankEndpoint("", b""), False)]
    assert receiver.told == ["poll"] * 3


def test_only_the_endpoint_that_was_told_last_is_fenced(receiver: Receiver, intake: Intake) -> None:
    intake.fence(["first"])
    assert receiver.told == [], "nobody knows of it"
    list(intake.work())
    intake.fence(["another"])
    assert receiver.told == ["poll"]
    intake.fence(["another", "first"])
    assert receiver.told == ["poll", "fence"]


def test_what_arrives_is_told_with_the_order_and_the_bytes_since_the_last(receiver: Receiver, intake: Intake) -> None:
    list(intake.work())
    intake.expect(Expect("nixl", 7, KEY, (3, 4), (5, 6)))
    receiver.num_bytes, receiver.arrivals = 64, [BlocksArrived(KEY, 0, 1)]
    assert list(intake.work()) == [Arrived("nixl", 7, KEY, 0, 1, 64)]
    receiver.num_bytes, receiver.arrivals = 96, [BlocksArrived(KEY, 1, 1)]
    assert list(intake.work()) == [Arrived("nixl", 7, KEY, 1, 1, 32)]
    assert intake.forget(KEY) == Forgotten("nixl", KEY)
    assert [each for each in receiver.told if each != "poll"] == [(KEY, (3, 4), (5, 6)), ("forget", KEY)]
    assert list(intake.work()) == []
    assert intake._expected == {}, "nothing is kept of what was forgotten"


def test_sockets_are_those_of_the_receiver_and_close_with_it(receiver: Receiver, intake: Intake) -> None:
    assert intake.wait_on() == ("a socket",)
    intake.close()
    assert receiver.told == ["close"]
