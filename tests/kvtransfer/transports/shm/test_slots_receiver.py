"""Slots in shared memory: what senders that die, lie, or come twice can do to a receiver."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import zmq

from baton.kvtransfer.messages import HandoffName
from baton.kvtransfer.pools.host import HostPool
from baton.kvtransfer.transports.shm import slots_receiver
from baton.kvtransfer.transports.shm.ring import PeerRing
from baton.kvtransfer.transports.shm.segment import FOLDER
from baton.kvtransfer.transports.shm.slots_wire import TO_RECEIVER, TO_SENDER, RingEnd, SlotBatch, SlotTaken
from baton.wire.errors import TransferFailed
from tests.kvtransfer.late_stream import LateStream
from tests.kvtransfer.transports.shm.slots_ends import BLOCK_BYTES, GUARD, SHAPE, Peer, Target, batch, until
from tests.request_keys import key_of

_PUSH_AND_HOLD = """
import sys, time
import numpy as np, zmq
from baton.wire.links import LinkSettings
from baton.kvtransfer.pools.host import HostPool
from baton.kvtransfer.messages import Endpoint
from baton.kvtransfer.transports.base import Move
from baton.kvtransfer.transports.shm.slots_sender import SlotsSender
from tests.request_keys import key_of
blocks = np.full((4, 4096), 7, dtype=np.uint8)
sender = SlotsSender(zmq.Context(), Endpoint("shm_slots", sys.argv[1]), HostPool(blocks), LinkSettings())
while not sender.push(key_of(1), [Move(0, 1, 6, 3)]):
    time.sleep(0.001)
