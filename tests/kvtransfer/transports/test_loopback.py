from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from baton.kvtransfer.messages import Endpoint
from baton.kvtransfer.transports.base import Move
from baton.wire.errors import TransferFailed
from baton.wire.request_key import RequestKey
from tests.kvtransfer.loopback import Fault, LoopbackNetwork, LoopbackReceiver, LoopbackSender
from tests.request_keys import key_of

_NUM_BLOCKS, _BLOCK_BYTES = 4, 16
_MOVES = [Move(index, index, index, 1) for index in range(_NUM_BLOCKS)]
_UNTOUCHED = 255


class Channel:
    """Four blocks on their way; `faults` by block number."""

    def __init__(self, faults: dict[int, Fault], *, peers_write: bool = False, can_fence: bool = False) -> None:
        def plan(number: int, key: RequestKey, move: Move) -> Fault:
            return faults.get(number, Fault())

        self.source = np.arange(64, dtype=np.uint8).reshape(_NUM_BLOCKS, _BLOCK_BYTES)
        self.target = np.full((_NUM_BLOCKS, _BLOCK_BYTES), _UNTOUCHED, dtype=np.uint8)
        self.network = LoopbackNetwork(plan)
        self.receiver = LoopbackReceiver(self.network, "D", self.target, peers_write=peers_write, can_fence=can_fence)
        self.sender = LoopbackSender(self.network, self.receiver.endpoint, self.source)
        self.receiver.expect(key_of(1), range(_NUM_BLOCKS), [1] * _NUM_BLOCKS)

    def push(self) -> None:
        assert self.sender.push(key_of(1), _MOVES)

    def reported(self) -> list[int]:
        """Indices reported by one poll."""
        self.receiver.poll()
        return sorted(
            arrival.first_index + i for arrival in self.receiver.take_arrivals() for i in range(arrival.count)
        )

    def right(self) -> list[int]:
        """Blocks that are as they were sent."""
        return [block_id for block_id in range(_NUM_BLOCKS) if (self.target[block_id] == self.source[block_id]).all()]


def in_parts(channel: Channel, parts: Sequence[tuple[int, int]], moves: Sequence[Move] = _MOVES) -> None:
    for begin, end in parts:
        channel.sender.push_part(key_of(1), moves, begin, end)


def test_lost_blocks_stay_missing() -> None:
    channel = Channel({1: Fault(num_copies=0)})
    channel.push()
    assert channel.reported() == [0, 2, 3]
    assert channel.right() == [0, 2, 3]


def test_doubled_blocks_are_written_once() -> None:
    channel = Channel({1: Fault(num_copies=2)})
    channel.push()
    assert channel.reported() == [0, 1, 2, 3]
    assert channel.receiver.num_refused == 1


def test_delayed_blocks_arrive_later() -> None:
    channel = Channel({3: Fault(delay=3)})
    channel.push()
    assert [channel.reported() for _ in range(3)] == [[0, 1, 2], [], [3]]


def test_a_delay_of_one_swaps_neighbours() -> None:
    channel = Channel({0: Fault(delay=1)})
    channel.push()
    channel.receiver.poll()
    assert [arrival.first_index for arrival in channel.receiver.take_arrivals()] == [1, 0, 2, 3]


def test_cut_blocks_are_refused_by_a_mailbox_and_seen_by_memory() -> None:
    cut = {2: Fault(num_cut_bytes=8)}
    mailbox = Channel(cut)
    mailbox.push()
    assert mailbox.reported() == [0, 1, 3]
    assert mailbox.receiver.num_refused == 1
    memory = Channel(cut, peers_write=True)
    memory.push()
    assert memory.right() == [0, 1, 3]
    assert memory.target[2].tolist() == [*range(32, 40), *[_UNTOUCHED] * 8]


def test_flipped_bits_arrive_flipped() -> None:
    channel = Channel({0: Fault(flipped_bits=(0, 15))})
    channel.push()
    assert channel.reported() == [0, 1, 2, 3]
    assert (channel.target[0] ^ channel.source[0]).tolist() == [1, 128, *[0] * 14]


def test_a_refused_push_raises() -> None:
    channel = Channel({1: Fault(refusal="cable cut")})
    with pytest.raises(TransferFailed, match="cable cut"):
        channel.push()


def test_only_what_a_grant_announced_is_written() -> None:
    channel = Channel({})
    strangers = [Move(0, 0, 0, 2), Move(1, 0, 0, 1), Move(9, 0, 0, 1)]  # generation, block, index
    channel.sender.push(key_of(1), strangers)
    channel.sender.push(key_of(2), _MOVES)
    assert channel.reported() == []
    assert channel.receiver.num_refused == len(strangers) + len(_MOVES)
    assert (channel.target == _UNTOUCHED).all()


def test_arrivals_of_a_forgotten_handoff_are_not_reported() -> None:
    channel = Channel({})
    channel.push()
    channel.receiver.poll()
    channel.receiver.forget(key_of(1))
    assert channel.receiver.take_arrivals() == []


