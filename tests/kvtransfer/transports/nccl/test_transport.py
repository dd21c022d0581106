from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
import zmq

from kvtransfer.messages import Endpoint, HandoffKey, HandoffName
from kvtransfer.transports.base import Blocks, Move
from kvtransfer.transports.nccl import blocks as nccl_blocks
from kvtransfer.transports.nccl import group, line
from kvtransfer.transports.nccl import receiver as nccl_receiver
from kvtransfer.transports.nccl.blocks import PIECE_BYTES
from kvtransfer.transports.nccl.group import SENDER_RANK, PairStore, finish, form_group
from kvtransfer.transports.nccl.receiver import NcclReceiver
from kvtransfer.transports.nccl.sender import NcclSender
from kvtransfer.transports.nccl.wire import BlockBatch, PairAlive, PairEnd, PairHello, StoreEntry
from wire.codec import Codec
from wire.errors import InvalidSetting, TransferFailed
from wire.links import ClusterKey, LinkSettings

_ROOT = Path(__file__).parents[4]
_BLOCK_BYTES, _NUM_BLOCKS = 4096, 32
_GUARD = 0xA5
_GENERATION = 3
_CPU = torch.device("cpu")
_FROM_SENDER = Codec(PairHello, StoreEntry, BlockBatch, PairAlive, PairEnd)
_FROM_RECEIVER = Codec(StoreEntry, PairEnd)
_SENDER_PROGRAM = """
import sys, time
import numpy as np, zmq
from wire.links import LinkSettings
from kvtransfer.messages import Endpoint
from kvtransfer.transports.base import Move
from kvtransfer.transports.nccl.sender import NcclSender
address, number, is_endless = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "endless"
blocks = np.full((8, 4096), number, dtype=np.uint8)
sender = NcclSender(zmq.Context(), Endpoint("nccl", address), blocks, LinkSettings())
moves = [Move(i, i, 8 * number + i, 3) for i in range(8)]
is_sent = False
while True:
    if is_endless or not is_sent:
        is_sent = sender.push((number.to_bytes(16, "big"), 1), moves)
    sender.poll()
    time.sleep(0.001)
"""
_RECEIVER_PROGRAM = """
import time
import numpy as np, zmq
from wire.links import LinkSettings
from kvtransfer.transports.nccl.receiver import NcclReceiver
receiver = NcclReceiver(zmq.Context(), "127.0.0.1", np.zeros((32, 4096), dtype=np.uint8), LinkSettings())
print(receiver.endpoint.address, flush=True)
while True:
    receiver.poll()
    time.sleep(0.001)
"""


def key_of(number: int) -> HandoffKey:
    return (number.to_bytes(16, "big"), 1)


def moves_of(sources: Sequence[int], targets: Sequence[int], first_index: int = 0) -> list[Move]:
    return [Move(first_index + i, s, t, _GENERATION) for i, (s, t) in enumerate(zip(sources, targets, strict=True))]


