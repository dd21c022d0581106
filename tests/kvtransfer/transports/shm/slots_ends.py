"""Ends of the shm_slots transport for tests: real ones, and ones made by hand that say whatever a test wants."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from baton.kvtransfer.messages import Endpoint, HandoffName
from baton.kvtransfer.pools.base import KvPool
from baton.kvtransfer.pools.host import HostPool
from baton.kvtransfer.transports.base import Blocks, Move
from baton.kvtransfer.transports.shm.ring import OwnRing, RingShape
from baton.kvtransfer.transports.shm.segment import FOLDER
from baton.kvtransfer.transports.shm.slots_receiver import SlotsReceiver
from baton.kvtransfer.transports.shm.slots_sender import SlotsSender, slot_blocks_of
from baton.kvtransfer.transports.shm.slots_wire import NAME, TO_RECEIVER, TO_SENDER, RingHello, SlotBatch
from baton.wire.links import LinkSettings
from tests.request_keys import key_of

BLOCK_BYTES, NUM_BLOCKS = 4096, 16
GUARD = 0xA5
PLAIN = LinkSettings()
WAIT_S = 10.0
SHAPE = RingShape(4, 2, BLOCK_BYTES)


class Target:
    """A receiver and its pool."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], build: Callable[[Blocks], KvPool]) -> None:
        self.blocks: Blocks = np.full((NUM_BLOCKS, BLOCK_BYTES), GUARD, dtype=np.uint8)
        self.receiver = SlotsReceiver(context, "127.0.0.1", build(self.blocks), PLAIN)

    @property
    def is_untouched(self) -> bool:
        return bool((self.blocks == GUARD).all())

    def arrived(self) -> list[tuple[int, int]]:
        """(first_index, count) of what arrived since the last call."""
        self.receiver.poll()
        return [(arrival.first_index, arrival.count) for arrival in self.receiver.take_arrivals()]


class Peer:
    """A sender made by hand: it says whatever a test wants, and has a ring of its own."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], target: Target) -> None:
        self.target = target
        self.ring = OwnRing(SHAPE, HostPool(np.zeros((1, BLOCK_BYTES), dtype=np.uint8)))
        self.hello = RingHello(self.ring.name, SHAPE.num_slots, SHAPE.slot_blocks, BLOCK_BYTES)
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self.socket.connect(target.receiver.endpoint.address)

    def say(self, *messages: Any) -> None:
        for message in messages:
            self.socket.send(message if isinstance(message, bytes) else TO_RECEIVER.encode(message))

    def hear(self) -> Any:
        """The next answer."""
        deadline_s = time.monotonic() + WAIT_S
        while not self.socket.poll(1):
            self.target.receiver.poll()
            assert time.monotonic() < deadline_s, "there is no answer"
        return TO_SENDER.decode(self.socket.recv())

    def is_answered(self) -> bool:
        for _ in range(30):
            self.target.receiver.poll()
            if self.socket.poll(1):
                return True
        return False

    def close(self) -> None:
        self.socket.close(linger=0)
        self.ring.close()


def batch(number: int = 0, slot: int = 0, targets: tuple[int, ...] = (6, 7), **changes: Any) -> SlotBatch:
    """Blocks of handoff 1 at the beginning of its grant."""
    made = SlotBatch(number, slot, HandoffName(*key_of(1)), 0, targets, (3,) * len(targets))
    return replace(made, **changes)


def ring_of(sender: SlotsSender) -> Path:
    return FOLDER / sender._ring.name


def until(is_done: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not is_done():
        assert time.monotonic() < deadline_s, "what the test waits for did not happen"
        time.sleep(0.001)


class Sending:
    """A sender to a target, both driven by the test."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], target: Target, pool: KvPool, num_slots: int) -> None:
        ring_bytes = num_slots * slot_blocks_of(BLOCK_BYTES) * BLOCK_BYTES
        self.target = target
        self.sender = SlotsSender(context, target.receiver.endpoint, pool, PLAIN, ring_bytes)

    def push(self, *sources: int, targets: tuple[int, ...] = (6, 7), receive: bool = True) -> None:
        moves = [Move(i, source, targets[i], 3) for i, source in enumerate(sources)]

        def is_pushed() -> bool:
            if receive:
                self.target.receiver.poll()
            return self.sender.push(key_of(1), moves)

        until(is_pushed)


class FakeReceiver:
    """A receiver made by hand, to which a real sender is connected."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], pool: KvPool) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        ring_bytes = 2 * slot_blocks_of(BLOCK_BYTES) * BLOCK_BYTES
        endpoint = Endpoint(NAME, f"tcp://127.0.0.1:{port}")
        self.sender = SlotsSender(context, endpoint, pool, PLAIN, ring_bytes)
        until(lambda: self.sender.push(key_of(1), [Move(0, 1, 1, 1)]))
        self.connection = self.socket.recv_multipart()[0]

    def say(self, message: Any) -> None:
        frame = message if isinstance(message, bytes) else TO_SENDER.encode(message)
        self.socket.send_multipart([self.connection, frame])

    def close(self) -> None:
        self.sender.close()
        self.socket.close(linger=0)
