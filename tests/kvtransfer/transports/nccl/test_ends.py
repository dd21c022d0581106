"""Both ends of a pair as the transfer thread has them, without the threads of pairs: what they say, refuse and end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import zmq

from baton.kvtransfer.messages import Endpoint, HandoffName
from baton.kvtransfer.transports.base import BlocksArrived, Move
from baton.kvtransfer.transports.nccl import receiver as nccl_receiver
from baton.kvtransfer.transports.nccl import sender as nccl_sender
from baton.kvtransfer.transports.nccl.line import Ended, FromPair, Landed, News, Sent, Standing
from baton.kvtransfer.transports.nccl.outgoing import Piece
from baton.kvtransfer.transports.nccl.receiver import NcclReceiver
from baton.kvtransfer.transports.nccl.sender import NcclSender
from baton.kvtransfer.transports.nccl.wire import BlockBatch, PairAlive, PairEnd, PairHello, StoreEntry
from baton.wire.errors import InvalidSetting, TransferFailed
from baton.wire.links import LinkSettings
from tests.kvtransfer.transports.nccl.nccl_ends import BLOCK_BYTES, FROM_RECEIVER, FROM_SENDER, NUM_BLOCKS, key_of

HELLO = PairHello("gloo", BLOCK_BYTES)
ENTRY = StoreEntry("key", b"value")


class FakePair:
    """What a pair's thread would be told; `news` is where it tells."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments, self.news = arguments, arguments[-1]
        self.next_number, self.is_over = 0, False
        self.items: list[Any] = []
        self.free: list[Any] = []
        self.is_stopped, self.reads = False, False
        self.line = self.free_slots = self

    def put(self, item: Any) -> None:
        (self.free if isinstance(item, torch.Tensor) else self.items).append(item)

    give = put

    def __len__(self) -> int:
        return len(self.items)

    def stop(self) -> None:
        self.is_stopped = True

    def is_reading(self, key: Any) -> bool:
        return self.reads


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


class Receiving:
    """A receiver, its pool, and senders made by hand."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.context = context
        self.links: list[zmq.Socket[bytes]] = []
        self.blocks = np.zeros((NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
        self.receiver = NcclReceiver(context, "127.0.0.1", self.blocks, LinkSettings())

    def dial(self) -> zmq.Socket[bytes]:
        self.links.append(self.context.socket(zmq.DEALER))
        self.links[-1].connect(self.receiver.endpoint.address)
        return self.links[-1]

    def tell(self, link: zmq.Socket[bytes], *messages: object) -> None:
        """Have a sender say this and the receiver hear it."""
        for message in messages:
            link.send(message if isinstance(message, bytes) else FROM_SENDER.encode(message))
            assert self.receiver._socket.poll(10_000)
            self.receiver.poll()

    def pair(self) -> FakePair:
        """The newest pair."""
        pair: Any = list(self.receiver._pairs.values())[-1]
        assert isinstance(pair, FakePair)
        return pair

    def opened(self) -> zmq.Socket[bytes]:
        link = self.dial()
        self.tell(link, HELLO)
        return link

    def news(self, item: Any) -> None:
        """Have the newest pair's thread tell this, and the receiver heed it."""
        pair = self.pair()
        pair.news.put(FromPair(pair.arguments[0], item))
        self.receiver.poll()


def hear(link: zmq.Socket[bytes]) -> Any:
    assert link.poll(10_000)
    return FROM_RECEIVER.decode(link.recv())


@pytest.fixture
def receiving(context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiving]:
    monkeypatch.setattr(nccl_receiver, "IncomingPair", FakePair)
    made = Receiving(context)
    yield made
    made.receiver.close()
    for link in made.links:
        link.close(linger=0)


def batch(number: int = 0, targets: tuple[int, ...] = (5, 6), generations: tuple[int, ...] = (3, 3)) -> BlockBatch:
    return BlockBatch(number, HandoffName(*key_of(1)), 0, targets, generations)


def test_a_pair_gets_what_its_sender_says_in_order(receiving: Receiving) -> None:
    receiver = receiving.receiver
    assert receiver.num_pairs == 0
    link = receiving.opened()
    assert receiver.num_pairs == 1
    connection, pool, host, _ = receiving.pair().arguments
    assert (len(connection), tuple(pool.shape), host) == (5, (NUM_BLOCKS, BLOCK_BYTES), "127.0.0.1")
    receiving.tell(link, ENTRY, batch(0), PairAlive(), batch(1))
    assert receiving.pair().items == [ENTRY, batch(0), PairAlive(), batch(1)]
    assert receiver.num_refused == 0
    receiving.tell(link, HELLO)
    assert (receiver.num_pairs, receiver.num_refused) == (1, 1)
    receiving.tell(link, batch(1))
    assert (len(receiving.pair()), receiver.num_refused) == (4, 2), "doubled"


