from __future__ import annotations

import numpy as np
import pytest

from engine.api.errors import TransferFailed
from kvtransfer.messages import Endpoint, HandoffKey
from kvtransfer.transports.base import Move
from kvtransfer.transports.loopback import Fault, LoopbackNetwork, LoopbackReceiver, LoopbackSender
from tests.kvtransfer.pools import key_of

_NUM_BLOCKS, _BLOCK_BYTES = 4, 16
_MOVES = [Move(index, index, index, 1) for index in range(_NUM_BLOCKS)]


class Channel:
    """Four blocks on their way; `faults` by block number."""

    def __init__(self, faults: dict[int, Fault], *, peers_write: bool = False) -> None:
        def plan(number: int, key: HandoffKey, move: Move) -> Fault:
            return faults.get(number, Fault())

        self.source = np.arange(64, dtype=np.uint8).reshape(_NUM_BLOCKS, _BLOCK_BYTES)
        self.target = np.full((_NUM_BLOCKS, _BLOCK_BYTES), 255, dtype=np.uint8)
        self.network = LoopbackNetwork(plan)
        self.receiver = LoopbackReceiver(self.network, "D", self.target, peers_write=peers_write)
        self.sender = LoopbackSender(self.network, self.receiver.endpoint, self.source)
        self.receiver.expect(key_of(1), range(_NUM_BLOCKS), [1] * _NUM_BLOCKS)

    def arrived(self) -> list[int]:
        """Push everything; the blocks that are right after one poll."""
        self.sender.push(key_of(1), _MOVES)
        self.receiver.poll()
        return [block_id for block_id in range(_NUM_BLOCKS) if (self.target[block_id] == self.source[block_id]).all()]


def test_lost_blocks_stay_missing() -> None:
    channel = Channel({1: Fault(num_copies=0)})
    assert channel.arrived() == [0, 2, 3]
    assert channel.receiver.num_missing(key_of(1)) == 1


def test_doubled_blocks_are_written_once() -> None:
    channel = Channel({1: Fault(num_copies=2)})
    assert channel.arrived() == [0, 1, 2, 3]
    assert channel.receiver.num_refused == 1


def test_delayed_blocks_arrive_later() -> None:
    channel = Channel({3: Fault(delay=3)})
    assert channel.arrived() == [0, 1, 2]
    channel.receiver.poll()
    assert channel.receiver.num_missing(key_of(1)) == 1
    channel.receiver.poll()
    assert channel.receiver.num_missing(key_of(1)) == 0


def test_a_delay_of_one_swaps_neighbours() -> None:
    order: list[int] = []
    channel = Channel({0: Fault(delay=1)})
    channel.receiver.arrive = lambda key, move, payload: order.append(move.index)  # type: ignore[method-assign]
    channel.sender.push(key_of(1), _MOVES)
    assert order == [1, 0, 2, 3]


def test_cut_blocks_are_refused_by_a_mailbox_and_seen_by_memory() -> None:
    cut = {2: Fault(num_cut_bytes=8)}
    mailbox = Channel(cut)
    assert mailbox.arrived() == [0, 1, 3]
    assert mailbox.receiver.num_refused == 1
    memory = Channel(cut, peers_write=True)
    assert memory.arrived() == [0, 1, 3]
    assert memory.target[2].tolist() == [*range(32, 40), *[255] * 8]


def test_flipped_bits_arrive_flipped() -> None:
    channel = Channel({0: Fault(flipped_bits=(0, 15))})
    assert channel.arrived() == [1, 2, 3]
    assert (channel.target[0] ^ channel.source[0]).tolist() == [1, 128, *[0] * 14]


def test_a_refused_push_raises() -> None:
    channel = Channel({1: Fault(refusal="cable cut")})
    with pytest.raises(TransferFailed, match="cable cut"):
        channel.sender.push(key_of(1), _MOVES)


def test_only_what_a_grant_announced_is_written() -> None:
    channel = Channel({})
    strangers = [Move(0, 0, 0, 2), Move(1, 0, 0, 1), Move(9, 0, 0, 1)]  # generation, block, index
    channel.sender.push(key_of(1), strangers)
    channel.sender.push(key_of(2), _MOVES)
    channel.receiver.poll()
    assert channel.receiver.num_refused == len(strangers) + len(_MOVES)
    assert (channel.target == 255).all()


def test_a_closed_receiver_cannot_be_found() -> None:
    channel = Channel({})
    channel.receiver.close()
    with pytest.raises(TransferFailed, match="no receiver 'D'"):
        LoopbackSender(channel.network, Endpoint("loopback", "D"), channel.source)