class Target:
    """A receiver, its pool, and what has arrived."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], host: str = "127.0.0.1") -> None:
        self.context = context
        self.blocks: Blocks = np.full((_NUM_BLOCKS, _BLOCK_BYTES), _GUARD, dtype=np.uint8)
        self.receiver = NcclReceiver(context, host, self.blocks, LinkSettings())
        self.source = np.random.default_rng(1).integers(0, 256, (_NUM_BLOCKS, _BLOCK_BYTES), dtype=np.uint8)
        self.num_arrived = 0
        self.senders: list[NcclSender] = []

    def expect(self, number: int, targets: Sequence[int]) -> None:
        self.receiver.expect(key_of(number), targets, [_GENERATION] * len(targets))

    def sender(self) -> NcclSender:
        self.senders.append(NcclSender(self.context, self.receiver.endpoint, self.source, LinkSettings()))
        return self.senders[-1]

    def poll(self) -> None:
        self.receiver.poll()
        self.num_arrived += sum(arrival.count for arrival in self.receiver.take_arrivals())

    def until(self, is_done: Callable[[], object], timeout_s: float = 8.0) -> float:
        """Poll until it is done; how long that took."""
        begin_s = time.monotonic()
        while not is_done():
            assert time.monotonic() - begin_s < timeout_s
            self.poll()
            time.sleep(0.0005)
        return time.monotonic() - begin_s

    def push(self, sender: NcclSender, number: int, moves: Sequence[Move]) -> None:
        self.until(lambda: sender.push(key_of(number), moves))

    def is_untouched(self, *written: int) -> bool:
        return bool((np.delete(self.blocks, written, axis=0) == _GUARD).all())


@pytest.fixture
def target() -> Iterator[Target]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    target = Target(context)
    yield target
    for sender in target.senders:
        sender.close()
    target.receiver.close()
    context.destroy(linger=0)


class HandMadeSender:
    """The sending side of a pair, message by message."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._link = target.context.socket(zmq.DEALER)
        self._link.connect(target.receiver.endpoint.address)
        self._group: Any = None

    def tell(self, message: object) -> None:
        self._link.send(_FROM_SENDER.encode(message))

    def tell_raw(self, *frames: bytes) -> None:
        self._link.send_multipart(frames)

    def hear(self, timeout_s: float = 5.0) -> Any:
        if not self._link.poll(int(timeout_s * 1000)):
            raise TimeoutError
        return _FROM_RECEIVER.decode(self._link.recv())

    def _entry(self, timeout_s: float) -> tuple[str, bytes]:
        entry = self.hear(timeout_s)
        return entry.key, entry.value

    def form(self) -> HandMadeSender:
        self.tell(PairHello("gloo", _BLOCK_BYTES))
        thread = threading.Thread(target=self._form)
        thread.start()
        self._target.until(lambda: not thread.is_alive())
        assert self._group is not None
        return self

    def _form(self) -> None:
        self._store = PairStore(lambda key, value: self.tell(StoreEntry(key, value)), self._entry, 5)
        self._group = form_group(self._store, SENDER_RANK, "127.0.0.1", _CPU)

    def announce(self, number: int, targets: Sequence[int], handoff: int = 1, generation: int = _GENERATION) -> None:
        name = HandoffName(*key_of(handoff))
        self.tell(BlockBatch(number, name, 0, tuple(targets), (generation,) * len(targets)))

    def send(self, num_blocks: int, value: int = 7) -> None:
        payload = torch.full((num_blocks * _BLOCK_BYTES,), value, dtype=torch.uint8)
        work = self._group.send([payload], 0, 0)
        thread = threading.Thread(target=lambda: finish(work, 5, _CPU))
        thread.start()
        self._target.until(lambda: not thread.is_alive())

    def close(self) -> None:
        self._group = None
        self._link.close(linger=0)


