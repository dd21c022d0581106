"""Pairs of the nccl transport whose other end is killed or frozen, in a process of its own."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest
import zmq

from baton.kvtransfer.messages import Endpoint
from baton.kvtransfer.transports.nccl import line
from baton.kvtransfer.transports.nccl.sender import NcclSender
from baton.wire.errors import TransferFailed
from baton.wire.links import LinkSettings
from tests.kvtransfer.transports.nccl.nccl_ends import (
    BLOCK_BYTES,
    NUM_BLOCKS,
    ForkedProgram,
    Target,
    key_of,
    moves_of,
    program,
    push_until,
)

_SENDER_PROGRAM = """
import sys, time
import numpy as np, zmq
from baton.wire.links import LinkSettings
from baton.kvtransfer.messages import Endpoint
from baton.kvtransfer.transports.base import Move
from baton.kvtransfer.transports.nccl.sender import NcclSender
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
from baton.wire.links import LinkSettings
from baton.kvtransfer.transports.nccl.receiver import NcclReceiver
receiver = NcclReceiver(zmq.Context(), "127.0.0.1", np.zeros((32, 4096), dtype=np.uint8), LinkSettings())
print(receiver.endpoint.address, flush=True)
while True:
    receiver.poll()
    time.sleep(0.001)
"""


@pytest.fixture(scope="module")
def receiver_program() -> Iterator[tuple[ForkedProgram, Endpoint]]:
    """A receiver in a process of its own, and where to reach it."""
    with program(_RECEIVER_PROGRAM) as child:
        yield child, Endpoint("nccl", child.read_line().strip())


@pytest.fixture
def short_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair that stands still is given up soon."""
    monkeypatch.setattr(line, "STALL_S", 1.5)


@pytest.fixture
def endless_stalls(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pair is given up because of a deadline."""
    monkeypatch.setattr(line, "STALL_S", 60.0)


@pytest.fixture
def foreign_receiver(
    receiver_program: tuple[ForkedProgram, Endpoint],
) -> Iterator[tuple[ForkedProgram, NcclSender]]:
    """The receiver's process, and a sender whose pair with it stands. A frozen one goes on afterwards."""
    child, endpoint = receiver_program
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sender = NcclSender(context, endpoint, np.zeros((NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8), LinkSettings())
    try:
        push_until(sender, lambda num_pushed: num_pushed >= 20)
        yield child, sender
    finally:
        child.process.send_signal(signal.SIGCONT)
        sender.close()
        context.destroy(linger=0)


@pytest.mark.usefixtures("short_stalls")
def test_a_receiver_that_is_frozen_ends_the_sender(
    foreign_receiver: tuple[ForkedProgram, NcclSender],
) -> None:
    child, sender = foreign_receiver
    child.process.send_signal(signal.SIGSTOP)
    with pytest.raises(TransferFailed):
        push_until(sender, lambda _: False)
    assert not sender.is_reading(key_of(1))


@pytest.mark.usefixtures("short_stalls")
def test_a_sender_that_is_closed_reads_no_more(foreign_receiver: tuple[ForkedProgram, NcclSender]) -> None:
    child, sender = foreign_receiver
    child.process.send_signal(signal.SIGSTOP)
    deadline_s = time.monotonic() + 30
    while sender.push(key_of(1), moves_of(range(8), range(8))):
        assert time.monotonic() < deadline_s
    assert sender.is_reading(key_of(1))
    sender.close()
    deadline_s = time.monotonic() + 30
    while sender.is_reading(key_of(1)):
        assert time.monotonic() < deadline_s


@pytest.mark.usefixtures("endless_stalls")
def test_a_receiver_that_is_killed_ends_the_sender(
    foreign_receiver: tuple[ForkedProgram, NcclSender],
) -> None:
    child, sender = foreign_receiver  # which is of no use to any test after this one
    child.process.send_signal(signal.SIGKILL)
    with pytest.raises(TransferFailed):
        push_until(sender, lambda _: False)
    assert not sender.is_reading(key_of(1))


def test_two_processes_send_and_one_is_killed_and_one_frozen(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line, "SILENCE_S", 3.0)
    address = target.receiver.endpoint.address
    for number in (1, 2):
        target.expect(number, [8 * number + index for index in range(8)])
    with program(_SENDER_PROGRAM, address, "1", "endless") as busy, program(_SENDER_PROGRAM, address, "2", "") as idle:
        target.until(lambda: target.num_arrived == 16, timeout_s=60)
        assert target.receiver.num_pairs == 2
        assert (target.blocks[8:16] == 1).all()
        assert (target.blocks[16:24] == 2).all()
        assert target.is_untouched(*range(8, 24))
        num_refused = target.receiver.num_refused
        target.until(lambda: target.receiver.num_refused > num_refused + 20)
        busy.process.send_signal(signal.SIGKILL)
        target.until(lambda: target.receiver.num_pairs == 1)
        idle.process.send_signal(signal.SIGSTOP)
        target.until(lambda: target.receiver.num_pairs == 0)
    target.expect(3, [3])
    target.push(target.sender(), 3, moves_of([3], [3]))
    target.until(lambda: target.num_arrived == 17)


def test_the_main_thread_takes_the_pairs_with_it() -> None:
    source = _RECEIVER_PROGRAM.split("print(")[0] + (
        "from baton.kvtransfer.transports.base import Move\n"
        "from baton.kvtransfer.transports.nccl.sender import NcclSender\n"
        "context = zmq.Context()\n"
        "sender = NcclSender(context, receiver.endpoint, np.zeros((8, 4096), dtype=np.uint8), LinkSettings())\n"
        "while not sender.push((bytes(16), 1), [Move(0, 0, 0, 1)]):\n"
        "    receiver.poll()\n"
        "while not receiver.num_refused:\n"  # and then both sides are idle
        "    receiver.poll()\n"
    )
    with program(source) as child:
        assert child.process.wait(timeout=60) == 0