def test_what_is_no_message_or_of_no_pair_is_refused(receiving: Receiving) -> None:
    link = receiving.dial()
    receiving.tell(link, b"noise")
    assert receiving.receiver.num_refused == 1
    link.send_multipart([FROM_SENDER.encode(HELLO)] * 2)
    assert receiving.receiver._socket.poll(10_000)
    receiving.receiver.poll()
    assert (receiving.receiver.num_refused, receiving.receiver.num_pairs) == (2, 0)
    receiving.tell(link, ENTRY)
    assert receiving.receiver.num_refused == 3
    assert hear(link) == PairEnd("there is no pair for this connection")


@pytest.mark.parametrize(
    "bad",
    [
        batch(1),
        batch(targets=(), generations=()),
        batch(targets=(5,), generations=(3, 3)),
        batch(targets=tuple(range(1025)), generations=(3,) * 1025),
    ],
)
def test_headers_that_cannot_be_end_the_pair(receiving: Receiving, bad: BlockBatch) -> None:
    link = receiving.opened()
    pair = receiving.pair()
    receiving.tell(link, bad)
    assert hear(link) == PairEnd("the sender's headers do not fit together")
    assert (pair.is_stopped, receiving.receiver.num_pairs, receiving.receiver.num_refused) == (True, 0, 1)


def test_as_many_blocks_as_a_message_may_have_are_taken(receiving: Receiving) -> None:
    assert receiving.receiver._max_blocks == 1024
    link = receiving.opened()
    receiving.tell(link, batch(targets=tuple(range(1024)), generations=(3,) * 1024))
    assert len(receiving.pair()) == 1