def test_arrivals_before_blocks_were_expected_again_are_not_reported() -> None:
    channel = Channel({})
    channel.push()
    channel.receiver.poll()
    channel.receiver.expect(key_of(1), range(_NUM_BLOCKS), [1] * _NUM_BLOCKS)
    assert channel.receiver.take_arrivals() == []
    channel.push()
    assert channel.reported() == [0, 1, 2, 3]


def test_memory_says_nothing_about_arrivals() -> None:
    channel = Channel({}, peers_write=True)
    assert channel.receiver.is_silent
    assert channel.sender.is_silent
    channel.push()
    assert channel.reported() == []
    assert channel.right() == [0, 1, 2, 3]


def test_a_closed_receiver_cannot_be_found() -> None:
    channel = Channel({})
    channel.receiver.close()
    with pytest.raises(TransferFailed, match="no receiver 'D'"):
        LoopbackSender(channel.network, Endpoint("loopback", "D"), channel.source)
    with pytest.raises(TransferFailed, match="no receiver 'D'"):
        channel.sender.poll()


def test_the_next_life_of_a_name_is_not_written_by_a_sender_to_the_one_before() -> None:
    channel = Channel({}, peers_write=True)
    channel.receiver.close()
    LoopbackReceiver(channel.network, "D", channel.target, peers_write=True)
    with pytest.raises(TransferFailed, match="another receiver 'D'"):
        channel.push()
    assert (channel.target == _UNTOUCHED).all()


@pytest.mark.parametrize("peers_write", [False, True])
def test_a_cut_link_loses_what_is_under_way_and_takes_nothing_until_it_is_restored(peers_write: bool) -> None:
    channel = Channel({3: Fault(delay=3)}, peers_write=peers_write)
    channel.push()
    channel.network.cut("D")
    assert not channel.sender.is_reading(key_of(1))
    assert not channel.sender.push(key_of(1), _MOVES)
    for _ in range(5):
        channel.receiver.poll()
    assert channel.right() == [0, 1, 2]
    channel.network.restore("D")
    assert channel.sender.push(key_of(1), _MOVES[3:])
    channel.receiver.poll()
    assert channel.right() == [0, 1, 2, 3]


def test_a_delayed_write_to_memory_counts_as_read_until_it_has_come() -> None:
    channel = Channel({0: Fault(delay=4)}, peers_write=True)
    channel.push()
    assert channel.sender.is_reading(key_of(1))
    assert not channel.sender.is_reading(key_of(2))
    channel.receiver.poll()
    assert not channel.sender.is_reading(key_of(1))
    assert channel.right() == [0, 1, 2, 3]


def test_a_closed_sender_writes_no_memory_any_more() -> None:
    channel = Channel({0: Fault(delay=9)}, peers_write=True)
    channel.push()
    channel.sender.close()
    assert not channel.sender.is_reading(key_of(1))
    for _ in range(20):
        channel.receiver.poll()
    assert channel.right() == [1, 2, 3]


def test_parts_make_a_block() -> None:
    channel = Channel({}, peers_write=True)
    assert channel.sender.pushes_parts
    assert not Channel({}).sender.pushes_parts
    in_parts(channel, [(0, 4), (4, 10)])
    assert channel.target[2].tolist() == [*range(32, 42), *[_UNTOUCHED] * 6]
    in_parts(channel, [(10, 16)])
    assert channel.right() == [0, 1, 2, 3]


def test_a_part_that_was_left_out_is_missing() -> None:
    channel = Channel({}, peers_write=True)
    in_parts(channel, [(0, 4), (10, 16)])
    assert channel.right() == []


def test_faults_befall_a_block_pushed_in_parts_once() -> None:
    faults = {0: Fault(num_copies=0), 1: Fault(flipped_bits=(1,)), 2: Fault(num_cut_bytes=1)}
    channel = Channel(faults, peers_write=True)
    in_parts(channel, [(0, 8), (8, 16)])
    assert channel.right() == [3]
    assert channel.target[0].tolist() == [*range(8), *[_UNTOUCHED] * 8]
    assert (channel.target[1] ^ channel.source[1]).tolist() == [2, *[0] * 15]
    assert channel.target[2].tolist() == [*range(32, 47), _UNTOUCHED]


def test_parts_do_not_go_over_a_cut_link() -> None:
    channel = Channel({}, peers_write=True)
    channel.network.cut("D")
    with pytest.raises(TransferFailed, match="cut"):
        in_parts(channel, [(0, 8)])


def test_memory_can_be_fenced_where_it_says_so() -> None:
    assert not Channel({}, peers_write=True).receiver.fence()
    assert Channel({}).receiver.fence()
    channel = Channel({0: Fault(delay=9)}, peers_write=True, can_fence=True)
    channel.push()
    before = channel.receiver.endpoint
    assert channel.receiver.fence()
    assert channel.receiver.endpoint != before
    with pytest.raises(TransferFailed):
        channel.sender.push(key_of(1), _MOVES)
    for _ in range(20):
        channel.receiver.poll()
    assert channel.right() == [1, 2, 3]
    assert LoopbackSender(channel.network, channel.receiver.endpoint, channel.source).push(key_of(1), _MOVES[:1])
    channel.receiver.poll()
    assert channel.right() == [0, 1, 2, 3]