@contextmanager
def program(source: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    environment = os.environ | {"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(
        [sys.executable, "-c", source, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    with child:
        try:
            yield child
        finally:
            child.kill()


@contextmanager
def foreign_receiver() -> Iterator[tuple[subprocess.Popen[str], NcclSender]]:
    """A receiver in a process of its own, and a sender to it."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with program(_RECEIVER_PROGRAM) as child:
        assert child.stdout is not None
        endpoint = Endpoint("nccl", child.stdout.readline().strip())
        sender = NcclSender(context, endpoint, np.zeros((_NUM_BLOCKS, _BLOCK_BYTES), dtype=np.uint8), LinkSettings())
        try:
            push_until(sender, lambda num_pushed: num_pushed >= 20)
            yield child, sender
        finally:
            sender.close()
            context.destroy(linger=0)


def push_until(sender: NcclSender, is_done: Callable[[int], bool], timeout_s: float = 10.0) -> None:
    """Push without end."""
    deadline_s = time.monotonic() + timeout_s
    num_pushed = 0
    while not is_done(num_pushed):
        assert time.monotonic() < deadline_s
        if sender.push(key_of(1), moves_of(range(8), range(8))):
            num_pushed += 1
        else:
            sender.poll()
            time.sleep(0.001)


def test_bytes_arrive_exactly_and_nowhere_else(target: Target) -> None:
    targets = [11, 12, 13, 2, 7, 0]
    target.expect(1, targets)
    sender = target.sender()
    target.push(sender, 1, moves_of([8, 9], targets[4:], first_index=4))
    target.push(sender, 1, moves_of([3, 4, 5, 20], targets[:4]))
    target.until(lambda: target.num_arrived == 6)
    assert (target.blocks[targets] == target.source[[3, 4, 5, 20, 8, 9]]).all()
    assert target.is_untouched(*targets)
    assert not sender.is_reading(key_of(1))
    assert target.receiver.num_refused == 0


def test_a_push_of_gaps_in_the_grant_is_cut_at_them(target: Target) -> None:
    target.expect(1, [5, 6, 7])
    target.push(target.sender(), 1, [Move(0, 0, 5, _GENERATION), Move(2, 9, 7, _GENERATION)])
    target.until(lambda: target.num_arrived == 2)
    assert (target.blocks[[5, 7]] == target.source[[0, 9]]).all()
    assert target.is_untouched(5, 7)


def test_large_pushes_are_cut_into_bounded_messages(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_blocks, "PIECE_BYTES", 3 * _BLOCK_BYTES)
    context = target.context
    blocks: Blocks = np.zeros_like(target.source)
    receiver = NcclReceiver(context, "127.0.0.1", blocks, LinkSettings())
    sender = NcclSender(context, receiver.endpoint, target.source, LinkSettings())
    receiver.expect(key_of(1), range(_NUM_BLOCKS), [_GENERATION] * _NUM_BLOCKS)
    moves = moves_of(range(_NUM_BLOCKS), range(_NUM_BLOCKS))
    arrivals: list[int] = []
    deadline_s, is_pushed = time.monotonic() + 8, False
    while sum(arrivals) < _NUM_BLOCKS:
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
    deadline_s = time.monotonic() + 5
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


def test_blocks_may_change_once_they_are_not_read_any_more(target: Target) -> None:
    target.expect(1, [6, 5])
    before = target.source[[1, 2]].copy()
    sender = target.sender()
    target.push(sender, 1, moves_of([1, 2], [6, 5]))
    deadline_s = time.monotonic() + 5
    while sender.is_reading(key_of(1)):  # although the receiver has not been asked to take anything
        assert time.monotonic() < deadline_s
    target.source[:] = 0
    target.until(lambda: target.num_arrived == 2)
    assert (target.blocks[[6, 5]] == before).all()


def test_what_is_forgotten_while_it_is_under_way_is_not_written(target: Target) -> None:
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
    stranger.tell_raw(_FROM_SENDER.encode(PairAlive()), b"more")
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
    peer.announce(2, [5, 6], generation=_GENERATION + 1)
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
        BlockBatch(1, HandoffName(*key_of(1)), 0, (5,), (_GENERATION,)),
        BlockBatch(0, HandoffName(*key_of(1)), 0, (), ()),
        BlockBatch(0, HandoffName(*key_of(1)), 0, (5, 6), (_GENERATION,)),
        BlockBatch(0, HandoffName(*key_of(1)), 0, tuple(range(1025)), (_GENERATION,) * 1025),
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
    liar.announce(0, [5])
    assert target.until(lambda: target.receiver.num_pairs == 1) < 1
    assert target.until(lambda: target.receiver.num_pairs == 0) < 2
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
    stranger.tell(PairHello("gloo", _BLOCK_BYTES))

    def tell_wrongly(key: str, value: bytes) -> None:
        stranger.tell(StoreEntry(key, bytes(16) if key.endswith("nonce/1") else value))

    def join() -> None:
        store = PairStore(tell_wrongly, lambda timeout_s: (lambda e: (e.key, e.value))(stranger.hear(timeout_s)), 3)
        with pytest.raises(TransferFailed, match="somebody else"):
            form_group(store, SENDER_RANK, "127.0.0.1", _CPU)

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


@pytest.mark.parametrize("is_right", [True, False])
def test_the_cluster_key_decides_who_forms_a_group(is_right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line, "FORM_S", 5.0 if is_right else 1.0)
    keys = [ClusterKey(*zmq.curve_keypair()) for _ in range(2)]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    blocks: Blocks = np.zeros((8, _BLOCK_BYTES), dtype=np.uint8)
    receiver = NcclReceiver(context, "127.0.0.1", blocks, LinkSettings(keys[0]))
    sender = NcclSender(context, receiver.endpoint, blocks + 1, LinkSettings(keys[0 if is_right else 1]))
    receiver.expect(key_of(1), [2], [_GENERATION])
    deadline_s, failure = time.monotonic() + 8, ""
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


@pytest.mark.parametrize("address", ["", "inproc://x", "tcp://a b:5", "tcp://host", "tcp://127.0.0.1:99999"])
def test_addresses_that_cannot_be_dialled_are_refused(target: Target, address: str) -> None:
    with pytest.raises(TransferFailed, match="cannot be dialled"):
        NcclSender(target.context, Endpoint("nccl", address), target.source, LinkSettings())


def test_a_torch_without_the_backend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidSetting, match="no NCCL"):
        group.backend_of(torch.device("cuda"))
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    with pytest.raises(InvalidSetting, match="no gloo"):
        group.backend_of(_CPU)
    monkeypatch.setattr(dist, "is_available", lambda: False)
    spec = importlib.util.spec_from_file_location("pair_group_again", group.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(InvalidSetting, match=r"no torch\.distributed"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_a_receiver_that_is_killed_ends_the_sender() -> None:
    with foreign_receiver() as (child, sender):
        child.send_signal(signal.SIGKILL)
        begin_s = time.monotonic()
        with pytest.raises(TransferFailed):
            push_until(sender, lambda _: False)
        assert time.monotonic() - begin_s < 3
        assert not sender.is_reading(key_of(1))


def test_a_receiver_that_is_frozen_ends_the_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line, "STALL_S", 1.0)
    with foreign_receiver() as (child, sender):
        child.send_signal(signal.SIGSTOP)
        begin_s = time.monotonic()
        with pytest.raises(TransferFailed):
            push_until(sender, lambda _: False)
        assert time.monotonic() - begin_s < 3
        assert not sender.is_reading(key_of(1))


def test_a_sender_that_is_closed_reads_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line, "STALL_S", 2.0)
    with foreign_receiver() as (child, sender):
        child.send_signal(signal.SIGSTOP)
        deadline_s = time.monotonic() + 5
        while sender.push(key_of(1), moves_of(range(8), range(8))):
            assert time.monotonic() < deadline_s
        assert sender.is_reading(key_of(1))
        sender.close()
        time.sleep(0.1)
        assert not sender.is_reading(key_of(1))


def test_two_processes_send_and_one_is_killed_and_one_frozen(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line, "SILENCE_S", 2.0)
    address = target.receiver.endpoint.address
    for number in (1, 2):
        target.expect(number, [8 * number + index for index in range(8)])
    with program(_SENDER_PROGRAM, address, "1", "endless") as busy, program(_SENDER_PROGRAM, address, "2", "") as idle:
        target.until(lambda: target.num_arrived == 16, timeout_s=20)
        assert target.receiver.num_pairs == 2
        assert (target.blocks[8:16] == 1).all()
        assert (target.blocks[16:24] == 2).all()
        assert target.is_untouched(*range(8, 24))
        num_refused = target.receiver.num_refused
        target.until(lambda: target.receiver.num_refused > num_refused + 20)
        busy.send_signal(signal.SIGKILL)
        assert target.until(lambda: target.receiver.num_pairs == 1) < 3
        idle.send_signal(signal.SIGSTOP)
        assert target.until(lambda: target.receiver.num_pairs == 0) < 4
    target.expect(3, [3])
    target.push(target.sender(), 3, moves_of([3], [3]))
    target.until(lambda: target.num_arrived == 17)


def test_the_main_thread_takes_the_pairs_with_it() -> None:
    source = _RECEIVER_PROGRAM.split("print(")[0] + (
        "from kvtransfer.transports.base import Move\n"
        "from kvtransfer.transports.nccl.sender import NcclSender\n"
        "context = zmq.Context()\n"
        "sender = NcclSender(context, receiver.endpoint, np.zeros((8, 4096), dtype=np.uint8), LinkSettings())\n"
        "while not sender.push((bytes(16), 1), [Move(0, 0, 0, 1)]):\n"
        "    receiver.poll()\n"
        "while not receiver.num_refused:\n"  # and then both sides are idle
        "    receiver.poll()\n"
    )
    with program(source) as child:
        assert child.wait(timeout=20) == 0


def test_many_large_blocks_and_what_they_cost(target: Target, capsys: pytest.CaptureFixture[str]) -> None:
    source = np.random.default_rng(1).integers(0, 256, (64, 2**20), dtype=np.uint8)
    blocks: Blocks = np.zeros_like(source)
    receiver = NcclReceiver(target.context, "127.0.0.1", blocks, LinkSettings())
    sender = NcclSender(target.context, receiver.endpoint, source, LinkSettings())

    woken = zmq.Poller()
    for thing in (*sender.wait_on(), *receiver.wait_on()):
        woken.register(thing, zmq.POLLIN)

    def move(number: int, num_blocks: int) -> float:
        receiver.expect(key_of(number), range(num_blocks), [_GENERATION] * num_blocks)
        moves, num_pushed, num_arrived = moves_of(range(num_blocks), range(num_blocks)), 0, 0
        piece = PIECE_BYTES // 2**20
        begin_s = time.perf_counter()
        while num_arrived < num_blocks:
            assert time.perf_counter() - begin_s < 20
            while num_pushed < num_blocks and sender.push(key_of(number), moves[num_pushed : num_pushed + piece]):
                num_pushed += piece
            sender.poll()
            receiver.poll()
            num_arrived += sum(arrival.count for arrival in receiver.take_arrivals())
            woken.poll(1)
        return time.perf_counter() - begin_s

    move(0, 64)
    begin_s = time.perf_counter()
    np.copyto(blocks, source)
    memcpy_s = time.perf_counter() - begin_s
    blocks[:] = 0
    all_s, one_s = (min(move(number, num_blocks) for number in range(8)) for num_blocks in (64, 1))
    assert (blocks == source).all()
    with capsys.disabled():
        figures = f"{source.size / all_s / 1e9:.2f} GB/s (memcpy {source.size / memcpy_s / 1e9:.2f}), {one_s * 1e3:.2f}"
        sys.stdout.write(f"\nnccl transport over gloo, 64 x 1 MiB: {figures} ms for one block\n")
    sender.close()
    receiver.close()
