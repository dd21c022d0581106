"""Pairs of the nccl transport over gloo: what peers that lie, come twice or stand still can do."""

from __future__ import annotations

import importlib.util
import threading
import time
from dataclasses import replace

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
import zmq

from baton.kvtransfer.messages import HandoffName
from baton.kvtransfer.transports.base import Blocks, Move
from baton.kvtransfer.transports.nccl import blocks as nccl_blocks
from baton.kvtransfer.transports.nccl import group, line
from baton.kvtransfer.transports.nccl import receiver as nccl_receiver
from baton.kvtransfer.transports.nccl.group import SENDER_RANK, PairStore, form_group
from baton.kvtransfer.transports.nccl.receiver import NcclReceiver
from baton.kvtransfer.transports.nccl.sender import NcclSender
from baton.kvtransfer.transports.nccl.wire import BlockBatch, PairAlive, PairEnd, PairHello, StoreEntry
from baton.wire.errors import InvalidSetting, TransferFailed
from baton.wire.keys import ClusterKey
from baton.wire.links import LinkSettings
from tests.kvtransfer.transports.nccl.nccl_ends import (
    BLOCK_BYTES,
    CPU,
    FROM_SENDER,
    GENERATION,
    NUM_BLOCKS,
    HandMadeSender,
    Target,
    key_of,
    moves_of,
    push_until,
)


def test_a_push_of_gaps_in_the_grant_is_cut_at_them(target: Target) -> None:
    target.expect(1, [5, 6, 7])
    target.push(target.sender(), 1, [Move(0, 0, 5, GENERATION), Move(2, 9, 7, GENERATION)])
    target.until(lambda: target.num_arrived == 2)
    assert (target.blocks[[5, 7]] == target.source[[0, 9]]).all()
    assert target.is_untouched(5, 7)


def test_large_pushes_are_cut_into_bounded_messages(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_blocks, "PIECE_BYTES", 3 * BLOCK_BYTES)
    context = target.context
    blocks: Blocks = np.zeros_like(target.source)
    receiver = NcclReceiver(context, "127.0.0.1", blocks, LinkSettings())
    sender = NcclSender(context, receiver.endpoint, target.source, LinkSettings())
    receiver.expect(key_of(1), range(NUM_BLOCKS), [GENERATION] * NUM_BLOCKS)
    moves = moves_of(range(NUM_BLOCKS), range(NUM_BLOCKS))
    arrivals: list[int] = []
    deadline_s, is_pushed = time.monotonic() + 30, False
    while sum(arrivals) < NUM_BLOCKS:
        assert time.monotonic() < deadline_s
        is_pushed = is_pushed or sender.push(key_of(1), moves)
        receiver.poll()
        arrivals += [arrival.count for arrival in receiver.take_arrivals()]
    assert arrivals == [3] * 10 + [2]
    assert (blocks == target.source).all()
    sender.close()
    receiver.close()


def test_a_push_waits_for_the_group_and_for_room(target: Target) -> None:
    sender = target.sender()
    assert not sender.push(key_of(1), moves_of([0], [0]))
    waited = zmq.Poller()
    for thing in (*sender.wait_on(), *target.receiver.wait_on()):
        waited.register(thing, zmq.POLLIN)
    deadline_s = time.monotonic() + 30
    while not sender.push(key_of(1), moves_of([0], [0])):  # woken up, never asleep for long
        assert waited.poll(2000)
        assert time.monotonic() < deadline_s
        target.poll()
        sender.poll()
    num_pushed = 1
    while sender.push(key_of(1), moves_of([0], [0])):  # the receiver takes nothing meanwhile
        num_pushed += 1
    assert num_pushed <= 16
    target.until(lambda: sender.push(key_of(1), moves_of([0], [0])))


def test_what_is_forgotten_while_it_is_in_flight_is_not_written(target: Target) -> None:
    target.expect(1, [1, 2])
    target.expect(2, [4])
    sender = target.sender()
    target.push(sender, 1, moves_of([0, 1], [1, 2]))
    target.receiver.forget(key_of(1))
    target.push(sender, 2, moves_of([3], [4]))
    target.until(lambda: target.num_arrived == 1)
    assert target.receiver.num_refused == 1
    assert target.is_untouched(4)
    target.expect(1, [1, 2])  # and when it is expected anew, it is taken anew
    target.push(sender, 1, moves_of([0, 1], [1, 2]))
    target.until(lambda: target.num_arrived == 3)
    assert (target.blocks[[1, 2]] == target.source[[0, 1]]).all()


