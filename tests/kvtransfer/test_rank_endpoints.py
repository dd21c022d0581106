"""What a node whose ranks have pools of their own offers to peers that write by themselves, and when that has ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from kvtransfer.incoming_handoffs import ReceivingCounters
from kvtransfer.messages import RANK_ENDPOINTS, RankEndpoint
from kvtransfer.ranks.lines import RankLines
from kvtransfer.ranks.messages import Fence, Listen, Listening, Order, Prepare, Push, Reach, Read
from kvtransfer.ranks.receiver import RanksReceiver, open_ranks_receivers
from kvtransfer.ranks.senders import RanksSenders
from kvtransfer.sending import SendingCounters
from kvtransfer.transports.base import Move
from kvtransfer.write_proof import WriteProof
from tests.kvtransfer.test_rank_pools import hello
from tests.request_keys import key_of
from wire.kv_share import KvDivision

DIVISION = KvDivision(2)
FIRST, SECOND = DIVISION.shares


class Lines:
    """In the place of `RankLines`: what was told, and reports as if ranks had made them."""

    def __init__(self) -> None:
        self.division = DIVISION
        self.told: list[Order] = []
        self._handlers: dict[type[Any], Callable[..., None]] = {}

    def hear(self, kind: type[Any], handler: Callable[..., None]) -> None:
        self._handlers[kind] = handler

    def tell(self, order: Order) -> None:
        self.told.append(order)
        if isinstance(order, Listen):
            for share, address in zip(DIVISION.shares, ("a1", "b1"), strict=True):
                self.say(share, address)

    def say(self, share: object, address: str) -> None:
        """A rank has this endpoint; without an address it starts again."""
        place = RankEndpoint(address, b"metadata") if address else RankEndpoint("starting")
        self._handlers[Listening](share, Listening("nixl", place, bool(address)))

    def report(self, report: Any) -> None:
        self._handlers[type(report)](FIRST, report)

    def round(self) -> None:
        """Reports come when a test says so."""


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.fixture
def receiver(lines: Lines) -> RanksReceiver:
    (receiver,) = open_ranks_receivers(cast("RankLines", lines), ReceivingCounters(), ["nixl"])
    return receiver


def addresses(receiver: RanksReceiver) -> list[str]:
    return [rank.address for rank in RANK_ENDPOINTS.decode(receiver.endpoint.details).ranks]


def test_the_endpoint_has_ended_when_those_of_all_ranks_have(lines: Lines, receiver: RanksReceiver) -> None:
    assert receiver.write_proof is WriteProof.ENDPOINT_ENDED
    assert (receiver.is_ready, addresses(receiver)) == (True, ["a1", "b1"])
    lines.say(FIRST, "")  # its agent has crashed: that of the other rank has to end too
    assert lines.told[1:] == [Fence("nixl", ("a1", "b1"))]
    assert (receiver.is_ready, addresses(receiver)) == (False, ["a1", "b1"])
    lines.say(FIRST, "a2")
    assert addresses(receiver) == ["a1", "b1"], "a peer may still write into the pool of the other rank"
    lines.say(SECOND, "")
    assert (receiver.is_ready, receiver.endpoint.details) == (False, b"")
    lines.say(SECOND, "b2")
    assert (receiver.is_ready, addresses(receiver)) == (True, ["a2", "b2"])
    assert len(lines.told) == 2, "who came up again was not ended again"


def test_a_fence_is_begun_once(lines: Lines, receiver: RanksReceiver) -> None:
    assert receiver.fence()
    assert not receiver.fence()
    for share in DIVISION.shares:
        lines.say(share, "")
    assert not receiver.fence(), "nobody knows of an endpoint"
    for share, address in zip(DIVISION.shares, ("a2", "b2"), strict=True):
        lines.say(share, address)
    assert [type(order) for order in lines.told] == [Listen, Fence]
    assert receiver.fence()
    assert lines.told[-1] == Fence("nixl", ("a2", "b2"))


def test_a_write_of_one_rank_that_may_still_land_needs_a_fence(lines: Lines, receiver: RanksReceiver) -> None:
    senders = RanksSenders(cast("RankLines", lines), SendingCounters(), ["nixl"], lambda hello: True)
    _, sender = senders.open(hello(receiver.endpoint))
    assert sender.push(key_of(1), [Move(0, 3, 4, 5)])
    assert [type(order) for order in lines.told[1:]] == [Prepare, Reach, Push]
    lines.report(Read(0, key_of(1), 1, 64))
    assert (sender.is_reading(key_of(1)), sender.needs_fence) == (True, False)
    lines.report(Read(0, key_of(1), 1, 64, needs_fence=True))
    assert (sender.is_reading(key_of(1)), sender.needs_fence) == (False, True)
