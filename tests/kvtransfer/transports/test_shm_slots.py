"""Slots in shared memory: what peers that die, lie, or come twice can do, and that nothing is left of them."""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zmq

from kvtransfer.messages import Endpoint, HandoffName
from kvtransfer.pools.base import KvPool
from kvtransfer.pools.device import DevicePool
from kvtransfer.pools.host import HostPool
from kvtransfer.transports.base import Blocks, Move
from kvtransfer.transports.shm import segment, slots_receiver
from kvtransfer.transports.shm.ring import OwnRing, PeerRing, RingShape
from kvtransfer.transports.shm.segment import FOLDER, sweep_orphans
from kvtransfer.transports.shm.slots_receiver import SlotsReceiver
from kvtransfer.transports.shm.slots_sender import SlotsSender, slot_blocks_of
from kvtransfer.transports.shm.slots_wire import (
    NAME,
    TO_RECEIVER,
    TO_SENDER,
    RingEnd,
    RingHello,
    SlotBatch,
    SlotTaken,
)
from tests.kvtransfer.late_stream import LateStream, late_pool
from tests.kvtransfer.transports.endpoint_process import key_of
from wire.errors import TransferFailed
from wire.links import ClusterKey, LinkSettings

_BLOCK_BYTES, _NUM_BLOCKS = 4096, 16
_GUARD = 0xA5
_PLAIN = LinkSettings()
_WAIT_S = 10.0
_SHAPE = RingShape(4, 2, _BLOCK_BYTES)
_PUSH_AND_HOLD = """
import sys, time
import torch, zmq
from wire.links import LinkSettings
from kvtransfer.pools.device import DevicePool
from kvtransfer.messages import Endpoint
from kvtransfer.transports.base import Move
from kvtransfer.transports.shm.slots_sender import SlotsSender
blocks = torch.full((4, 4096), 7, dtype=torch.uint8)
sender = SlotsSender(zmq.Context(), Endpoint("shm_slots", sys.argv[1]), DevicePool(blocks), LinkSettings())
while not sender.push((bytes(15) + bytes([1]), 1), [Move(0, 1, 6, 3)]):
    time.sleep(0.001)
print("pushed", flush=True)
time.sleep(60)
"""


