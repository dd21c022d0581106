"""Ends of the zmq transport for tests: real ones, and raw sockets that say whatever a test wants."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import zmq

from baton.kvtransfer.messages import Endpoint, HandoffName
from baton.kvtransfer.pools.base import KvPool
from baton.kvtransfer.pools.host import HostPool
from baton.kvtransfer.transports.base import Blocks, Move
from baton.kvtransfer.transports.tcp_zmq import BlockBatch, ZmqReceiver, ZmqSender
from baton.wire.codec import Codec
from baton.wire.keys import ClusterKey
from baton.wire.links import LinkSettings
from tests.request_keys import key_of

HEADERS = Codec(BlockBatch)
PLAIN = LinkSettings()
GRANTED, GENERATIONS = (5, 2, 7), (4, 4, 9)
BLOCK_BYTES = 512
MIB = 2**20
GUARD = 0xA5

Context = zmq.Context[zmq.Socket[bytes]]


class Dial(Protocol):
    def __call__(self, endpoint: Endpoint, pool: Blocks | KvPool, key: ClusterKey | None = None) -> ZmqSender: ...


def until(is_done: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not is_done():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


class Target:
    """A receiver with one grant, and a raw socket to it."""

    def __init__(self, context: Context, build: Callable[[Blocks], KvPool] = HostPool) -> None:
        self.context = context
        self.blocks: Blocks = np.full((8, BLOCK_BYTES), GUARD, dtype=np.uint8)
        self.receiver = ZmqReceiver(context, "127.0.0.1", build(self.blocks), PLAIN)
        self.receiver.expect(key_of(1), GRANTED, GENERATIONS)
        self.raw = context.socket(zmq.PUSH)
        self.raw.connect(self.receiver.endpoint.address)
        self.arrived: list[int] = []

    def send(
        self,
        payloads: Sequence[bytes],
        *,
        number: int = 1,
        first_index: int = 0,
        block_ids: tuple[int, ...] = GRANTED,
        generations: tuple[int, ...] = GENERATIONS,
    ) -> None:
        batch = BlockBatch(HandoffName(*key_of(number)), first_index, block_ids, generations)
        self.raw.send_multipart([HEADERS.encode(batch), *payloads])

    def poll(self) -> None:
        self.receiver.poll()
        for arrival in self.receiver.take_arrivals():
            assert arrival.key == key_of(1)
            self.arrived += range(arrival.first_index, arrival.first_index + arrival.count)

    def poll_until(self, num_refused: int, arrived: Sequence[int]) -> None:
        def is_so() -> bool:
            self.poll()
            return (self.receiver.num_refused, self.arrived) == (num_refused, list(arrived))

        until(is_so)

    @property
    def is_untouched(self) -> bool:
        return bool((self.blocks == GUARD).all())


def payload(num_blocks: int = 3) -> bytes:
    return bytes(num_blocks * BLOCK_BYTES)


class Sink:
    """A raw socket in the place of a receiver; it takes only what it is asked to."""

    def __init__(self, context: Context) -> None:
        self.socket = context.socket(zmq.PULL)
        self.socket.setsockopt(zmq.RCVHWM, 1)
        self.endpoint = Endpoint("zmq", f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}")

    def receive(self) -> tuple[BlockBatch, list[bytes]]:
        assert self.socket.poll(5000)
        header, *frames = self.socket.recv_multipart()
        return HEADERS.decode(header), frames


def moves_of(sources: Sequence[int], first_index: int = 0) -> list[Move]:
    return [Move(first_index + i, source, 100 + i, 3) for i, source in enumerate(sources)]


def pushed(sender: ZmqSender, number: int, moves: Sequence[Move]) -> bool:
    """Whether a push was accepted; the connection is given time to be made."""
    until(lambda: sender.push(key_of(number), moves))
    return True


def numbered(num_blocks: int, block_bytes: int) -> Blocks:
    return np.repeat(np.arange(num_blocks, dtype=np.uint8)[:, None], block_bytes, axis=1)


def granted_moves() -> list[Move]:
    return [Move(i, i, t, g) for i, (t, g) in enumerate(zip(GRANTED, GENERATIONS, strict=True))]
