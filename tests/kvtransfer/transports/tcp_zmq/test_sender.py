"""The zmq transport's sender: frames, bounds, and what is read for how long."""

from __future__ import annotations

import socket
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton.kvtransfer.messages import Endpoint, HandoffName
from baton.kvtransfer.transports import tcp_zmq
from baton.kvtransfer.transports.tcp_zmq import BlockBatch
from baton.wire.errors import TransferFailed
from tests.kvtransfer.late_stream import late_pool
from tests.kvtransfer.transports.tcp_zmq.zmq_ends import (
    BLOCK_BYTES,
    MIB,
    Context,
    Dial,
    Sink,
    moves_of,
    numbered,
    pushed,
    until,
)
from tests.request_keys import key_of


@pytest.fixture
def sink(context: Context) -> Sink:
    return Sink(context)


def test_neighbours_go_in_one_frame_up_to_the_largest(dial: Dial, sink: Sink) -> None:
    blocks = numbered(8, MIB // 4)
    sender = dial(sink.endpoint, blocks)
    assert pushed(sender, 1, moves_of([0, 1, 2, 3, 4, 5, 7], first_index=9))
    header, frames = sink.receive()
    assert header == BlockBatch(HandoffName(*key_of(1)), 9, tuple(range(100, 107)), (3,) * 7)
    assert [len(frame) // (MIB // 4) for frame in frames] == [4, 2, 1]
    assert b"".join(frames) == blocks[[0, 1, 2, 3, 4, 5, 7]].tobytes()


def test_short_runs_are_gathered(dial: Dial, sink: Sink) -> None:
    blocks = numbered(64, BLOCK_BYTES)
    sender = dial(sink.endpoint, blocks)
    sources = [3, 9, 10, 1, 63, 0]
    assert pushed(sender, 1, moves_of(sources))
    assert sink.receive()[1] == [blocks[sources].tobytes()]


def test_gathered_frames_are_no_larger_than_others(dial: Dial, sink: Sink) -> None:
    blocks = numbered(48, MIB // 16)
    sender = dial(sink.endpoint, blocks)
    sources = list(reversed(range(40)))
    assert pushed(sender, 1, moves_of(sources))
    frames = sink.receive()[1]
    assert [len(frame) for frame in frames] == [MIB, MIB, MIB // 2]
    assert b"".join(frames) == blocks[sources].tobytes()


def test_blocks_are_read_until_the_network_has_taken_them(dial: Dial, sink: Sink) -> None:
    sender = dial(sink.endpoint, numbered(24, MIB))
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
    monkeypatch.setattr(tcp_zmq, "_MAX_UNREAD_BYTES", 4 * MIB)
    sender = dial(sink.endpoint, numbered(16, MIB))
    assert pushed(sender, 1, moves_of(range(16)))
    assert not sender.push(key_of(2), moves_of([0]))
    assert not sender.is_reading(key_of(2))
    sink.receive()
    assert pushed(sender, 2, moves_of([0]))
    assert sink.receive()[0].handoff.key == key_of(2)


def test_blocks_of_a_device_are_free_at_once_and_its_slots_when_the_network_has_taken_them(
    dial: Dial, sink: Sink
) -> None:
    blocks = numbered(40, MIB)
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
    sender = dial(sink.endpoint, numbered(24, MIB))
    for first in range(24):
        assert pushed(sender, first, moves_of([first]))
    time.sleep(0.1)
    assert sender.is_reading(key_of(23))
    sender.close()
    until(lambda: not any(sender.is_reading(key_of(number)) for number in range(24)))
    with pytest.raises(TransferFailed):
        sender.push(key_of(1), moves_of([0]))


def test_a_receiver_that_goes_is_an_error_and_nothing_is_read_after_close(dial: Dial, sink: Sink) -> None:
    sender = dial(sink.endpoint, numbered(24, MIB))
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


def test_what_the_network_has_taken_is_under_way_no_more(dial: Dial, sink: Sink) -> None:
    sender = dial(sink.endpoint, numbered(4, BLOCK_BYTES))
    for number in range(3):
        assert pushed(sender, number, moves_of([number, number + 1]))
        sink.receive()
    until(lambda: not any(sender.is_reading(key_of(number)) for number in range(3)))
    assert (sender._num_unread_bytes, len(sender._unread)) == (0, 0)


def test_as_much_as_the_bound_may_be_under_way(monkeypatch: pytest.MonkeyPatch, dial: Dial, sink: Sink) -> None:
    monkeypatch.setattr(tcp_zmq, "_MAX_UNREAD_BYTES", 4 * MIB)
    sender = dial(sink.endpoint, numbered(4, MIB))
    assert pushed(sender, 1, moves_of([0]))
    sender._unread.appendleft(cast(Any, SimpleNamespace(is_over=False)))
    for unread_bytes, has_room in ((4 * MIB, False), (2 * MIB + 1, False), (2 * MIB, True)):
        sender._num_unread_bytes = unread_bytes
        assert sender.push(key_of(1), moves_of([0, 1])) is has_room
