"""What every transport must do, whatever it is made of."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import pytest
import zmq

from kvtransfer.messages import Endpoint
from kvtransfer.transports.base import Blocks, Move, Receiver, Sender
from kvtransfer.transports.loopback import LoopbackNetwork, LoopbackSender
from kvtransfer.transports.shm import ShmSender
from kvtransfer.transports.tcp_zmq import ZmqSender
from tests.kvtransfer.pair import NUM_BLOCKS, SETTINGS, SHM, TRANSPORTS, ZMQ, open_receiver
from tests.kvtransfer.pools import BLOCK_BYTES, key_of

_GUARD = 0xA5
_NUM_SOURCE_BLOCKS = 24


@dataclass(slots=True)
class Path:
    """One sender and one receiver."""

    sender: Sender
    receiver: Receiver
    source: Blocks
    target: Blocks

    def moves(self, sources: Sequence[int], targets: Sequence[int], first_index: int = 0) -> list[Move]:
        return [Move(first_index + i, s, t, 3) for i, (s, t) in enumerate(zip(sources, targets, strict=True))]

    def expect(self, number: int, targets: Sequence[int]) -> None:
        self.receiver.expect(key_of(number), targets, [3] * len(targets))

    def until_arrived(self, is_done: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 5
        while not is_done() and time.monotonic() < deadline_s:
            self.receiver.poll()
            time.sleep(0.001)
        assert is_done()

    def untouched(self, *written: int) -> bool:
        others = [block_id for block_id in range(NUM_BLOCKS) if block_id not in written]
        return bool((self.target[others] == _GUARD).all())


@pytest.fixture(params=TRANSPORTS)
def path(request: pytest.FixtureRequest) -> Iterator[Path]:
    network = LoopbackNetwork()
    source = np.random.default_rng(1).integers(0, 256, (_NUM_SOURCE_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with ExitStack() as stack:
        stack.callback(context.destroy, linger=0)
        receiver, target = open_receiver(context, network, request.param, "D")
        stack.callback(receiver.close)
        target[:] = _GUARD
        sender = _open_sender(context, network, receiver.endpoint, source)
        stack.callback(sender.close)
        yield Path(sender, receiver, source, target)


def _open_sender(
    context: zmq.Context[zmq.Socket[bytes]], network: LoopbackNetwork, endpoint: Endpoint, source: Blocks
) -> Sender:
    if endpoint.transport == SHM:
        return ShmSender(endpoint, source, NUM_BLOCKS)
    if endpoint.transport == ZMQ:
        return ZmqSender(context, endpoint, source, SETTINGS)
    return LoopbackSender(network, endpoint, source)


def test_bytes_arrive_exactly_and_nowhere_else(path: Path) -> None:
    sources, targets = [3, 4, 5, 9, 20], [11, 12, 2, 7, 0]
    path.expect(1, targets)
    path.sender.push(key_of(1), path.moves(sources, targets))
    path.until_arrived(lambda: path.receiver.num_missing(key_of(1)) == 0)
    assert (path.target[targets] == path.source[sources]).all()
    assert path.untouched(*targets)


def test_contiguous_runs_arrive_in_order(path: Path) -> None:
    targets = list(range(NUM_BLOCKS))
    path.expect(1, targets)
    path.sender.push(key_of(1), path.moves(range(4, 4 + NUM_BLOCKS), targets))
    path.until_arrived(lambda: path.receiver.num_missing(key_of(1)) == 0)
    assert (path.target == path.source[4 : 4 + NUM_BLOCKS]).all()


def test_a_grant_may_be_filled_in_several_pushes(path: Path) -> None:
    targets = [9, 8, 1, 2, 15]
    path.expect(1, targets)
    path.sender.push(key_of(1), path.moves([3, 4], targets[3:], first_index=3))
    path.sender.push(key_of(1), path.moves([0], targets[:1]))
    path.until_arrived(lambda: bool((path.target[[2, 15, 9]] == path.source[[3, 4, 0]]).all()))
    assert path.receiver.num_missing(key_of(1)) == (0 if path.receiver.peers_write else 2)
    assert path.untouched(2, 15, 9)
    path.sender.push(key_of(1), path.moves([1, 2], targets[1:3], first_index=1))
    path.until_arrived(lambda: path.receiver.num_missing(key_of(1)) == 0)
    assert (path.target[targets] == path.source[[0, 1, 2, 3, 4]]).all()


def test_many_handoffs_interleave(path: Path) -> None:
    order = random.Random(5)
    targets = order.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    sources = order.sample(range(_NUM_SOURCE_BLOCKS), NUM_BLOCKS)
    for number in range(4):
        path.expect(number, targets[4 * number : 4 * number + 4])
    pushes = [(number, index) for number in range(4) for index in range(4)]
    order.shuffle(pushes)
    for number, index in pushes:
        place = 4 * number + index
        path.sender.push(key_of(number), [Move(index, sources[place], targets[place], 3)])
    path.until_arrived(lambda: not any(path.receiver.num_missing(key_of(number)) for number in range(4)))
    assert (path.target[targets] == path.source[sources]).all()


def test_the_source_may_change_once_push_has_returned(path: Path) -> None:
    path.expect(1, [6, 5])
    before = path.source[[1, 2]].copy()
    path.sender.push(key_of(1), path.moves([1, 2], [6, 5]))
    path.source[:] = 0
    path.until_arrived(lambda: bool((path.target[[6, 5]] == before).all()))


def test_nothing_to_push_is_fine(path: Path) -> None:
    path.expect(1, [])
    path.sender.push(key_of(1), [])
    path.receiver.poll()
    assert path.receiver.num_missing(key_of(1)) == 0
    assert path.untouched()
