from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import numpy as np
import pytest
import zmq

from kvtransfer.messages import Endpoint, HandoffName
from kvtransfer.pools.base import KvPool
from kvtransfer.pools.host import HostPool
from kvtransfer.transports import tcp_zmq
from kvtransfer.transports.base import Blocks, Move
from kvtransfer.transports.tcp_zmq import BlockBatch, ZmqReceiver, ZmqSender
from program.process import start_authenticator
from tests.kvtransfer.late_stream import late_pool
from tests.kvtransfer.transports.endpoint_process import key_of
from wire.codec import Codec
from wire.errors import InvalidSetting, TransferFailed
from wire.links import ClusterKey, LinkSettings

_HEADERS = Codec(BlockBatch)
_PLAIN = LinkSettings()
_GRANTED, _GENERATIONS = (5, 2, 7), (4, 4, 9)
_BLOCK_BYTES = 512
_MIB = 2**20
_GUARD = 0xA5

Context = zmq.Context[zmq.Socket[bytes]]


class Dial(Protocol):
    def __call__(self, endpoint: Endpoint, pool: Blocks | KvPool, key: ClusterKey | None = None) -> ZmqSender: ...


def until(is_done: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not is_done():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


class Target:
    """A receiver with one grant, and a raw socket to it."""

    def __init__(self, context: Context, build: Callable[[Blocks], KvPool] = HostPool) -> None:
        self.context = context
        self.blocks: Blocks = np.full((8, _BLOCK_BYTES), _GUARD, dtype=np.uint8)
        self.receiver = ZmqReceiver(context, "127.0.0.1", build(self.blocks), _PLAIN)
        self.receiver.expect(key_of(1), _GRANTED, _GENERATIONS)
        self.raw = context.socket(zmq.PUSH)
        self.raw.connect(self.receiver.endpoint.address)
        self.arrived: list[int] = []

    def send(
        self,
        payloads: Sequence[bytes],
        *,
        number: int = 1,
        first_index: int = 0,
        block_ids: tuple[int, ...] = _GRANTED,
        generations: tuple[int, ...] = _GENERATIONS,
    ) -> None:
        batch = BlockBatch(HandoffName(*key_of(number)), first_index, block_ids, generations)
        self.raw.send_multipart([_HEADERS.encode(batch), *payloads])

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
        return bool((self.blocks == _GUARD).all())


@pytest.fixture
def context() -> Iterator[Context]:
    context: Context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture(params=[HostPool, late_pool], ids=["host", "late device"])
def target(context: Context, request: pytest.FixtureRequest) -> Iterator[Target]:
    target = Target(context, request.param)
    yield target
    target.receiver.close()


def payload(num_blocks: int = 3) -> bytes:
    return bytes(num_blocks * _BLOCK_BYTES)


def test_what_was_granted_is_taken_in_one_frame_or_several(target: Target) -> None:
    target.send([payload(1)], block_ids=(5,), generations=(4,))
    target.send([payload(1), payload(1)], first_index=1, block_ids=(2, 7), generations=(4, 9))
    target.poll_until(num_refused=0, arrived=[0, 1, 2])
    assert not target.blocks[list(_GRANTED)].any()
    assert (target.blocks[[0, 1, 3, 4, 6]] == _GUARD).all()


@pytest.mark.parametrize(
    "change",
    [
        {"number": 2},
        {"generations": (4, 4, 8)},
        {"generations": (4, 4)},
        {"block_ids": (5, 2, 6)},
        {"block_ids": (2, 5, 7)},
        {"block_ids": (5, 2, 8)},
        {"first_index": 1},
        {"first_index": 2**40},
        {"block_ids": (), "generations": ()},
        {"block_ids": (5, 2), "generations": (4, 4)},
        {"block_ids": (5, 2, 7, 1), "generations": (4, 4, 9, 1)},
    ],
    ids=str,
)
def test_what_no_grant_announced_is_refused_and_counted(target: Target, change: dict[str, Any]) -> None:
    target.send([payload()], **change)
    target.poll_until(num_refused=1, arrived=[])
    assert target.is_untouched


@pytest.mark.parametrize("size", [0, 1, 3 * _BLOCK_BYTES - 1, 3 * _BLOCK_BYTES + 1, 2 * _BLOCK_BYTES, 4 * _BLOCK_BYTES])
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
    target.send([bytes(_BLOCK_BYTES // 2), bytes(2 * _BLOCK_BYTES), bytes(_BLOCK_BYTES // 2)])
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


def test_a_doubled_message_is_written_once(target: Target) -> None:
    target.send([payload()])
    target.poll_until(num_refused=0, arrived=[0, 1, 2])
    target.blocks[:] = _GUARD
    target.send([payload()])
    target.poll_until(num_refused=1, arrived=[0, 1, 2])
    assert target.is_untouched


def test_blocks_that_have_arrived_may_not_come_again_among_others(target: Target) -> None:
    target.send([payload(1)], first_index=1, block_ids=(2,), generations=(4,))
    target.poll_until(num_refused=0, arrived=[1])
    target.blocks[:] = _GUARD
    target.send([payload()])
    target.poll_until(num_refused=1, arrived=[1])
    assert target.is_untouched


def test_nothing_is_taken_after_forget(target: Target) -> None:
    target.receiver.forget(key_of(1))
    target.send([payload()])
    target.poll_until(num_refused=1, arrived=[])
    assert target.is_untouched


def test_what_is_expected_again_is_taken_again(target: Target) -> None:
    target.send([payload()])
    target.poll_until(num_refused=0, arrived=[0, 1, 2])
    target.receiver.expect(key_of(1), _GRANTED, _GENERATIONS)
    target.blocks[:] = _GUARD
    target.send([payload()])
    target.poll_until(num_refused=0, arrived=[0, 1, 2, 0, 1, 2])
    assert not target.blocks[list(_GRANTED)].any()


def test_one_poll_takes_a_bounded_amount(monkeypatch: pytest.MonkeyPatch, target: Target) -> None:
    monkeypatch.setattr(tcp_zmq, "_MAX_POLL_BYTES", 4 * tcp_zmq._FRAME_COST_BYTES)
    for _ in range(6):
        target.raw.send(b"noise")
    until(lambda: bool(target.receiver.wait_on()[0].poll(0)))
    time.sleep(0.05)
    target.receiver.poll()
    assert target.receiver.num_refused == 4
    target.receiver.poll()
    assert target.receiver.num_refused == 6


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
    target.send([bytes(2 * _MIB)])
    other = target.context.socket(zmq.PUSH)
    other.connect(target.receiver.endpoint.address)
    batch = BlockBatch(HandoffName(*key_of(1)), 0, _GRANTED, _GENERATIONS)
    other.send_multipart([_HEADERS.encode(batch), payload()])
    target.poll_until(num_refused=0, arrived=[0, 1, 2])
    other.close()


def test_whatever_comes_only_granted_blocks_change_and_each_of_them_whole(target: Target) -> None:
    chance = random.Random(3)
    for _ in range(2000):
        first, count = chance.randrange(4), chance.randrange(4)
        ids, generations = list(_GRANTED[first : first + count]), list(_GENERATIONS[first : first + count])
        frames = [payload(1)] * len(ids)
        match chance.randrange(8):
            case 0 if ids:
                ids[chance.randrange(len(ids))] = chance.randrange(2**32)
            case 1 if generations:
                generations[chance.randrange(len(generations))] = chance.randrange(12)
            case 2:
                first = chance.choice((0, 1, 2, 3, 2**40))
            case 3:
                frames = [bytes(chance.choice((0, 1, _BLOCK_BYTES, 2 * _BLOCK_BYTES, 513))) for _ in range(3)]
            case 4:
                frames.append(b"")
            case 5:
                target.receiver.expect(key_of(1), _GRANTED, _GENERATIONS)
                target.blocks[:] = _GUARD
                target.arrived.clear()
            case _:
                pass
        target.send(frames, first_index=first, block_ids=tuple(ids), generations=tuple(generations))
        target.poll()
        assert len(set(target.arrived)) == len(target.arrived)
        for index, block_id in enumerate(_GRANTED):
            assert (target.blocks[block_id] == (0 if index in target.arrived else _GUARD)).all()
        assert (target.blocks[[0, 1, 3, 4, 6]] == _GUARD).all()
    assert target.receiver.num_refused > 500


def test_fencing_is_forgetting(target: Target) -> None:
    before = target.receiver.endpoint
    assert target.receiver.fence()
    assert target.receiver.endpoint == before


class Sink:
    """A raw socket in the place of a receiver; it takes only what it is asked to."""

    def __init__(self, context: Context) -> None:
        self.socket = context.socket(zmq.PULL)
        self.socket.setsockopt(zmq.RCVHWM, 1)
        self.endpoint = Endpoint("zmq", f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}")

    def receive(self) -> tuple[BlockBatch, list[bytes]]:
        assert self.socket.poll(5000)
        header, *frames = self.socket.recv_multipart()
        return _HEADERS.decode(header), frames


def moves_of(sources: Sequence[int], first_index: int = 0) -> list[Move]:
    return [Move(first_index + i, source, 100 + i, 3) for i, source in enumerate(sources)]


def pushed(sender: ZmqSender, number: int, moves: Sequence[Move]) -> bool:
    """Whether a push was accepted; the connection is given time to be made."""
    until(lambda: sender.push(key_of(number), moves))
    return True


@pytest.fixture
def dial(context: Context) -> Iterator[Dial]:
    """Opens senders, closed at the end."""
    with ExitStack() as stack:

        def dialled(endpoint: Endpoint, pool: Blocks | KvPool, key: ClusterKey | None = None) -> ZmqSender:
            if isinstance(pool, np.ndarray):
                pool = HostPool(pool)
            sender = ZmqSender(context, endpoint, pool, LinkSettings(cluster_key=key))
            stack.callback(sender.close)
            return sender

        yield dialled


@pytest.fixture
def sink(context: Context) -> Sink:
    return Sink(context)


def numbered(num_blocks: int, block_bytes: int) -> Blocks:
    return np.repeat(np.arange(num_blocks, dtype=np.uint8)[:, None], block_bytes, axis=1)


def test_neighbours_go_in_one_frame_up_to_the_largest(dial: Dial, sink: Sink) -> None:
    blocks = numbered(8, _MIB // 4)
    sender = dial(sink.endpoint, blocks)
    assert pushed(sender, 1, moves_of([0, 1, 2, 3, 4, 5, 7], first_index=9))
    header, frames = sink.receive()
    assert header == BlockBatch(HandoffName(*key_of(1)), 9, tuple(range(100, 107)), (3,) * 7)
    assert [len(frame) // (_MIB // 4) for frame in frames] == [4, 2, 1]
    assert b"".join(frames) == blocks[[0, 1, 2, 3, 4, 5, 7]].tobytes()


def test_short_runs_are_gathered(dial: Dial, sink: Sink) -> None:
    blocks = numbered(64, _BLOCK_BYTES)
    sender = dial(sink.endpoint, blocks)
    sources = [3, 9, 10, 1, 63, 0]
    assert pushed(sender, 1, moves_of(sources))
    assert sink.receive()[1] == [blocks[sources].tobytes()]


def test_gathered_frames_are_no_larger_than_others(dial: Dial, sink: Sink) -> None:
    blocks = numbered(48, _MIB // 16)
    sender = dial(sink.endpoint, blocks)
    sources = list(reversed(range(40)))
    assert pushed(sender, 1, moves_of(sources))
    frames = sink.receive()[1]
    assert [len(frame) for frame in frames] == [_MIB, _MIB, _MIB // 2]
    assert b"".join(frames) == blocks[sources].tobytes()


def test_blocks_are_read_until_the_network_has_taken_them(dial: Dial, sink: Sink) -> None:
    sender = dial(sink.endpoint, numbered(24, _MIB))
    for first in range(24):
        assert pushed(sender, first, moves_of([first]))
    until(lambda: not sender.is_reading(key_of(0)))
    time.sleep(0.1)
    assert sender.is_reading(key_of(23))
    for _ in range(24):
        sink.receive()
    until(lambda: not sender.is_reading(key_of(23)))


def test_what_is_under_way_is_bounded_but_one_push_always_goes(
    monkeypatch: pytest.MonkeyPatch, dial: Dial, sink: Sink
) -> None:
    monkeypatch.setattr(tcp_zmq, "_MAX_UNREAD_BYTES", 4 * _MIB)
    sender = dial(sink.endpoint, numbered(16, _MIB))
    assert pushed(sender, 1, moves_of(range(16)))
    assert not sender.push(key_of(2), moves_of([0]))
    assert not sender.is_reading(key_of(2))
    sink.receive()
    assert pushed(sender, 2, moves_of([0]))
    assert sink.receive()[0].handoff.key == key_of(2)


def test_blocks_of_a_device_are_free_at_once_and_its_slots_when_the_network_has_taken_them(
    dial: Dial, sink: Sink
) -> None:
    blocks = numbered(40, _MIB)
    sender = dial(sink.endpoint, late_pool(blocks))
    until(lambda: sender.push(key_of(0), moves_of([0])))
    numbers = [0, *(number for number in range(1, 40) if sender.push(key_of(number), moves_of([number])))]
    assert not any(sender.is_reading(key_of(number)) for number in numbers)
    assert len(numbers) < 40, "there are only so many slots"
    blocks[:] = 0xEE
    for number in numbers:
        header, (frame,) = sink.receive()
        assert header.handoff == HandoffName(*key_of(number))
        assert set(frame) == {number}
    until(lambda: sender.push(key_of(99), moves_of([3])))
    assert set(sink.receive()[1][0]) == {0xEE}


def test_after_close_nothing_is_read(dial: Dial, sink: Sink) -> None:
    sender = dial(sink.endpoint, numbered(24, _MIB))
    for first in range(24):
        assert pushed(sender, first, moves_of([first]))
    time.sleep(0.1)
    assert sender.is_reading(key_of(23))
    sender.close()
    until(lambda: not any(sender.is_reading(key_of(number)) for number in range(24)))
    with pytest.raises(TransferFailed):
        sender.push(key_of(1), moves_of([0]))


def test_a_receiver_that_goes_is_an_error_and_nothing_is_read_after_close(dial: Dial, sink: Sink) -> None:
    sender = dial(sink.endpoint, numbered(24, _MIB))
    for first in range(24):
        assert pushed(sender, first, moves_of([first]))
    sink.socket.close(linger=0)

    def fails() -> bool:
        sender.wait_on()[0].poll(100)
        try:
            sender.poll()
        except TransferFailed:
            return True
        return False

    until(fails)
    with pytest.raises(TransferFailed, match="broke"):
        sender.push(key_of(1), moves_of([0]))
    sender.close()
    until(lambda: not any(sender.is_reading(key_of(number)) for number in range(24)))


def test_nothing_is_taken_for_a_receiver_that_does_not_answer(dial: Dial) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and never listens
        address = f"tcp://127.0.0.1:{nobody.getsockname()[1]}"
        sender = dial(Endpoint("zmq", address), numbered(1, 8))
        for _ in range(20):
            assert not sender.push(key_of(1), moves_of([0]))
            time.sleep(0.01)
        assert not sender.is_reading(key_of(1))


@pytest.mark.parametrize("address", ["", "inproc://x", "tcp://a b:5", "tcp://host", "tcp://127.0.0.1:99999"])
def test_addresses_that_cannot_be_dialled_are_refused(dial: Dial, address: str) -> None:
    with pytest.raises(TransferFailed, match="cannot be dialled"):
        dial(Endpoint("zmq", address), numbered(1, 8))


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
        target.receiver.expect(key_of(1), _GRANTED, _GENERATIONS)
        stack.callback(target.receiver.close)
        yield target, key


def granted_moves() -> list[Move]:
    return [Move(i, i, t, g) for i, (t, g) in enumerate(zip(_GRANTED, _GENERATIONS, strict=True))]


def test_a_peer_with_the_cluster_key_delivers(dial: Dial, guarded: tuple[Target, ClusterKey]) -> None:
    target, key = guarded
    blocks = numbered(3, _BLOCK_BYTES)
    sender = dial(target.receiver.endpoint, blocks, key)
    assert pushed(sender, 1, granted_moves())
    target.poll_until(num_refused=0, arrived=[0, 1, 2])
    assert (target.blocks[list(_GRANTED)] == blocks).all()


@pytest.mark.parametrize("has_key", [False, True], ids=["no key", "another key"])
def test_a_peer_without_the_cluster_key_delivers_nothing(
    dial: Dial, guarded: tuple[Target, ClusterKey], has_key: bool
) -> None:
    target, _ = guarded
    key = ClusterKey(*zmq.curve_keypair()) if has_key else None
    sender = dial(target.receiver.endpoint, numbered(3, _BLOCK_BYTES), key)
    for _ in range(50):
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
    host, port = victim.receiver.endpoint.address.removeprefix("tcp://").split(":")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + b"\x00" + bytes(31)
    for noise in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), greeting + os.urandom(4096), b"\x00" * 65536):
        with socket.create_connection((host, int(port)), timeout=5) as link:
            link.sendall(noise)
            for _ in range(10):
                victim.poll()
                time.sleep(0.002)
    num_refused = victim.receiver.num_refused
    assert victim.is_untouched
    assert not (is_guarded and num_refused)
    sender = dial(victim.receiver.endpoint, numbered(3, _BLOCK_BYTES), key)
    assert pushed(sender, 1, granted_moves())
    victim.poll_until(num_refused=num_refused, arrived=[0, 1, 2])


def test_beyond_loopback_it_does_not_listen_without_a_key(context: Context) -> None:
    with pytest.raises(InvalidSetting, match="--cluster-key"):
        ZmqReceiver(context, "0.0.0.0", HostPool(numbered(1, 8)), _PLAIN)
