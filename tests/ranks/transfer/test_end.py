"""One rank's end of transfers, as it is told and as it reports, with senders and receivers that do what a test says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest

from baton.kvtransfer.messages import Endpoint, RankEndpoint
from baton.kvtransfer.pools.host import HostPool
from baton.kvtransfer.process_identity import this_process
from baton.kvtransfer.transports.base import BlocksArrived, Move, Starting
from baton.kvtransfer.transports.part_registry import Network, RankPool
from baton.ranks.transfer import end as rank_end
from baton.ranks.transfer.end import RankEnd
from baton.ranks.transfer.messages import (
    AddUp,
    Arrived,
    Begin,
    Broken,
    EndSender,
    Expect,
    Fence,
    Forget,
    Forgotten,
    Listen,
    Listening,
    Prepare,
    Prepared,
    Push,
    Reach,
    Read,
    Taken,
    Totals,
)
from baton.wire.errors import TransferFailed
from baton.wire.kv_shard import WHOLE_BLOCK, KvDivision
from baton.wire.layout import KvLayout, LayerKv
from baton.wire.request_key import RequestKey
from tests.request_keys import A, B

LAYOUT = KvLayout.of_layers("float16", 2, [LayerKv(2, 4)])
BLOCKS = np.random.default_rng(1).integers(0, 256, (4, LAYOUT.block_bytes), dtype=np.uint8)
BYTES_PER_BLOCK = 24


class Sender:
    """Takes so many pushes as it has `room` for. `is_missing`: what it needs is starting."""

    def __init__(self) -> None:
        self.room = 9
        self.is_missing = self.is_closed = self.needs_fence = False
        self.failure = ""
        self.taken: list[tuple[RequestKey, Sequence[Move]]] = []
        self.reads: set[RequestKey] = set()

    def opened(self, *arguments: Any) -> tuple[Sender, int]:
        if self.is_missing:
            raise Starting("not yet")
        return self, BYTES_PER_BLOCK

    def poll(self) -> None:
        if self.failure:
            raise TransferFailed(self.failure)

    def push(self, key: RequestKey, moves: Sequence[Move]) -> bool:
        if self.room:
            self.room -= 1
            self.taken.append((key, moves))
            return True
        return False

    def is_reading(self, key: RequestKey) -> bool:
        return key in self.reads

    def wait_on(self) -> Sequence[Any]:
        return ("a socket", "the sender's")

    def close(self) -> None:
        self.is_closed = True


class Receiver:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.endpoint = Endpoint("zmq", "here")
        self.is_ready = True
        self.num_bytes = 0
        self.arrivals: list[BlocksArrived] = []
        self.told: list[Any] = []

    def look_by(self, look: Any) -> None:
        self.told.append(look)

    def expect(self, *order: Any) -> None:
        self.told.append("expect")

    def forget(self, key: Any) -> None:
        self.told.append("forget")

    def fence(self) -> None:
        self.told.append("fence")

    def poll(self) -> None: ...

    def take_arrivals(self) -> Sequence[BlocksArrived]:
        arrivals, self.arrivals = self.arrivals, []
        return arrivals

    def wait_on(self) -> Sequence[Any]:
        return ("a socket", "the receiver's")

    def close(self) -> None:
        self.told.append("close")


class Nixl:
    """The agent of a rank."""

    num_polls = 0
    is_closed = False

    def poll(self) -> None:
        self.num_polls += 1

    def wait_on(self) -> Sequence[Any]:
        return ("the agent's",)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def sender(monkeypatch: pytest.MonkeyPatch) -> Sender:
    sender = Sender()
    monkeypatch.setattr(rank_end, "open_parts", sender.opened)
    return sender


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Receiver:
    receiver = Receiver()
    monkeypatch.setattr(rank_end, "open_part_receiver", lambda *arguments: receiver)
    return receiver


@pytest.fixture
def end() -> RankEnd:
    return rank()


def rank(look: Any = None) -> RankEnd:
    return RankEnd(RankPool(HostPool(BLOCKS.copy()), LAYOUT, WHOLE_BLOCK), cast("Network", None), look)


def reach(end: RankEnd) -> None:
    end.take(Reach(7, "zmq", KvDivision(), (RankEndpoint("there"),), 4))


def push(key: RequestKey, number: int = 7) -> Push:
    return Push(number, key, 3, (0, 1), (2, 3), (5, 6))


def reported(end: RankEnd) -> list[Any]:
    end.work()
    reports, end.reports = end.reports, []
    return reports


def test_a_push_is_told_when_it_is_taken_and_when_it_is_read(end: RankEnd, sender: Sender) -> None:
    reach(end)
    sender.reads = {A}
    for _ in range(2):
        end.take(push(A))
    assert end.is_busy
    assert reported(end) == [Taken(7), Taken(7)]
    assert sender.taken == 2 * [(A, [Move(3, 0, 2, 5), Move(4, 1, 3, 6)])]
    assert (end.is_busy, reported(end)) == (True, [])
    sender.reads = set()
    assert reported(end) == [Read(7, A, 2, 4 * BYTES_PER_BLOCK)]
    assert (end.is_busy, reported(end)) == (False, [])


def test_what_a_sender_has_no_room_for_waits(end: RankEnd, sender: Sender) -> None:
    reach(end)
    sender.room = 1
    for key in (A, B):
        end.take(push(key))
    assert reported(end) == [Taken(7), Read(7, A, 1, 2 * BYTES_PER_BLOCK)]
    assert end.is_busy
    sender.room, sender.needs_fence = 1, True
    assert reported(end) == [Taken(7), Read(7, B, 1, 2 * BYTES_PER_BLOCK, True)]


def test_a_sender_that_cannot_be_opened_yet_is_asked_for_again(end: RankEnd, sender: Sender) -> None:
    reach(end)
    sender.is_missing = True
    end.take(push(A))
    assert (reported(end), end.is_busy, list(end.wait_on())) == ([], True, [])
    sender.is_missing = False
    assert reported(end) == [Taken(7), Read(7, A, 1, 2 * BYTES_PER_BLOCK)]
    assert list(end.wait_on()) == ["a socket", "the sender's"]


def test_a_sender_that_breaks_is_told_once_with_all_that_it_was_to_push(end: RankEnd, sender: Sender) -> None:
    reach(end)
    sender.room, sender.reads = 1, {A}
    for key in (A, B):
        end.take(push(key))
    assert reported(end) == [Taken(7)]
    sender.failure = "no route"
    assert reported(end) == [Broken(7, "no route"), Taken(7), Read(7, B, 1, 0)]
    assert sender.is_closed
    end.take(push(B))
    assert reported(end) == [Taken(7), Read(7, B, 1, 0)]
    sender.reads, sender.needs_fence = set(), True
    assert reported(end) == [Read(7, A, 1, 2 * BYTES_PER_BLOCK, True)]
    assert (reported(end), list(end.wait_on())) == ([], [])


def test_a_sender_that_is_to_part_reads_to_its_end(end: RankEnd, sender: Sender) -> None:
    reach(end)
    sender.reads = {A}
    end.take(push(A))
    assert reported(end) == [Taken(7)]
    end.take(EndSender(7))
    end.take(EndSender(8))
    assert (sender.is_closed, reported(end)) == (True, [])
    sender.reads = set()
    assert reported(end) == [Read(7, A, 1, 2 * BYTES_PER_BLOCK)]
    end.take(push(A))
    assert reported(end) == [Taken(7), Read(7, A, 1, 0)], "it is forgotten"


def test_what_is_pushed_by_a_sender_that_parted_before_it_was_opened_is_read_at_once(
    end: RankEnd, sender: Sender
) -> None:
    reach(end)
    sender.is_missing = True
    end.take(push(A))
    end.take(EndSender(7))
    assert reported(end) == [Taken(7), Read(7, A, 1, 0)]
    assert not sender.is_closed


def test_orders_of_a_receiver_reach_it_and_its_news_are_told(receiver: Receiver) -> None:
    end = rank("a look")
    end.take(Listen(("zmq",)))
    assert reported(end) == [Listening("zmq", RankEndpoint("here"), True)]
    end.take(Expect("zmq", 4, A, (1,), (2,)))
    receiver.arrivals, receiver.num_bytes = [BlocksArrived(A, 0, 1)], 24
    assert reported(end) == [Arrived("zmq", 4, A, 0, 1, 24)]
    end.take(Forget("zmq", A))
    assert reported(end) == [Forgotten("zmq", A)]
    end.take(Fence("zmq", ("here",)))
    assert list(end.wait_on()) == ["a socket", "the receiver's"]
    end.close()
    assert receiver.told == ["a look", "expect", "forget", "fence", "close"]


def test_without_a_look_none_is_given(end: RankEnd, receiver: Receiver) -> None:
    end.take(Listen(("zmq",)))
    assert receiver.told == []


def test_a_socket_that_several_wait_on_is_named_once(end: RankEnd, sender: Sender, receiver: Receiver) -> None:
    end.take(Listen(("zmq",)))
    reach(end)
    end.work()
    assert list(end.wait_on()) == ["a socket", "the sender's", "the receiver's"]
    end.close()
    assert sender.is_closed


@pytest.mark.parametrize("transports", [("zmq",), ("zmq", "nixl")])
def test_an_agent_is_started_where_ranks_send_by_nixl(
    end: RankEnd, transports: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = Nixl()
    monkeypatch.setattr(rank_end, "open_nixl_senders", lambda *arguments: agent)
    end.take(Prepare(transports))
    assert reported(end) == [Prepared(this_process())]
    has_agent = "nixl" in transports
    assert (agent.num_polls, list(end.wait_on())) == (has_agent, ["the agent's"] if has_agent else [])
    end.close()
    assert agent.is_closed is has_agent


def test_words_are_added_up_in_the_order_in_which_that_was_asked_for(end: RankEnd) -> None:
    for number, blocks in ((1, (0, 1)), (2, (2,))):
        end.take(AddUp(number, blocks))
    end.take(AddUp(3, (0,)))
    first, second, third = reported(end)
    assert (first.number, second.number, third.number) == (1, 2, 3)
    assert (len(first.totals), len(second.totals)) == (2, 1)
    assert third == Totals(3, first.totals[:1])
    assert all(0 <= total < 2**64 for total in first.totals)
    assert not end.is_busy


def test_what_is_no_order_is_refused(end: RankEnd) -> None:
    with pytest.raises(ValueError, match="was not told to listen for zmq"):
        end.take(Forget("zmq", A))
    with pytest.raises(ValueError, match="Totals is no order"):
        end.take(cast("Begin", Totals(1, ())))