def test_headers_without_a_pair_change_nothing(target: Target) -> None:
    target.expect(1, [1])
    stranger = HandMadeSender(target)
    stranger.tell_raw(b"")
    stranger.tell_raw(b"BT" + bytes(40))
    stranger.tell_raw(FROM_SENDER.encode(PairAlive()), b"more")
    stranger.announce(0, [1])
    target.until(lambda: target.receiver.num_refused == 4)
    assert stranger.hear() == PairEnd("there is no pair for this connection")
    assert target.is_untouched()
    assert target.receiver.num_pairs == 0
    stranger.close()


def test_headers_that_no_grant_announced_change_nothing_and_keep_the_order(target: Target) -> None:
    target.expect(1, [5, 6])
    peer = HandMadeSender(target).form()
    peer.announce(0, [5, 6], handoff=2)
    peer.send(2)
    peer.announce(1, [5, 7])
    peer.send(2)
    peer.announce(2, [5, 6], generation=GENERATION + 1)
    peer.send(2)
    peer.announce(2, [5, 6])  # doubled number
    peer.tell_raw(b"damaged")
    target.until(lambda: target.receiver.num_refused == 5)
    assert target.is_untouched()
    peer.announce(3, [5, 6])
    peer.send(2, value=9)
    target.until(lambda: target.num_arrived == 2)
    peer.announce(4, [5, 6])  # doubled blocks
    peer.send(2, value=8)
    target.until(lambda: target.receiver.num_refused == 6)
    assert (target.blocks[[5, 6]] == 9).all()
    assert target.is_untouched(5, 6)
    peer.close()


@pytest.mark.parametrize(
    "batch",
    [
        BlockBatch(1, HandoffName(*key_of(1)), 0, (5,), (GENERATION,)),
        BlockBatch(0, HandoffName(*key_of(1)), 0, (), ()),
        BlockBatch(0, HandoffName(*key_of(1)), 0, (5, 6), (GENERATION,)),
        BlockBatch(0, HandoffName(*key_of(1)), 0, tuple(range(1025)), (GENERATION,) * 1025),
    ],
    ids=["gap", "empty", "lengths differ", "too many"],
)
def test_headers_that_cannot_be_end_the_pair(target: Target, batch: BlockBatch) -> None:
    target.expect(1, [5])
    peer = HandMadeSender(target).form()
    peer.tell(batch)
    target.until(lambda: target.receiver.num_pairs == 0)
    assert peer.hear() == PairEnd("the sender's headers do not fit together")
    assert target.receiver.num_refused == 1
    assert target.is_untouched()
    peer.close()


def test_more_bytes_than_announced_do_not_reach_the_pool(target: Target) -> None:
    target.expect(1, [5])
    peer = HandMadeSender(target).form()
    peer.announce(0, [5])
    peer.send(3, value=9)
    target.until(lambda: target.num_arrived == 1)
    assert (target.blocks[5] == 9).all()
    assert target.is_untouched(5)
    peer.close()


def test_a_payload_that_does_not_come_ends_the_pair(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line, "STALL_S", 0.3)
    target.expect(1, [5])
    liar = HandMadeSender(target).form()
    assert target.receiver.num_pairs == 1
    liar.announce(0, [5])
    target.until(lambda: target.receiver.num_pairs == 0)
    target.push(target.sender(), 1, moves_of([3], [5]))  # others are not harmed
    target.until(lambda: target.num_arrived == 1)
    liar.close()


def test_a_pair_is_dropped_and_formed_anew(target: Target) -> None:
    process = psutil.Process()
    target.push(target.sender(), 1, moves_of([0], [0]))
    target.senders.pop().close()
    target.until(lambda: target.receiver.num_pairs == 0)
    num_threads, num_files = threading.active_count(), process.num_fds()
    for number in range(10):
        target.expect(number, [number])
        sender = target.sender()
        target.push(sender, number, moves_of([number], [number]))
        target.until(lambda number=number: target.num_arrived == number + 1)  # type: ignore[misc]
        sender.close()
        assert not sender.is_reading(key_of(number))
    target.until(lambda: target.receiver.num_pairs == 0)
    assert (target.blocks[:10] == target.source[:10]).all()
    target.until(lambda: threading.active_count() <= num_threads and process.num_fds() <= num_files)


def test_a_receiver_that_closes_tells_its_senders(target: Target) -> None:
    sender = target.sender()
    target.push(sender, 1, moves_of([0], [0]))
    target.receiver.close()
    with pytest.raises(TransferFailed):
        push_until(sender, lambda _: False)


