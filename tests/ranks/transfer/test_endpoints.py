"""What a node whose ranks have pools of their own offers to peers that write by themselves, and when that has ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from baton.kvtransfer.incoming_handoffs import ReceivingCounters
from baton.kvtransfer.messages import RANK_ENDPOINTS, RankEndpoint
from baton.kvtransfer.process_identity import this_process
from baton.kvtransfer.sending import SendingCounters
from baton.kvtransfer.transports.base import BlocksArrived, Move, Sender, Starting
from baton.kvtransfer.write_proof import WriteProof
from baton.ranks.transfer.lines import RankLines
from baton.ranks.transfer.messages import (
    AddUp,
    Arrived,
    Broken,
    EndSender,
    Expect,
    Fence,
    Forget,
    Forgotten,
    Listen,
    Listening,
    Order,
    Prepare,
    Prepared,
    Push,
    Reach,
    Read,
    Taken,
    Totals,
)
from baton.ranks.transfer.pool import RanksPool
from baton.ranks.transfer.receiver import RanksReceiver, open_ranks_receivers
from baton.ranks.transfer.senders import RanksSenders
from baton.wire.errors import Refused, TransferFailed
from baton.wire.kv_shard import KvDivision, KvShard
from baton.wire.layout import KvLayout, LayerKv
from tests.ranks.transfer.test_pools import hello
from tests.request_keys import key_of

DIVISION = KvDivision(2)
FIRST, SECOND = DIVISION.shards


class Lines:
    """In the place of `RankLines`: what was told, and reports as if ranks had made them."""

    def __init__(self) -> None:
        self.division = DIVISION
        self.told: list[Order] = []
        self.num_rounds = 0
        self.has_entered = False
        self._handlers: dict[type[Any], Callable[..., None]] = {}

    def hear(self, kind: type[Any], handler: Callable[..., None]) -> None:
        self._handlers[kind] = handler

    def tell(self, order: Order) -> None:
        self.told.append(order)
        if isinstance(order, Listen):
            for shard, address in zip(DIVISION.shards, ("a1", "b1"), strict=True):
                self.say(shard, address, order.transports[0])

    def say(self, shard: object, address: str, transport: str = "nixl") -> None:
        """A rank has this endpoint; without an address it starts again."""
        place = RankEndpoint(address, b"metadata") if address else RankEndpoint("starting")
        self._handlers[Listening](shard, Listening(transport, place, bool(address)))

    def report(self, report: Any, shard: KvShard = FIRST) -> None:
        self._handlers[type(report)](shard, report)

    def round(self) -> None:
        """Reports come when a test says so."""
        self.num_rounds += 1

    def wait(self, timeout_s: float) -> None:
        """The same."""

    def enter(self) -> None:
        self.has_entered = True

    def wait_on(self) -> Sequence[Any]:
        return ("a line",)


@pytest.fixture
def lines() -> Lines:
    return Lines()


def opened(lines: Lines, transport: str, counters: ReceivingCounters | None = None, **members: Any) -> RanksReceiver:
    (receiver,) = open_ranks_receivers(
        cast("RankLines", lines), counters or ReceivingCounters(), [transport], **members
    )
    return receiver


@pytest.fixture
def receiver(lines: Lines) -> RanksReceiver:
    return opened(lines, "nixl")


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
    for shard in DIVISION.shards:
        lines.say(shard, "")
    assert not receiver.fence(), "nobody knows of an endpoint"
    for shard, address in zip(DIVISION.shards, ("a2", "b2"), strict=True):
        lines.say(shard, address)
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


KEY, OTHER = key_of(1), key_of(2)


def test_a_block_has_arrived_when_it_has_at_every_rank(lines: Lines) -> None:
    counters = ReceivingCounters()
    receiver = opened(lines, "zmq", counters)
    receiver.expect(KEY, [7, 8, 9], [1, 1, 1])
    assert lines.told[1:] == [Expect("zmq", 0, KEY, (7, 8, 9), (1, 1, 1))]
    lines.report(Arrived("zmq", 0, KEY, 0, 3, 60))
    assert receiver.take_arrivals() == []
    lines.report(Arrived("zmq", 0, KEY, 1, 2, 40), SECOND)
    assert receiver.take_arrivals() == [BlocksArrived(KEY, 1, 1), BlocksArrived(KEY, 2, 1)]
    assert receiver.take_arrivals() == []
    lines.report(Arrived("zmq", 0, KEY, 0, 1, 20), SECOND)
    assert receiver.take_arrivals() == [BlocksArrived(KEY, 0, 1)]
    assert counters.num_part_bytes == 120


def test_what_arrives_for_an_earlier_order_or_none_does_not_count(lines: Lines) -> None:
    receiver = opened(lines, "zmq")
    receiver.expect(KEY, [7], [1])
    receiver.expect(KEY, [7], [1])
    for shard in DIVISION.shards:
        lines.report(Arrived("zmq", 0, KEY, 0, 1, 1), shard)
        lines.report(Arrived("zmq", 0, OTHER, 0, 1, 1), shard)
    assert receiver.take_arrivals() == []
    for shard in DIVISION.shards:
        lines.report(Arrived("zmq", 1, KEY, 0, 1, 1), shard)
    receiver.forget(KEY)
    assert receiver.take_arrivals() == [], "nobody waits for it any more"


def test_a_handoff_is_written_until_every_rank_has_forgotten_it(lines: Lines) -> None:
    receiver = opened(lines, "zmq")
    receiver.forget(KEY)
    assert not receiver.is_writing(KEY)
    receiver.expect(KEY, [7], [1])
    receiver.forget(KEY)
    receiver.forget(KEY)
    assert lines.told[2:] == [Forget("zmq", KEY)]
    lines.report(Forgotten("zmq", KEY), SECOND)
    assert receiver.is_writing(KEY)
    lines.report(Forgotten("zmq", KEY), FIRST)
    assert not receiver.is_writing(KEY)


def test_where_ranks_write_by_themselves_there_is_nothing_to_fence(lines: Lines) -> None:
    receiver = opened(lines, "zmq")
    assert (receiver.write_proof, receiver.fence(), receiver.fence()) == (WriteProof.OWN_HANDS, True, True)
    assert [type(order) for order in lines.told] == [Listen]
    assert opened(Lines(), "nixl", is_device=True).write_proof is WriteProof.BOTH_ENDED
    assert (receiver.is_silent, receiver.has_begun, receiver.wait_on()) == (False, True, ("a line",))


def reaching(lines: Lines, counters: SendingCounters | None = None) -> tuple[RanksSenders, Sender]:
    """Senders, and the first of them, for a receiver by zmq."""
    receiver = opened(lines, "zmq")
    senders = RanksSenders(cast("RankLines", lines), counters or SendingCounters(), ["zmq"], lambda hello: True)
    _, sender = senders.open(hello(receiver.endpoint))
    lines.told.clear()
    return senders, sender


def moves(*places: int) -> list[Move]:
    return [Move(place, 10 + place, 20 + place, 30 + place) for place in places]


def test_a_rank_that_has_not_taken_four_pushes_gets_no_fifth(lines: Lines) -> None:
    _, sender = reaching(lines)
    assert (sender.is_silent, sender.pushes_parts) == (False, False)
    assert sender.push(KEY, moves(3, 4))
    assert lines.told == [Push(0, KEY, 3, (13, 14), (23, 24), (33, 34))]
    assert all(sender.push(KEY, moves(5)) for _ in range(3))
    for _ in range(4):
        lines.report(Taken(0), SECOND)
    assert not sender.push(KEY, moves(6))
    lines.report(Taken(0), FIRST)
    lines.report(Taken(1), FIRST)  # of a sender that is over
    assert sender.push(KEY, moves(6))
    assert not sender.push(KEY, moves(7))
    assert (len(lines.told), sender.push(KEY, [])) == (5, True)
    assert len(lines.told) == 5, "no blocks are no push"


def test_blocks_are_read_until_every_rank_has_read_each_push(lines: Lines) -> None:
    counters = SendingCounters()
    _, sender = reaching(lines, counters)
    for key in (KEY, KEY, OTHER):
        sender.push(key, moves(0))
    lines.report(Read(0, KEY, 2, 100), FIRST)
    lines.report(Read(0, KEY, 1, 50), SECOND)
    lines.report(Read(9, KEY, 1, 1), SECOND)  # of a sender that is over
    assert sender.is_reading(KEY)
    lines.report(Read(0, KEY, 1, 50), SECOND)
    assert (sender.is_reading(KEY), sender.is_reading(OTHER), counters.num_part_bytes) == (False, True, 201)


def test_a_closed_sender_is_forgotten_when_nothing_is_read_any_more(lines: Lines) -> None:
    senders, sender = reaching(lines)
    sender.push(KEY, moves(0))
    lines.told.clear()
    sender.close()
    sender.close()
    assert lines.told == [EndSender(0)]
    senders.poll()
    lines.report(Read(0, KEY, 1, 1), FIRST)
    assert sender.is_reading(KEY)
    lines.report(Read(0, KEY, 1, 1), SECOND)
    assert not sender.is_reading(KEY)
    senders.poll()
    lines.report(Broken(0, "too late"))
    sender.poll()
    assert lines.num_rounds > 0


def test_a_sender_that_one_rank_cannot_use_is_of_no_use_and_says_the_first_reason(lines: Lines) -> None:
    _, sender = reaching(lines)
    lines.report(Broken(0, "no route"), SECOND)
    lines.report(Broken(0, "closed"), FIRST)
    lines.report(Broken(1, "another's"), FIRST)
    with pytest.raises(TransferFailed, match="no route"):
        sender.push(KEY, moves(0))
    with pytest.raises(TransferFailed, match="no route"):
        sender.poll()
    assert lines.told == []


def test_a_peer_that_ranks_cannot_reach_is_refused_with_every_reason(lines: Lines) -> None:
    offered = [opened(Lines(), name).endpoint for name in ("shm", "shm_slots")]
    senders = RanksSenders(cast("RankLines", lines), SendingCounters(), ["zmq", "shm_slots"], lambda hello: False)
    with pytest.raises(Refused, match=r"shm: ranks .* take zmq or shm_slots; shm_slots: the nodes do not share memory"):
        senders.open(hello(*offered))
    with pytest.raises(Refused, match="none offered"):
        senders.open(hello())
    assert senders.wait_on() == ("a line",)


def test_only_ranks_on_devices_that_push_by_nixl_are_named_as_writers(lines: Lines) -> None:
    offered = opened(Lines(), "nixl").endpoint
    plain = RanksSenders(cast("RankLines", lines), SendingCounters(), ["nixl"], lambda hello: True)
    transport, sender = plain.open(hello(offered))
    assert (transport, sender.writers, sender.piece_bytes) == ("nixl", (), 2**24)
    mapping = RanksSenders(
        cast("RankLines", lines), SendingCounters(), ["nixl", "zmq"], lambda hello: True, are_mapping=True
    )
    assert lines.told[-1] == Prepare(("nixl", "zmq"))
    lines.report(Prepared(this_process()), FIRST)
    with pytest.raises(Starting):
        mapping.open(hello(offered))
    lines.report(Prepared(this_process()), SECOND)
    assert mapping.open(hello(offered))[1].writers == (this_process(), this_process())
    _, sender = mapping.open(hello(opened(Lines(), "zmq").endpoint))
    assert (sender.writers, sender.piece_bytes) == ((), 2**20)


def test_checksums_are_there_when_all_ranks_have_added_up(lines: Lines) -> None:
    layout = KvLayout.of_layers("float16", 2, [LayerKv(2, 4)])
    pool = RanksPool(cast("RankLines", lines), layout)
    assert pool.block_bytes == layout.block_bytes
    checksums = pool.checksums("dot64")
    first, second = checksums.begin([3]), checksums.begin([4, 5])
    assert lines.told == [AddUp(0, (3,)), AddUp(1, (4, 5))]
    assert first.take() is None
    for number, totals in ((1, (7, 8)), (0, (9,))):
        lines.report(Totals(number, totals), FIRST)
    assert first.take() is second.take() is None
    for number, totals in ((0, (9,)), (1, (7, 8))):
        lines.report(Totals(number, totals), SECOND)
    found = [*(second.take() or ()), *(first.take() or ())]
    assert len(set(found)) == 3
    with pytest.raises(KeyError):  # it is over
        lines.report(Totals(0, (9,)), FIRST)
    pool.enter()
    assert lines.has_entered
    with pytest.raises(ValueError, match="cannot compute 'crc' together"):
        pool.checksums("crc")
    assert pool.checksums("none").begin([1]).take() == pool.checksums("none").begin([1]).take()
