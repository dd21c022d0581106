"""Slots in shared memory: what a sender may rely on and refuses, and that nothing is left of either end."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zmq

from baton.kvtransfer.messages import Endpoint
from baton.kvtransfer.pools.base import KvPool
from baton.kvtransfer.pools.device import DevicePool
from baton.kvtransfer.pools.host import HostPool
from baton.kvtransfer.transports.base import Blocks, Move
from baton.kvtransfer.transports.shm import segment
from baton.kvtransfer.transports.shm.ring import OwnRing, RingShape
from baton.kvtransfer.transports.shm.segment import FOLDER
from baton.kvtransfer.transports.shm.slots_receiver import SlotsReceiver
from baton.kvtransfer.transports.shm.slots_sender import SlotsSender
from baton.kvtransfer.transports.shm.slots_wire import NAME, TO_RECEIVER, RingEnd, SlotTaken
from baton.wire.errors import TransferFailed
from baton.wire.keys import ClusterKey
from baton.wire.links import LinkSettings
from tests.kvtransfer.late_stream import late_pool
from tests.kvtransfer.transports.shm.slots_ends import (
    BLOCK_BYTES,
    GUARD,
    NUM_BLOCKS,
    PLAIN,
    FakeReceiver,
    Sending,
    Target,
    ring_of,
    until,
)
from tests.request_keys import key_of


@pytest.fixture
def sending(context: zmq.Context[zmq.Socket[bytes]], target: Target, source: Blocks) -> Iterator[Sending]:
    sending = Sending(context, target, late_pool(source), 2)
    yield sending
    sending.sender.close()


def test_blocks_may_change_as_soon_as_they_are_pushed(sending: Sending, source: Blocks) -> None:
    true = source.copy()
    sending.push(4, 9)
    assert not sending.sender.is_reading(key_of(1))
    source[:] = 0
    until(lambda: sending.target.arrived() == [(0, 2)])
    assert (sending.target.blocks[6:8] == true[[4, 9]]).all()


def test_a_slot_is_used_again_only_when_the_receiver_has_given_it_back(sending: Sending, source: Blocks) -> None:
    target = sending.target
    target.receiver.expect(key_of(1), (0, 1, 2), (3, 3, 3))
    moves = [[Move(index, index, index, 3)] for index in range(3)]
    until(lambda: sending.sender.push(key_of(1), moves[0]))
    assert sending.sender.push(key_of(1), moves[1])
    for _ in range(20):
        assert not sending.sender.push(key_of(1), moves[2]), "both slots are the receiver's"
        time.sleep(0.001)

    def is_given_back() -> bool:
        target.receiver.poll()
        return sending.sender.push(key_of(1), moves[2])

    until(is_given_back)
    until(lambda: bool(target.arrived()) and bool((target.blocks[2] == source[2]).all()))
    assert (target.blocks[:3] == source[:3]).all()


def test_all_slots_come_back(sending: Sending) -> None:
    for _ in range(9):
        sending.target.receiver.expect(key_of(1), (6, 7), (3, 3))
        sending.push(1, 2)
        until(lambda: sending.target.arrived() == [(0, 2)])
    until(lambda: sending.sender.push(key_of(1), []) and sending.sender.num_free_slots == 2)
    assert sending.target.receiver.num_refused == 0


def test_more_than_a_ring_holds_is_an_error(sending: Sending) -> None:
    # places that do not follow each other: a slot for each
    with pytest.raises(ValueError, match="do not fit a ring of 2 slots"):
        sending.sender.push(key_of(1), [Move(2 * index, index, index, 3) for index in range(3)])


def test_a_receiver_that_has_gone_ends_the_sender(sending: Sending) -> None:
    sending.push(1)
    sending.target.receiver.close()

    def has_failed() -> bool:
        try:
            sending.sender.poll()
        except TransferFailed:
            return True
        return False

    until(has_failed)
    with pytest.raises(TransferFailed):
        sending.sender.push(key_of(1), [Move(0, 1, 1, 1)])


@pytest.fixture
def fake(context: zmq.Context[zmq.Socket[bytes]], source: Blocks) -> Iterator[FakeReceiver]:
    fake = FakeReceiver(context, late_pool(source))
    yield fake
    fake.close()


def test_a_slot_that_is_given_back_twice_is_free_once(fake: FakeReceiver) -> None:
    for number in (0, 0, 1, 2**62):
        fake.say(SlotTaken(number))
    until(lambda: fake.sender.push(key_of(1), []) and fake.sender.num_refused == 3)
    assert fake.sender.num_free_slots == 2
    slots = set()
    for _ in range(2):
        assert fake.sender.push(key_of(1), [Move(0, 1, 1, 1)])
    assert not fake.sender.push(key_of(1), [Move(0, 1, 1, 1)])
    for frames in [fake.socket.recv_multipart() for _ in range(3)]:
        slots.add(TO_RECEIVER.decode(frames[1]).slot)
    assert slots == {0, 1}


def test_the_first_reason_stays(fake: FakeReceiver) -> None:
    def failure() -> str:
        try:
            fake.sender.poll()
        except TransferFailed as error:
            return str(error)
        return ""

    fake.say(RingEnd("no room here"))
    until(lambda: bool(failure()))
    fake.socket.close(linger=0)
    until(lambda: bool(failure()) and fake.sender._connection.has_broken)
    assert "no room here" in failure()


@pytest.mark.parametrize("message", [RingEnd("no room here"), b"nonsense"], ids=["ended", "nonsense"])
def test_whatever_ends_the_ring_ends_the_sender(fake: FakeReceiver, message: Any) -> None:
    fake.say(message)

    def has_failed() -> bool:
        with contextlib.suppress(TransferFailed):
            fake.sender.poll()
            return False
        return True

    until(has_failed)
    with pytest.raises(TransferFailed, match=r"no room here|something else"):
        fake.sender.push(key_of(1), [Move(0, 1, 1, 1)])


def test_a_bad_address_is_refused_and_leaves_nothing(
    context: zmq.Context[zmq.Socket[bytes]], source: Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    real_ring = OwnRing.__init__

    def note(self: OwnRing, shape: RingShape, pool: KvPool) -> None:
        real_ring(self, shape, pool)
        made.append(self.name)

    monkeypatch.setattr(OwnRing, "__init__", note)
    for address in ("", "tcp://nowhere", "ipc://x", "tcp://127.0.0.1:99999"):
        with pytest.raises(TransferFailed, match="cannot be dialled"):
            SlotsSender(context, Endpoint(NAME, address), HostPool(source), PLAIN)
    assert len(made) == 4
    assert not any((FOLDER / name).exists() for name in made)


def test_without_shared_memory_it_is_refused(
    context: zmq.Context[zmq.Socket[bytes]],
    target: Target,
    source: Blocks,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(segment, "FOLDER", tmp_path / "no such folder")
    with pytest.raises(TransferFailed, match="no shared memory for a ring"):
        SlotsSender(context, target.receiver.endpoint, HostPool(source), PLAIN)


@pytest.mark.parametrize("who_first", ["sender", "receiver"])
def test_nothing_is_left_after_close(context: zmq.Context[zmq.Socket[bytes]], source: Blocks, who_first: str) -> None:
    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    def mappings() -> int:
        gc.collect()
        return Path("/proc/self/maps").read_text().count("/dev/shm/baton-")

    def once() -> None:
        target = Target(context, lambda blocks: DevicePool(torch.from_numpy(blocks)))
        target.receiver.expect(key_of(1), (6, 7), (3, 3))
        sending = Sending(context, target, late_pool(source), 2)
        sending.push(1, 2)
        until(lambda: target.arrived() == [(0, 2)])
        assert mappings() == num_mappings + 2
        ends = [sending.sender.close, target.receiver.close]
        for close in ends if who_first == "sender" else reversed(ends):
            close()
            close()
        assert not ring_of(sending.sender).exists()

    num_mappings = mappings()
    once()
    before = descriptors()
    for _ in range(3):
        once()
    until(lambda: descriptors() <= before)
    assert mappings() == num_mappings


def took(receiver: SlotsReceiver) -> bool:
    receiver.poll()
    return bool(receiver.take_arrivals())


def test_with_a_cluster_key_nobody_else_is_heard(
    context: zmq.Context[zmq.Socket[bytes]], source: Blocks, tmp_path: Path
) -> None:
    from baton.runtime.process import start_authenticator

    public, secret = zmq.curve_keypair()
    key = ClusterKey(public, secret)
    authenticator = start_authenticator(context, key)
    assert authenticator is not None
    settings = LinkSettings(cluster_key=key)
    blocks = np.full((NUM_BLOCKS, BLOCK_BYTES), GUARD, dtype=np.uint8)
    receiver = SlotsReceiver(context, "127.0.0.1", HostPool(blocks), settings)
    stranger = SlotsSender(context, receiver.endpoint, HostPool(source), PLAIN, 2**20)
    friend = SlotsSender(context, receiver.endpoint, HostPool(source), settings, 2**20)
    try:
        receiver.expect(key_of(1), (6,), (3,))
        until(lambda: friend.push(key_of(1), [Move(0, 1, 6, 3)]))
        until(lambda: took(receiver))
        assert (blocks[6] == source[1]).all()
        with contextlib.suppress(TransferFailed):  # once it has noticed
            assert not stranger.push(key_of(1), [Move(0, 2, 6, 3)])
        assert receiver.num_rings == 1
    finally:
        for end in (stranger, friend, receiver):
            end.close()
        authenticator.stop()


def test_a_sender_that_closes_says_so(fake: FakeReceiver) -> None:
    assert len(fake.sender.wait_on()) == 2
    for _ in range(2):
        fake.sender.close()
    said: Any = None
    while not isinstance(said, RingEnd):
        assert fake.socket.poll(10_000)
        said = TO_RECEIVER.decode(fake.socket.recv_multipart()[1])
    assert said == RingEnd("the sender was closed")
    assert fake.sender.wait_on() == ()
    with pytest.raises(TransferFailed, match="the sender is closed"):
        fake.sender.poll()


@pytest.mark.parametrize(
    ("block_bytes", "ring_bytes", "slot_blocks", "num_slots"),
    [(4096, 64 * 2**20, 1024, 16), (2**20, 64 * 2**20, 4, 16), (3 * 2**20, 64 * 2**20, 1, 21), (2**23, 1, 1, 2)],
)
def test_a_ring_has_slots_of_a_few_megabytes(
    context: zmq.Context[zmq.Socket[bytes]], block_bytes: int, ring_bytes: int, slot_blocks: int, num_slots: int
) -> None:
    endpoint = Endpoint("shm_slots", "tcp://127.0.0.1:9")
    pool = HostPool(np.zeros((1, block_bytes), dtype=np.uint8))
    sender = SlotsSender(context, endpoint, pool, PLAIN, ring_bytes)
    try:
        assert (sender._shape.slot_blocks, sender._shape.num_slots, sender.num_free_slots) == (
            slot_blocks,
            num_slots,
            num_slots,
        )
        assert sender.piece_bytes == slot_blocks * block_bytes
        assert (sender.is_silent, sender.pushes_parts, sender.needs_fence, sender.writers) == (False, False, False, ())
        assert not sender.is_reading(key_of(1))
    finally:
        sender.close()
