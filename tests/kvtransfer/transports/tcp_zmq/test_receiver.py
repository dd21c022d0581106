"""The zmq transport's receiver: whatever comes, only granted blocks change, and each of them whole."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import zmq

from baton.kvtransfer.messages import HandoffName
from baton.kvtransfer.pools.host import HostPool
from baton.kvtransfer.transports import tcp_zmq
from baton.kvtransfer.transports.tcp_zmq import BlockBatch, ZmqReceiver
from baton.runtime.process import start_authenticator
from baton.wire.errors import InvalidSetting, TransferFailed
from baton.wire.keys import ClusterKey
from baton.wire.links import LinkSettings
from tests.kvtransfer.late_stream import late_pool
from tests.kvtransfer.transports.tcp_zmq.zmq_ends import (
    BLOCK_BYTES,
    GENERATIONS,
    GRANTED,
    GUARD,
    HEADERS,
    MIB,
    PLAIN,
    Context,
    Dial,
    Target,
    granted_moves,
    numbered,
    payload,
    pushed,
    until,
)
from tests.request_keys import key_of


@pytest.fixture(params=[HostPool, late_pool], ids=["host", "late device"])
def target(context: Context, request: pytest.FixtureRequest) -> Iterator[Target]:
    target = Target(context, request.param)
    yield target
    target.receiver.close()


def test_what_was_granted_is_taken_in_one_frame_or_several(target: Target) -> None:
    target.send([payload(1)], block_ids=(5,), generations=(4,))
    target.send([payload(1), payload(1)], first_index=1, block_ids=(2, 7), generations=(4, 9))
    target.poll_until(num_refused=0, arrived=[0, 1, 2])
    assert not target.blocks[list(GRANTED)].any()
    assert (target.blocks[[0, 1, 3, 4, 6]] == GUARD).all()


@pytest.mark.parametrize(
    "change",
    [
        {"number": 2},
        {"generations": (4, 4, 8)},
        {"block_ids": (), "generations": ()},
        {"block_ids": (5, 2), "generations": (4, 4)},
    ],
    ids=str,
)
def test_what_no_grant_announced_is_refused_and_counted(target: Target, change: dict[str, Any]) -> None:
    target.send([payload()], **change)
    target.poll_until(num_refused=1, arrived=[])
    assert target.is_untouched


@pytest.mark.parametrize("size", [0, 1, 3 * BLOCK_BYTES - 1, 3 * BLOCK_BYTES + 1, 2 * BLOCK_BYTES, 4 * BLOCK_BYTES])
def test_a_wrong_size_is_refused(target: Target, size: int) -> None:
    target.send([bytes(size)])
    target.poll_until(num_refused=1, arrived=[])
    assert target.is_untouched


def test_right_frames_before_a_wrong_one_write_nothing(target: Target) -> None:
    target.send([payload(1), payload(1), payload(2)])
    target.send([payload(2), payload(1), b"x"])
    target.send([payload(2), payload(1), payload(1)])
    target.poll_until(num_refused=3, arrived=[])
    assert target.is_untouched


def test_frames_that_only_add_up_are_refused(target: Target) -> None:
    target.send([bytes(BLOCK_BYTES // 2), bytes(2 * BLOCK_BYTES), bytes(BLOCK_BYTES // 2)])
    target.send([])
    target.poll_until(num_refused=2, arrived=[])
    assert target.is_untouched


def test_damaged_headers_are_refused(target: Target) -> None:
    target.raw.send_multipart([b"", payload()])
    target.raw.send_multipart([b"BT" + bytes(40), payload()])
    target.raw.send(payload())
    target.poll_until(num_refused=3, arrived=[])
    assert target.is_untouched


def test_a_refused_message_costs_the_next_nothing(target: Target) -> None:
    target.send([payload(), *[b"more"] * 100])
    target.raw.send_multipart([b"", *[payload()] * 100])
    target.send([payload()])
    target.poll_until(num_refused=2, arrived=[0, 1, 2])


def test_one_poll_takes_a_bounded_amount(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    monkeypatch.setattr(tcp_zmq, "_MAX_POLL_BYTES", 4 * tcp_zmq._FRAME_COST_BYTES)
    for _ in range(6):
        target.raw.send(b"noise")
    until(lambda: bool(target.receiver.wait_on()[0].poll(0)))
    time.sleep(0.05)  # mostly all of them are there then
    taken = [0]

    def is_all_taken() -> bool:
        target.receiver.poll()
        taken.append(target.receiver.num_refused)
        return taken[-1] == 6

    until(is_all_taken)
    assert max(after - before for before, after in pairwise(taken)) <= 4


def test_a_message_that_is_forgotten_between_two_polls_is_not_written(
    monkeypatch: pytest.MonkeyPatch, target: Target
) -> None:
    monkeypatch.setattr(tcp_zmq, "_MAX_POLL_BYTES", 1)
    target.send([payload(1), payload(2)])
    until(lambda: bool(target.receiver.wait_on()[0].poll(0)))
    target.receiver.poll()
    target.receiver.poll()
    target.receiver.forget(key_of(1))
    target.poll_until(num_refused=1, arrived=[])
    assert target.is_untouched


def test_a_frame_larger_than_any_peer_sends_costs_its_connection_and_nothing_else(target: Target) -> None:
    target.send([bytes(2 * MIB)])
    other = target.context.socket(zmq.PUSH)
    other.connect(target.receiver.endpoint.address)
    batch = BlockBatch(HandoffName(*key_of(1)), 0, GRANTED, GENERATIONS)
    other.send_multipart([HEADERS.encode(batch), payload()])
    target.poll_until(num_refused=0, arrived=[0, 1, 2])
    other.close()


def test_whatever_comes_only_granted_blocks_change_and_each_of_them_whole(target: Target) -> None:
    chance = random.Random(3)
    for _ in range(2000):
        first, count = chance.randrange(4), chance.randrange(4)
        ids, generations = list(GRANTED[first : first + count]), list(GENERATIONS[first : first + count])
        frames = [payload(1)] * len(ids)
        match chance.randrange(8):
            case 0 if ids:
                ids[chance.randrange(len(ids))] = chance.randrange(2**32)
            case 1 if generations:
                generations[chance.randrange(len(generations))] = chance.randrange(12)
            case 2:
                first = chance.choice((0, 1, 2, 3, 2**40))
            case 3:
                frames = [bytes(chance.choice((0, 1, BLOCK_BYTES, 2 * BLOCK_BYTES, 513))) for _ in range(3)]
            case 4:
                frames.append(b"")
            case 5:
                target.receiver.expect(key_of(1), GRANTED, GENERATIONS)
                target.blocks[:] = GUARD
                target.arrived.clear()
            case _:
                pass
        target.send(frames, first_index=first, block_ids=tuple(ids), generations=tuple(generations))
        target.poll()
        assert len(set(target.arrived)) == len(target.arrived)
        for index, block_id in enumerate(GRANTED):
            assert (target.blocks[block_id] == (0 if index in target.arrived else GUARD)).all()
        assert (target.blocks[[0, 1, 3, 4, 6]] == GUARD).all()
    assert target.receiver.num_refused > 500


def test_fencing_is_forgetting(target: Target) -> None:
    before = target.receiver.endpoint
    assert target.receiver.fence()
    assert target.receiver.endpoint == before


@pytest.fixture
def guarded() -> Iterator[tuple[Target, ClusterKey]]:
    """A receiver with a cluster key, authenticated as in a node."""
    key = ClusterKey(*zmq.curve_keypair())
    with ExitStack() as stack:
        context: Context = zmq.Context()
        stack.callback(context.destroy, linger=0)
        authenticator = start_authenticator(context, key)
        assert authenticator is not None
        stack.callback(authenticator.stop)
        target = Target(context)
        target.receiver.close()
        target.receiver = ZmqReceiver(context, "127.0.0.1", HostPool(target.blocks), LinkSettings(cluster_key=key))
        target.receiver.expect(key_of(1), GRANTED, GENERATIONS)
        stack.callback(target.receiver.close)
        yield target, key


def test_a_peer_with_the_cluster_key_delivers(dial: Dial, guarded: tuple[Target, ClusterKey]) -> None:
    target, key = guarded
    blocks = numbered(3, BLOCK_BYTES)
    sender = dial(target.receiver.endpoint, blocks, key)
    assert pushed(sender, 1, granted_moves())
    target.poll_until(num_refused=0, arrived=[0, 1, 2])
    assert (target.blocks[list(GRANTED)] == blocks).all()


@pytest.mark.parametrize("has_key", [False, True], ids=["no key", "another key"])
def test_a_peer_without_the_cluster_key_delivers_nothing(
    dial: Dial, guarded: tuple[Target, ClusterKey], has_key: bool
) -> None:
    target, _ = guarded
    key = ClusterKey(*zmq.curve_keypair()) if has_key else None
    endpoint = target.receiver.endpoint
    plain = replace(endpoint, address=endpoint.address.partition("#")[0])  # with its key nobody would even dial it
    sender = dial(plain, numbered(3, BLOCK_BYTES), key)
    for _ in range(50):
        with contextlib.suppress(TransferFailed):  # once it has noticed
            assert not sender.push(key_of(1), granted_moves())
        target.poll()
        time.sleep(0.01)
    assert target.arrived == []
    assert target.receiver.num_refused == 0
    assert target.is_untouched


@pytest.mark.parametrize("is_guarded", [False, True])
def test_garbage_and_a_port_scan_are_not_decoded_and_cost_others_nothing(
    dial: Dial, guarded: tuple[Target, ClusterKey], target: Target, is_guarded: bool
) -> None:
    victim, key = (guarded[0], guarded[1]) if is_guarded else (target, None)
    host, port = victim.receiver.endpoint.address.removeprefix("tcp://").partition("#")[0].split(":")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
    for noise in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), greeting + os.urandom(4096), b"\x00" * 65536):
        with socket.create_connection((host, int(port)), timeout=30) as link:
            link.sendall(noise)
            for _ in range(10):
                victim.poll()
                time.sleep(0.002)
    num_refused = victim.receiver.num_refused
    assert victim.is_untouched
    assert not (is_guarded and num_refused)
    sender = dial(victim.receiver.endpoint, numbered(3, BLOCK_BYTES), key)
    assert pushed(sender, 1, granted_moves())
    victim.poll_until(num_refused=num_refused, arrived=[0, 1, 2])


def test_beyond_loopback_it_does_not_listen_without_a_key(context: Context) -> None:
    with pytest.raises(InvalidSetting, match="--cluster-key"):
        ZmqReceiver(context, "0.0.0.0", HostPool(numbered(1, 8)), PLAIN)
