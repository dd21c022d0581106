"""The nixl transport when agents are killed or stand still: bounded, no hang, and whole again afterwards."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from baton.kvtransfer.messages import ProcessIdentity
from baton.kvtransfer.process_identity import is_gone
from baton.kvtransfer.transports.base import Move, Starting
from baton.kvtransfer.transports.nixl import process
from baton.kvtransfer.transports.nixl import sender as sender_module
from baton.runtime.child import Child
from baton.wire.errors import InvalidSetting, TransferFailed
from tests.kvtransfer.transports.nixl.nixl_pair import NixlPair, moves_of

_NUM_BLOCKS = 64
_ROOT = Path(__file__).resolve().parents[4]
_NODE = """
import sys, time
from baton.kvtransfer.transports.nixl.process import AgentProcess
from baton.kvtransfer.transports.shm.segment import Segment
agent = AgentProcess(Segment(4096).descriptor, 1, 4096, "127.0.0.1")
process = agent.ready.process
sys.stdout.write(f"{process.host} {process.pid} {process.start_ticks}\\n")
sys.stdout.flush()
time.sleep(60)
"""


@pytest.fixture
def pair(nodes: NixlPair) -> Iterator[NixlPair]:
    yield nodes
    # whatever a test broke is whole again: other bytes, another agent, the same pools
    nodes.target[:] = 0
    moves = all_blocks()
    sender = nodes.open()
    assert nodes.push(sender, nodes.expect(moves), moves) == _NUM_BLOCKS
    assert np.array_equal(nodes.target, nodes.source)
    sender.close()


def all_blocks() -> list[Move]:
    return moves_of(range(_NUM_BLOCKS), range(_NUM_BLOCKS))


def pid_of(process: ProcessIdentity | None) -> int:
    assert process is not None
    return process.pid


def test_a_killed_receiving_agent_fails_the_sender_and_is_replaced(pair: NixlPair) -> None:
    sender, moves = pair.open(), all_blocks()
    assert pair.push(sender, pair.expect(moves), moves) == _NUM_BLOCKS  # now the agents are connected: writes begin
    old_name, num_crashes = pair.receiver.endpoint.address, pair.receiver.num_crashes
    keys = [pair.expect(moves) for _ in range(4)]
    for key in keys[:2]:
        sender.push(key, moves)
    os.kill(pid_of(pair.receiver.process), signal.SIGKILL)
    with contextlib.suppress(TransferFailed):  # some write is in flight however late the kill comes
        for key in keys[2:]:
            sender.push(key, moves)
    pair.wait_for_failure(sender)
    pair.wait_until(lambda: not any(sender.is_reading(key) for key in keys))
    assert sender.needs_fence
    pair.wait_until(lambda: pair.receiver.num_crashes == num_crashes + 1)
    assert pair.receiver.endpoint.details == b""
    pair.wait_until(lambda: bool(pair.receiver.endpoint.details))
    assert pair.receiver.endpoint.address != old_name
    assert pair.senders.num_crashes == 0


def test_a_killed_sending_agent_fails_every_sender_and_is_replaced_as_soon_as_the_system_allows(
    pair: NixlPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = [OSError(errno.EMFILE, "Too many open files")]

    def start(*arguments: Any, **options: Any) -> Child:
        if refusals:
            raise refusals.pop()
        return Child(*arguments, **options)

    monkeypatch.setattr(process, "Child", start)
    sender, moves = pair.open(), all_blocks()
    key, num_crashes = pair.expect(moves), pair.receiver.num_crashes
    for _ in range(4):
        sender.push(key, moves)
    os.kill(pid_of(pair.senders.process), signal.SIGKILL)
    pair.wait_for_failure(sender)
    assert not sender.is_reading(key)
    assert sender.needs_fence
    assert pair.receiver.num_crashes == num_crashes


def test_an_agent_that_the_system_refuses_at_first_is_asked_for_again_until_its_time_is_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries: list[int] = []

    def start(*arguments: Any, **options: Any) -> Child:
        tries.append(1)
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(process, "Child", start)
    monkeypatch.setattr(process, "_RETRY_S", 0.0)
    monkeypatch.setattr(process, "_FIRST_START_S", 0.25)
    with pytest.raises(InvalidSetting, match="temporarily unavailable"):
        process.AgentProcess(0, 1, 4096, "127.0.0.1")
    assert len(tries) > 1


def test_a_receiver_that_stands_still_is_given_up_and_fenced(pair: NixlPair) -> None:
    sender, moves = pair.open(), moves_of([0], [0])
    key, num_crashes = pair.expect(moves), pair.receiver.num_crashes
    stopped = pair.receiver.process
    assert stopped is not None
    os.kill(stopped.pid, signal.SIGSTOP)
    num_pushed = 0
    while sender.push(key, moves):
        num_pushed += 1
    assert num_pushed == 64
    assert sender.is_reading(key)
    (writer,) = sender.writers
    sender.close()
    pair.wait_until(lambda: not sender.is_reading(key))
    assert sender.needs_fence
    assert is_gone(writer)

    assert pair.receiver.fence()
    assert is_gone(stopped)
    assert pair.receiver.endpoint.details == b""
    assert pair.receiver.fence()
    assert pair.receiver.num_crashes == num_crashes


def test_an_agent_that_has_connected_very_often_is_replaced_when_it_writes_nothing(
    pair: NixlPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender_module, "_MAX_CONNECTS", pair.senders._num_connects + 6)
    moves, num_crashes = moves_of([0], [0]), pair.senders.num_crashes
    num_sockets, writer = num_sockets_of(pair), pair.senders.process
    for _ in range(6):
        sender = pair.open()
        assert pair.push(sender, pair.expect(moves), moves) == 1
        sender.close()
    assert pair.senders.process == writer
    assert num_sockets_of(pair) > num_sockets, "if UCX closes them, the bound is not needed any more"
    with monkeypatch.context() as patched:
        patched.setattr(process.AgentProcess, "may_start", False)
        with pytest.raises(TransferFailed, match="crashes too often") as refused:
            pair.open()
    assert not isinstance(refused.value, Starting)
    with pytest.raises(Starting):
        pair.senders.open(pair.receiver.endpoint, pair.num_blocks)
    pair.wait_until(lambda: pair.senders.process not in (None, writer))
    assert num_sockets_of(pair) <= num_sockets
    assert pair.senders.num_crashes == num_crashes


def num_sockets_of(pair: NixlPair) -> int:
    """Of the senders' agent."""
    return len(psutil.Process(pid_of(pair.senders.process)).net_connections("tcp"))


def test_an_agent_does_not_outlive_its_node() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _NODE], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(_ROOT)}
    ) as node:
        assert node.stdout is not None
        host, pid, start_ticks = node.stdout.readline().rsplit(" ", 2)
        agent = ProcessIdentity(host, int(pid), int(start_ticks))
        assert not is_gone(agent)
        os.kill(agent.pid, signal.SIGSTOP)  # one that could not notice by itself
        node.kill()
    deadline_s = time.monotonic() + 20
    while not is_gone(agent):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