print("pushed", flush=True)
time.sleep(60)
"""


def test_a_batch_is_written_before_it_is_reported_or_its_slot_is_given_back(target: Target, peer: Peer) -> None:
    peer.say(peer.hello, batch(slot=2))
    assert peer.hear() == SlotTaken(0)
    assert target.arrived() == [(0, 2)]
    assert (target.blocks[6:8] == 3).all()
    target.blocks[6:8] = GUARD
    assert target.is_untouched


def test_nothing_is_written_after_a_grant_was_forgotten(target: Target, peer: Peer) -> None:
    peer.say(peer.hello, batch())
    assert peer.hear() == SlotTaken(0)
    target.receiver.forget(key_of(1))
    target.blocks[:] = GUARD
    stream = target.receiver._pool.stream  # type: ignore[attr-defined]
    assert isinstance(stream, LateStream)
    assert stream.num_left == 0, "a copy is in flight into blocks that may belong to somebody else now"


@pytest.mark.parametrize(
    "changes",
    [
        {"targets": (6, 8)},
        {"generations": (3, 4)},
        {"handoff": HandoffName(*key_of(2))},
    ],
    ids=["foreign block", "old generation", "unknown handoff"],
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


def test_a_header_that_comes_twice_is_not_answered_twice(target: Target, peer: Peer) -> None:
    peer.say(peer.hello, batch())
    assert peer.hear() == SlotTaken(0)
    target.receiver.expect(key_of(1), (6, 7), (3, 3))
    target.blocks[:] = GUARD
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


@pytest.mark.parametrize("bad", [b"", b"BT", b"x" * 200, bytes(range(64))])
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


def test_names_that_are_not_of_segments_are_not_even_opened(target: Target, peer: Peer, tmp_path: Path) -> None:
    outside = tmp_path / "x"
    outside.write_bytes(bytes(SHAPE.num_bytes))  # right in every other way
    ours = peer.ring.name
    names = ["", "sem.other", f"{ours}0", f"./{ours}", f"../shm/{ours}", ours.upper(), "../../etc/passwd"]
    for name in [*names, *([str(outside)] if len(str(outside)) <= 64 else [])]:
        peer.say(replace(peer.hello, name=name))
        assert "not a segment" in peer.hear().reason
    assert target.receiver.num_rings == 0


def test_names_never_lead_to_another_file(target: Target, peer: Peer, planted: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(bytes(SHAPE.num_bytes))
    planted.symlink_to(victim)
    peer.say(replace(peer.hello, name=planted.name))
    assert "cannot be mapped" in peer.hear().reason


def test_a_ring_that_was_cut_off_after_it_was_mapped_is_not_touched(target: Target, peer: Peer) -> None:
    peer.say(peer.hello)
    until(lambda: bool(target.arrived()) or target.receiver.num_rings == 1)
    os.truncate(FOLDER / peer.ring.name, 0)  # touching what is gone ends the process
    peer.say(batch())
    assert "has 0 bytes, not" in peer.hear().reason
    assert target.receiver.num_rings == 0
    assert target.is_untouched


def test_what_is_no_plain_file_is_refused(target: Target, peer: Peer, planted: Path) -> None:
    os.mkfifo(planted)
    peer.say(replace(peer.hello, name=planted.name))
    assert "not a segment of this user" in peer.hear().reason


def test_files_of_others_are_refused(planted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.write_bytes(bytes(SHAPE.num_bytes))
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(planted).st_uid + 1)
    with pytest.raises(TransferFailed, match="not a segment of this user"):
        PeerRing(planted.name, SHAPE, HostPool(np.zeros((1, BLOCK_BYTES), dtype=np.uint8)))


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


def test_a_frozen_sender_keeps_its_ring_and_a_killed_one_costs_its_ring_and_nothing_else(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots_receiver, "_LOOK_S", 0.0)
    arguments = [sys.executable, "-c", _PUSH_AND_HOLD, target.receiver.endpoint.address]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as sender:
        try:
            assert sender.stdout is not None
            assert sender.stdout.readline().strip() == "pushed"
            until(lambda: target.arrived() == [(0, 1)])
            assert (target.blocks[6] == 7).all()
            sender.send_signal(signal.SIGSTOP)
            for _ in range(20):
                target.receiver.poll()
            assert target.receiver.num_rings == 1
            (incoming,) = target.receiver._incoming.values()
        finally:
            sender.kill()
    until(lambda: bool(target.arrived()) or target.receiver.num_rings == 0)
    assert not (FOLDER / incoming.ring.name).exists(), "its segment is removed by whoever notices"


def test_a_sender_that_dies_before_its_slot_is_given_back_costs_its_ring_only(target: Target, peer: Peer) -> None:
    with target.receiver._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED) as ends:
        peer.say(peer.hello, batch(slot=2))
        peer.socket.close(linger=30_000)
        assert ends.poll(30_000), "both messages are there then, and none of them is read"
        target.receiver._socket.disable_monitor()
    target.receiver.poll()
    assert (target.blocks[6:8] == 3).all()
    assert target.receiver.num_rings == 0


def test_each_thing_that_changes_nothing_is_counted_once(
    context: zmq.Context[zmq.Socket[bytes]], target: Target, peer: Peer
) -> None:
    def refused(*messages: Any) -> int:
        before = target.receiver.num_refused
        peer.say(*messages)
        until(lambda: bool(target.arrived()) or target.receiver.num_refused > before)
        return target.receiver.num_refused - before

    assert refused(b"noise") == 1
    assert refused(batch()) == 1, "there is no ring"
    assert refused(replace(peer.hello, block_bytes=2048)) == 1
    assert refused(peer.hello, peer.hello) == 1
    other = Peer(context, target)
    try:
        other.say(peer.hello)
        assert isinstance(other.hear(), RingEnd)
        assert target.receiver.num_refused == 5
    finally:
        other.close()
    assert refused(batch(targets=(6, 8))) == 1, "nobody announced them"
    assert refused(batch()) == 1, "doubled"
    os.truncate(FOLDER / peer.ring.name, 0)
    assert refused(batch(1)) == 1
    assert target.receiver.num_rings == 0


def test_what_was_written_is_counted_in_bytes(target: Target, peer: Peer) -> None:
    peer.say(peer.hello, batch())
    assert peer.hear() == SlotTaken(0)
    assert target.receiver.num_bytes == 2 * BLOCK_BYTES


def test_a_turn_takes_a_bounded_number_of_bytes(target: Target, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    target.receiver.expect(key_of(1), (1, 2, 3, 4), (3,) * 4)
    monkeypatch.setattr(slots_receiver, "_MESSAGE_COST_BYTES", 1)
    monkeypatch.setattr(slots_receiver, "_MAX_POLL_BYTES", BLOCK_BYTES + 2)
    peer.say(peer.hello)
    until(lambda: bool(target.arrived()) or target.receiver.num_rings == 1)
    for index in range(4):
        peer.say(batch(index, targets=(index + 1,), first_index=index))
    until(lambda: target.receiver._socket.poll(0) > 0)
    found: list[list[tuple[int, int]]] = []

    def has_all() -> bool:
        found.append(target.arrived())
        return sum(map(len, found)) == 4

    until(has_all)
    assert max(map(len, found)) <= 2


def test_rings_are_looked_at_each_second(target: Target, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [1000.0]
    monkeypatch.setattr(slots_receiver, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    peer.say(peer.hello)
    until(lambda: bool(target.arrived()) or target.receiver.num_rings == 1)
    looks: list[float] = []
    for incoming in target.receiver._incoming.values():
        monkeypatch.setattr(incoming.ring, "has_ended", lambda: looks.append(now_s[0]))
    for now in (1000.5, 1000.9, 1001.0, 1001.5, 1001.9, 1002.1):
        now_s[0] = now
        target.receiver.poll()
    assert looks == [1001.0, 1002.1]


def test_a_receiver_that_closes_tells_each_sender(target: Target, peer: Peer) -> None:
    peer.say(peer.hello)
    until(lambda: bool(target.arrived()) or target.receiver.num_rings == 1)
    target.receiver.close()
    assert peer.socket.poll(10_000)
    assert TO_SENDER.decode(peer.socket.recv()) == RingEnd("the receiver was closed")
    assert target.receiver.num_rings == 0
    target.receiver.poll()
    assert target.receiver.wait_on() == ()