def test_a_sender_that_leaves_ends_its_pair_and_one_too_far_ahead_too(
    receiving: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = receiving.opened()
    pair = receiving.pair()
    receiving.tell(link, PairEnd("enough"))
    assert (pair.is_stopped, receiving.receiver.num_pairs) == (True, 0)
    monkeypatch.setattr(nccl_receiver, "_MAX_WAITING", 2)
    receiving.tell(link, HELLO, ENTRY, ENTRY)
    assert receiving.receiver.num_pairs == 1
    receiving.tell(link, ENTRY)
    assert hear(link) == PairEnd("the sender is too far ahead")
    assert (receiving.receiver.num_pairs, receiving.receiver.num_refused) == (0, 0)


def test_pools_that_differ_and_too_many_pairs_are_refused(
    receiving: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = receiving.dial()
    receiving.tell(other, PairHello("gloo", 1))
    assert "the sender's pool is" in hear(other).reason
    monkeypatch.setattr(nccl_receiver, "_MAX_PAIRS", 1)
    link = receiving.opened()
    leaving = receiving.pair()
    receiving.tell(other, HELLO)
    assert hear(other) == PairEnd("the receiver has 1 pairs already")
    receiving.tell(link, PairEnd("enough"))
    receiving.tell(other, HELLO)
    assert hear(other) == PairEnd("the receiver has 1 pairs already"), "its thread has not ended"
    leaving.is_over = True
    receiving.tell(other, HELLO)
    assert receiving.receiver.num_pairs == 1


def landed(*targets: int, generation: int = 3, value: int = 7) -> Landed:
    slot = torch.full((4, BLOCK_BYTES), value, dtype=torch.uint8)
    return Landed(batch(0, targets, (generation,) * len(targets)), slot)


def test_what_has_landed_is_written_where_it_is_expected_and_its_slot_is_free(receiving: Receiving) -> None:
    receiver = receiving.receiver
    receiving.opened()
    receiver.expect(key_of(1), (5, 6, 8), (3, 3, 3))
    receiving.news(landed(5, 6))
    assert (receiving.blocks[[5, 6]] == 7).all()
    assert np.delete(receiving.blocks, [5, 6], axis=0).max() == 0
    assert receiver.take_arrivals() == [BlocksArrived(key_of(1), 0, 2)]
    assert (len(receiving.pair().free), receiver.num_refused) == (1, 0)
    receiving.news(landed(5, 6, value=9))
    assert (receiving.blocks[[5, 6]] == 7).all(), "each once"
    assert (len(receiving.pair().free), receiver.num_refused, receiver.take_arrivals()) == (2, 1, [])


def test_a_turn_writes_a_few_messages_and_the_rest_wakes_the_next(receiving: Receiving) -> None:
    receiving.opened()
    pair = receiving.pair()
    for _ in range(5):
        pair.news.put(FromPair(pair.arguments[0], ENTRY))
        pair.news.put(FromPair(pair.arguments[0], landed(9)))
    receiving.receiver.poll()
    assert len(pair.free) == 4
    poller = zmq.Poller()
    for each in receiving.receiver.wait_on():
        poller.register(each, zmq.POLLIN)
    assert poller.poll(10_000)
    receiving.receiver.poll()
    assert len(pair.free) == 5
    receiving.receiver.poll()
    assert not poller.poll(0), "nothing is left"


def test_what_a_pair_says_goes_to_its_sender_until_it_has_ended(receiving: Receiving) -> None:
    link = receiving.opened()
    pair = receiving.pair()
    receiving.news(ENTRY)
    assert hear(link) == ENTRY
    receiving.news(Ended("the line is cut"))
    assert hear(link) == PairEnd("the line is cut")
    assert (pair.is_stopped, receiving.receiver.num_pairs) == (True, 0)
    for item in (ENTRY, Ended("again"), landed(9)):
        pair.news.put(FromPair(pair.arguments[0], item))
    receiving.receiver.poll()
    assert not link.poll(20)
    assert pair.free == []


def test_a_receiver_that_closes_tells_each_sender_and_hears_nothing_more(receiving: Receiving) -> None:
    link = receiving.opened()
    pair = receiving.pair()
    assert len(receiving.receiver.wait_on()) == 2
    receiving.receiver.close()
    assert hear(link) == PairEnd("the receiver was closed")
    assert (pair.is_stopped, receiving.receiver.num_pairs, receiving.receiver.wait_on()) == (True, 0, ())
    receiving.receiver.poll()


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_wildcard_is_no_address_to_dial(context: zmq.Context[zmq.Socket[bytes]], host: str) -> None:
    with pytest.raises(InvalidSetting, match="is no address that a peer can dial"):
        NcclReceiver(context, host, np.zeros((1, 8), dtype=np.uint8), LinkSettings())


class Sending:
    """A sender and a receiver made by hand."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.link = context.socket(zmq.ROUTER)
        port = self.link.bind_to_random_port("tcp://127.0.0.1")
        endpoint = Endpoint("nccl", f"tcp://127.0.0.1:{port}")
        self.sender = NcclSender(context, endpoint, np.zeros((64, BLOCK_BYTES), dtype=np.uint8), LinkSettings())
        self.connection = b""

    def heard(self) -> Any:
        assert self.link.poll(10_000)
        self.connection, frame = self.link.recv_multipart()
        return FROM_SENDER.decode(frame)

    def say(self, message: object) -> None:
        """Have the receiver say this and the sender hear it."""
        frame = message if isinstance(message, bytes) else FROM_RECEIVER.encode(message)
        self.link.send_multipart([self.connection, frame])
        assert self.sender._socket.poll(10_000)

    @property
    def pair(self) -> FakePair:
        pair: Any = self.sender._pair
        assert isinstance(pair, FakePair)
        return pair

    def news(self, *items: Any) -> None:
        news: News = self.pair.news
        for item in items:
            news.put(FromPair(b"", item))

    def standing(self) -> Sending:
        assert not self.sender.push(key_of(1), [Move(0, 1, 5, 3)])
        assert self.heard() == HELLO
        self.news(Standing())
        return self


@pytest.fixture
def sending(context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch) -> Iterator[Sending]:
    monkeypatch.setattr(nccl_sender, "OutgoingPair", FakePair)
    made = Sending(context)
    yield made
    made.sender.close()
    made.link.close(linger=0)


def test_a_push_waits_for_the_group_and_has_its_header_and_its_piece(sending: Sending) -> None:
    sender = sending.sender
    assert sender.push(key_of(1), [])
    assert sender._pair is None
    assert not sender.push(key_of(1), [Move(0, 1, 5, 3)])
    assert sending.heard() == HELLO
    pool, host, _ = sending.pair.arguments
    assert (tuple(pool.shape), host) == ((64, BLOCK_BYTES), "127.0.0.1")
    assert not sender.push(key_of(1), [Move(0, 1, 5, 3)])
    sending.news(Standing())
    moves = [Move(0, 1, 5, 3), Move(1, 9, 6, 4), Move(3, 2, 8, 3)]
    assert sender.push(key_of(1), moves)
    assert sending.heard() == BlockBatch(0, HandoffName(*key_of(1)), 0, (5, 6), (3, 4))
    assert sending.heard() == BlockBatch(1, HandoffName(*key_of(1)), 3, (8,), (3,))
    assert sending.pair.items == [Piece(key_of(1), (1, 9)), Piece(key_of(1), (2,))]


def test_no_more_than_some_messages_are_on_their_way(sending: Sending) -> None:
    sending.standing()
    for _ in range(8):
        assert sending.sender.push(key_of(1), [Move(0, 1, 5, 3)])
    assert not sending.sender.push(key_of(1), [Move(0, 1, 5, 3)])
    sending.news(Sent())
    assert sending.sender.push(key_of(1), [Move(0, 1, 5, 3)])
    assert not sending.sender.push(key_of(1), [Move(0, 1, 5, 3)])


def test_a_pair_hears_of_its_group_until_that_stands(sending: Sending) -> None:
    assert not sending.sender.push(key_of(1), [Move(0, 1, 5, 3)])
    sending.heard()
    sending.say(ENTRY)
    sending.sender.poll()
    assert sending.pair.items == [ENTRY]
    sending.news(ENTRY)
    sending.sender.poll()
    assert sending.heard() == ENTRY
    sending.news(Standing())
    sending.sender.poll()
    sending.say(ENTRY)
    sending.sender.poll()
    assert sending.pair.items == [ENTRY]


def test_it_reads_what_its_pair_reads(sending: Sending) -> None:
    assert not sending.sender.is_reading(key_of(1))
    sending.standing()
    assert not sending.sender.is_reading(key_of(1))
    sending.pair.reads = True
    assert sending.sender.is_reading(key_of(1))


@pytest.mark.parametrize(
    ("message", "reason"), [(PairEnd("enough of it"), "enough of it"), (b"noise", "something else than a message")]
)
def test_what_the_receiver_says_may_end_it(sending: Sending, message: object, reason: str) -> None:
    sending.standing()
    sending.say(message)
    for _ in range(2):
        with pytest.raises(TransferFailed, match=reason):
            sending.sender.poll()
    sending.news(Ended("later"), ENTRY)
    with pytest.raises(TransferFailed, match=reason):
        sending.sender.push(key_of(1), [Move(0, 1, 5, 3)])
    assert not sending.link.poll(20)
    sending.sender.close()
    with pytest.raises(TransferFailed, match=reason):
        sending.sender.poll()


def test_a_pair_that_ends_says_why(sending: Sending) -> None:
    sending.standing()
    sending.news(Ended("nothing moved"))
    with pytest.raises(TransferFailed, match="nothing moved"):
        sending.sender.poll()


def test_one_that_cannot_send_is_over(sending: Sending) -> None:
    sending.standing()
    assert sending.sender.push(key_of(1), [Move(0, 1, 5, 3)])
    sending.sender._socket.close()
    for _ in range(2):
        with pytest.raises(TransferFailed, match="takes no more headers"):
            sending.sender.push(key_of(1), [Move(0, 1, 5, 3)])
    sending.sender._news.close()


def test_a_sender_that_closes_says_so_and_stops_its_pair(sending: Sending) -> None:
    sending.standing()
    assert len(sending.sender.wait_on()) == 2
    for _ in range(2):
        sending.sender.close()
    assert sending.heard() == PairEnd("the sender was closed")
    assert (sending.pair.is_stopped, sending.sender.wait_on()) == (True, ())
    with pytest.raises(TransferFailed, match="the sender was closed"):
        sending.sender.poll()


def test_an_address_that_cannot_be_dialled_is_refused(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with pytest.raises(TransferFailed, match="cannot be dialled"):
        NcclSender(context, Endpoint("nccl", "nonsense"), np.zeros((1, 8), dtype=np.uint8), LinkSettings())


def test_the_first_reason_is_the_one_that_counts(sending: Sending) -> None:
    sending.standing()
    for reason in ("the first", "the second"):
        sending.say(PairEnd(reason))
    with pytest.raises(TransferFailed, match="the first"):
        sending.sender.poll()