class Target:
    """A receiver and its pool."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], build: Callable[[Blocks], KvPool]) -> None:
        self.blocks: Blocks = np.full((_NUM_BLOCKS, _BLOCK_BYTES), _GUARD, dtype=np.uint8)
        self.receiver = SlotsReceiver(context, "127.0.0.1", build(self.blocks), _PLAIN)

    @property
    def is_untouched(self) -> bool:
        return bool((self.blocks == _GUARD).all())

    def arrived(self) -> list[tuple[int, int]]:
        """(first_index, count) of what arrived since the last call."""
        self.receiver.poll()
        return [(arrival.first_index, arrival.count) for arrival in self.receiver.take_arrivals()]


class Peer:
    """A sender made by hand: it says whatever a test wants, and has a ring of its own."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], target: Target) -> None:
        self.target = target
        self.ring = OwnRing(_SHAPE, HostPool(np.zeros((1, _BLOCK_BYTES), dtype=np.uint8)))
        self.hello = RingHello(self.ring.name, _SHAPE.num_slots, _SHAPE.slot_blocks, _BLOCK_BYTES)
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self.socket.connect(target.receiver.endpoint.address)

    def say(self, *messages: Any) -> None:
        for message in messages:
            self.socket.send(message if isinstance(message, bytes) else TO_RECEIVER.encode(message))

    def hear(self) -> Any:
        """The next answer."""
        deadline_s = time.monotonic() + _WAIT_S
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


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def target(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[Target]:
    target = Target(context, late_pool)
    target.receiver.expect(key_of(1), (6, 7), (3, 3))
    yield target
    target.receiver.close()


@pytest.fixture
def peer(context: zmq.Context[zmq.Socket[bytes]], target: Target) -> Iterator[Peer]:
    peer = Peer(context, target)
    peer.ring.slots[:] = np.arange(1, 1 + _SHAPE.num_slots, dtype=np.uint8)[:, None, None]
    yield peer
    peer.close()


@pytest.fixture
def source() -> Blocks:
    return np.random.default_rng(1).integers(0, 256, (_NUM_BLOCKS, _BLOCK_BYTES), dtype=np.uint8)


def ring_of(sender: SlotsSender) -> Path:
    return FOLDER / sender._ring.name


def until(is_done: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + _WAIT_S
    while not is_done():
        assert time.monotonic() < deadline_s, "what the test waits for did not happen"
        time.sleep(0.001)


def test_a_batch_is_written_before_it_is_reported_or_its_slot_is_given_back(target: Target, peer: Peer) -> None:
    peer.say(peer.hello, batch(slot=2))
    assert peer.hear() == SlotTaken(0)
    assert target.arrived() == [(0, 2)]
    assert (target.blocks[6:8] == 3).all()
    target.blocks[6:8] = _GUARD
    assert target.is_untouched


def test_nothing_is_written_after_a_grant_was_forgotten(target: Target, peer: Peer) -> None:
    peer.say(peer.hello, batch())
    assert peer.hear() == SlotTaken(0)
    target.receiver.forget(key_of(1))
    target.blocks[:] = _GUARD
    stream = target.receiver._pool._stream  # type: ignore[attr-defined]
    assert isinstance(stream, LateStream)
    assert stream.num_left == 0, "a copy is under way into blocks that may belong to somebody else now"


@pytest.mark.parametrize(
    "changes",
    [
        {"targets": (7, 6)},
        {"targets": (6, 8)},
        {"targets": (6, 15)},
        {"generations": (3, 4)},
        {"first_index": 1},
        {"handoff": HandoffName(*key_of(2))},
        {"handoff": HandoffName(key_of(1)[0], 2)},
    ],
    ids=["swapped", "foreign block", "other block", "old generation", "shifted", "unknown handoff", "other attempt"],
)
def test_what_no_grant_announced_changes_nothing_and_costs_its_slot_nothing(
    target: Target, peer: Peer, changes: dict[str, Any]
) -> None:
    peer.say(peer.hello, batch(**changes))
    assert peer.hear() == SlotTaken(0)
    assert target.arrived() == []
    assert target.is_untouched
    assert target.receiver.num_refused == 1
    peer.say(batch(1))
    assert peer.hear() == SlotTaken(1)
    assert target.arrived() == [(0, 2)]


def test_blocks_that_arrived_are_not_written_again(target: Target, peer: Peer) -> None:
    peer.say(peer.hello, batch(slot=0), batch(1, slot=1))
    assert [peer.hear(), peer.hear()] == [SlotTaken(0), SlotTaken(1)]
    assert target.arrived() == [(0, 2)]
    assert (target.blocks[6:8] == 1).all()
    assert target.receiver.num_refused == 1


def test_a_header_that_comes_twice_is_not_answered_twice(target: Target, peer: Peer) -> None:
    peer.say(peer.hello, batch())
    assert peer.hear() == SlotTaken(0)
    target.receiver.expect(key_of(1), (6, 7), (3, 3))
    target.blocks[:] = _GUARD
    peer.ring.slots[0] = 99  # the slot is the sender's again
    peer.say(batch())
    assert not peer.is_answered()
    assert target.is_untouched
    assert target.receiver.num_refused == 1


@pytest.mark.parametrize(
    "bad",
    [
        batch(slot=4),
        batch(slot=1_023),
        batch(number=1),
        batch(targets=()),
        batch(targets=(6, 7, 8)),
        batch(generations=(3,)),
    ],
    ids=["slot beyond the ring", "slot far away", "a gap", "no blocks", "more than a slot", "too few generations"],
)
def test_headers_that_cannot_be_cost_the_sender_its_ring(target: Target, peer: Peer, bad: SlotBatch) -> None:
    peer.say(peer.hello, bad, batch())
    assert peer.hear() == RingEnd("the sender's headers do not fit together")
    assert peer.hear() == RingEnd("there is no ring for this connection")
    assert target.is_untouched
    assert (target.receiver.num_rings, target.receiver.num_refused) == (0, 2)


@pytest.mark.parametrize("bad", [b"", b"BT", b"x" * 200, os.urandom(64)])
def test_what_is_no_message_changes_nothing(target: Target, peer: Peer, bad: bytes) -> None:
    peer.say(peer.hello, bad, batch())
    assert peer.hear() == SlotTaken(0)
    assert target.receiver.num_refused == 1


def test_a_message_of_several_frames_changes_nothing(target: Target, peer: Peer) -> None:
    peer.say(peer.hello)
    peer.socket.send_multipart([TO_RECEIVER.encode(batch())] * 2)
    assert not peer.is_answered()
    assert target.is_untouched
    assert target.receiver.num_refused == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"num_slots": 3},
        {"num_slots": 5},
        {"slot_blocks": 1},
        {"slot_blocks": 1_024, "num_slots": 1_024},
        {"block_bytes": 2048},
        {"block_bytes": 2**40},
        {"name": "baton-" + "0" * 32},
    ],
)
def test_a_ring_that_is_not_what_it_is_said_to_be_is_refused(
    target: Target, peer: Peer, changes: dict[str, Any]
) -> None:
    peer.say(replace(peer.hello, **changes), batch())
    assert isinstance(peer.hear(), RingEnd)
    assert peer.hear() == RingEnd("there is no ring for this connection")
    assert target.is_untouched
    assert target.receiver.num_rings == 0