def test_nothing_listens_beyond_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def listening() -> set[tuple[str, int]]:
        found = psutil.Process().net_connections("inet")
        return {(item.laddr.ip, item.laddr.port) for item in found if item.status == psutil.CONN_LISTEN}

    before = listening()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    target = Target(context, "127.0.0.2")
    sender = target.sender()
    target.push(sender, 1, moves_of([0], [0]))
    hosts = sorted(ip for ip, _ in listening() - before)
    # headers and group of the receiver, group of the sender on its own address towards it
    assert hosts == ["127.0.0.1", "127.0.0.2", "127.0.0.2"]
    sender.close()
    target.receiver.close()
    context.destroy(linger=0)


def test_who_only_reaches_the_port_is_not_the_peer(target: Target) -> None:
    stranger = HandMadeSender(target)
    stranger.tell(PairHello("gloo", BLOCK_BYTES))

    def tell_wrongly(key: str, value: bytes) -> None:
        stranger.tell(StoreEntry(key, bytes(16) if key.endswith("nonce/1") else value))

    def join() -> None:
        store = PairStore(tell_wrongly, lambda timeout_s: (lambda e: (e.key, e.value))(stranger.hear(timeout_s)), 3)
        with pytest.raises(TransferFailed, match="somebody else"):
            form_group(store, SENDER_RANK, "127.0.0.1", CPU)

    thread = threading.Thread(target=join)
    thread.start()
    target.until(lambda: not thread.is_alive())
    stranger.close()


def test_pools_that_differ_are_refused(target: Target) -> None:
    narrow: Blocks = np.zeros((8, 64), dtype=np.uint8)
    sender = NcclSender(target.context, target.receiver.endpoint, narrow, LinkSettings())
    target.senders.append(sender)
    with pytest.raises(TransferFailed, match="block_bytes=64"):
        target.push(sender, 1, moves_of([0], [0]))
    assert target.receiver.num_pairs == 0


def test_pairs_are_bounded(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_receiver, "_MAX_PAIRS", 1)
    first, second = target.sender(), target.sender()
    target.push(first, 1, moves_of([0], [0]))
    with pytest.raises(TransferFailed, match="1 pairs already"):
        target.push(second, 2, moves_of([0], [0]))
    assert target.receiver.num_pairs == 1
    target.push(first, 1, moves_of([0], [0]))
    first.close()
    target.until(lambda: [pair.is_over for pair in target.receiver._leaving] == [True])
    target.push(target.sender(), 2, moves_of([0], [0]))


@pytest.mark.parametrize("is_right", [True, False])
def test_the_cluster_key_decides_who_forms_a_group(is_right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line, "FORM_S", 5.0 if is_right else 1.0)
    keys = [ClusterKey(*zmq.curve_keypair()) for _ in range(2)]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    blocks: Blocks = np.zeros((8, BLOCK_BYTES), dtype=np.uint8)
    receiver = NcclReceiver(context, "127.0.0.1", blocks, LinkSettings(keys[0]))
    unnamed = replace(receiver.endpoint, address=receiver.endpoint.address.partition("#")[0])
    if not is_right:
        with pytest.raises(TransferFailed, match="a key that is not known here"):
            NcclSender(context, receiver.endpoint, blocks + 1, LinkSettings(keys[1]))
    sender = NcclSender(context, unnamed, blocks + 1, LinkSettings(keys[0 if is_right else 1]))
    receiver.expect(key_of(1), [2], [GENERATION])
    deadline_s, failure = time.monotonic() + 30, ""
    while not receiver.take_arrivals() and not failure:
        assert time.monotonic() < deadline_s
        try:
            sender.push(key_of(1), moves_of([0], [2]))
        except TransferFailed as error:
            failure = error.message
        receiver.poll()
        time.sleep(0.001)
    assert (failure == "") == is_right
    assert bool(blocks[2].all()) == is_right
    sender.close()
    receiver.close()
    context.destroy(linger=0)


def test_a_wildcard_is_no_host(target: Target) -> None:
    settings = LinkSettings(ClusterKey(*zmq.curve_keypair()))
    for host in ("0.0.0.0", "::"):
        with pytest.raises(InvalidSetting, match="no address that a peer can dial"):
            NcclReceiver(target.context, host, target.blocks, settings)


def test_a_torch_without_the_backend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidSetting, match="no NCCL"):
        group.backend_of(torch.device("cuda"))
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    with pytest.raises(InvalidSetting, match="no gloo"):
        group.backend_of(CPU)
    monkeypatch.setattr(dist, "is_available", lambda: False)
    spec = importlib.util.spec_from_file_location("pair_group_again", group.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(InvalidSetting, match=r"no torch\.distributed"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