@pytest.fixture
def planted() -> Iterator[Path]:
    """A place in /dev/shm whose name looks like a ring's; removed afterwards."""
    path = FOLDER / f"baton-{secrets.token_hex(16)}"
    yield path
    path.unlink(missing_ok=True)


def test_names_that_are_not_of_segments_are_not_even_opened(target: Target, peer: Peer, tmp_path: Path) -> None:
    outside = tmp_path / "x"
    outside.write_bytes(bytes(_SHAPE.num_bytes))  # right in every other way
    ours = peer.ring.name
    names = ["", "sem.other", f"{ours}0", f"./{ours}", f"../shm/{ours}", ours.upper(), "../../etc/passwd"]
    for name in [*names, *([str(outside)] if len(str(outside)) <= 64 else [])]:
        peer.say(replace(peer.hello, name=name))
        assert "not a segment" in peer.hear().reason
    assert target.receiver.num_rings == 0


def test_names_never_lead_to_another_file(target: Target, peer: Peer, planted: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(bytes(_SHAPE.num_bytes))
    planted.symlink_to(victim)
    peer.say(replace(peer.hello, name=planted.name))
    assert "cannot be opened" in peer.hear().reason


def test_what_is_no_plain_file_is_refused(target: Target, peer: Peer, planted: Path) -> None:
    os.mkfifo(planted)
    peer.say(replace(peer.hello, name=planted.name))
    assert "not a segment of this user" in peer.hear().reason


def test_files_of_others_are_refused(planted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.write_bytes(bytes(_SHAPE.num_bytes))
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(planted).st_uid + 1)
    with pytest.raises(TransferFailed, match="not a segment of this user"):
        PeerRing(planted.name, _SHAPE, HostPool(np.zeros((1, _BLOCK_BYTES), dtype=np.uint8)))


def test_a_ring_belongs_to_the_connection_that_named_it_first(
    context: zmq.Context[zmq.Socket[bytes]], target: Target, peer: Peer
) -> None:
    peer.say(peer.hello)
    until(lambda: bool(target.arrived()) or target.receiver.num_rings == 1)
    thief = Peer(context, target)
    try:
        thief.say(peer.hello, batch())
        assert thief.hear() == RingEnd("this ring belongs to another connection")
        assert target.is_untouched
        peer.say(peer.hello, batch())
        assert peer.hear() == SlotTaken(0)
        assert target.receiver.num_refused == 3
    finally:
        thief.close()


def test_a_receiver_maps_a_bounded_number_of_rings(
    context: zmq.Context[zmq.Socket[bytes]], target: Target, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots_receiver, "_MAX_RINGS", 1)
    peer.say(peer.hello)
    until(lambda: bool(target.arrived()) or target.receiver.num_rings == 1)
    other = Peer(context, target)
    try:
        other.say(other.hello)
        assert other.hear() == RingEnd("the receiver has 1 rings already")
    finally:
        other.close()


def test_a_ring_whose_sender_says_goodbye_is_unmapped(target: Target, peer: Peer) -> None:
    peer.say(peer.hello, RingEnd("enough"))
    until(lambda: bool(target.arrived()) or target.receiver.num_rings == 0)
    peer.say(batch())
    assert peer.hear() == RingEnd("there is no ring for this connection")


class Sending:
    """A sender to a target, both driven by the test."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], target: Target, pool: KvPool, num_slots: int) -> None:
        ring_bytes = num_slots * slot_blocks_of(_BLOCK_BYTES) * _BLOCK_BYTES
        self.target = target
        self.sender = SlotsSender(context, target.receiver.endpoint, pool, _PLAIN, ring_bytes)

    def push(self, *sources: int, targets: tuple[int, ...] = (6, 7), receive: bool = True) -> None:
        moves = [Move(i, source, targets[i], 3) for i, source in enumerate(sources)]

        def is_pushed() -> bool:
            if receive:
                self.target.receiver.poll()
            return self.sender.push(key_of(1), moves)

        until(is_pushed)


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


class FakeReceiver:
    """A receiver made by hand, to which a real sender is connected."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], pool: KvPool) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        ring_bytes = 2 * slot_blocks_of(_BLOCK_BYTES) * _BLOCK_BYTES
        endpoint = Endpoint(NAME, f"tcp://127.0.0.1:{port}")
        self.sender = SlotsSender(context, endpoint, pool, _PLAIN, ring_bytes)
        until(lambda: self.sender.push(key_of(1), [Move(0, 1, 1, 1)]))
        self.connection = self.socket.recv_multipart()[0]

    def say(self, message: Any) -> None:
        frame = message if isinstance(message, bytes) else TO_SENDER.encode(message)
        self.socket.send_multipart([self.connection, frame])

    def close(self) -> None:
        self.sender.close()
        self.socket.close(linger=0)


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
            SlotsSender(context, Endpoint(NAME, address), HostPool(source), _PLAIN)
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
        SlotsSender(context, target.receiver.endpoint, HostPool(source), _PLAIN)


def test_a_killed_sender_costs_its_ring_and_nothing_else(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots_receiver, "_LOOK_S", 0.0)
    arguments = [sys.executable, "-c", _PUSH_AND_HOLD, target.receiver.endpoint.address]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as sender:
        assert sender.stdout is not None
        assert sender.stdout.readline().strip() == "pushed"
        until(lambda: target.arrived() == [(0, 1)])
        assert (target.blocks[6] == 7).all()
        (incoming,) = target.receiver._incoming.values()
        sender.send_signal(signal.SIGKILL)
        sender.wait()
    until(lambda: bool(target.arrived()) or target.receiver.num_rings == 0)
    assert not (FOLDER / incoming.ring.name).exists(), "its segment is removed by whoever notices"


def test_a_sender_that_dies_before_its_slot_is_given_back_costs_its_ring_only(target: Target, peer: Peer) -> None:
    peer.say(peer.hello, batch(slot=2))
    assert target.receiver._socket.poll(1000)
    time.sleep(0.1)  # until both messages are there, and none of them is read
    peer.socket.close(linger=0)
    time.sleep(0.1)
    target.receiver.poll()
    assert (target.blocks[6:8] == 3).all()
    assert target.receiver.num_rings == 0


def test_a_frozen_sender_keeps_its_ring(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots_receiver, "_LOOK_S", 0.0)
    arguments = [sys.executable, "-c", _PUSH_AND_HOLD, target.receiver.endpoint.address]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as sender:
        try:
            assert sender.stdout is not None
            sender.stdout.readline()
            until(lambda: target.arrived() == [(0, 1)])
            sender.send_signal(signal.SIGSTOP)
            for _ in range(20):
                target.receiver.poll()
            assert target.receiver.num_rings == 1
        finally:
            sender.kill()
    sweep_orphans()


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
    for _ in range(5):
        once()
    until(lambda: descriptors() <= before)
    assert mappings() == num_mappings


def took(receiver: SlotsReceiver) -> bool:
    receiver.poll()
    return bool(receiver.take_arrivals())


def test_with_a_cluster_key_nobody_else_is_heard(
    context: zmq.Context[zmq.Socket[bytes]], source: Blocks, tmp_path: Path
) -> None:
    from program.process import start_authenticator

    public, secret = zmq.curve_keypair()
    key = ClusterKey(public, secret)
    authenticator = start_authenticator(context, key)
    assert authenticator is not None
    settings = LinkSettings(cluster_key=key)
    blocks = np.full((_NUM_BLOCKS, _BLOCK_BYTES), _GUARD, dtype=np.uint8)
    receiver = SlotsReceiver(context, "127.0.0.1", HostPool(blocks), settings)
    stranger = SlotsSender(context, receiver.endpoint, HostPool(source), _PLAIN, 2**20)
    friend = SlotsSender(context, receiver.endpoint, HostPool(source), settings, 2**20)
    try:
        receiver.expect(key_of(1), (6,), (3,))
        until(lambda: friend.push(key_of(1), [Move(0, 1, 6, 3)]))
        until(lambda: took(receiver))
        assert (blocks[6] == source[1]).all()
        assert not stranger.push(key_of(1), [Move(0, 2, 6, 3)])
        assert receiver.num_rings == 1
    finally:
        for end in (stranger, friend, receiver):
            end.close()
        authenticator.stop()
