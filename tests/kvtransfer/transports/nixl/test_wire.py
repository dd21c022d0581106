"""The stream between a node and its nixl agent."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest

from baton.kvtransfer.transports.nixl.wire import COMMANDS, REPORTS, Channel, Disconnect, Watch, WriteEnded


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    node, agent = socket.socketpair()
    channels = Channel(node, COMMANDS, REPORTS), Channel(agent, REPORTS, COMMANDS)
    yield channels
    for channel in channels:
        channel.close()


def test_messages_arrive_in_order(ends: tuple[Channel, Channel]) -> None:
    node, agent = ends
    node.send(Watch(True))
    node.send(Disconnect(3))
    assert agent.receive() == [Watch(True), Disconnect(3)]


def test_a_full_socket_keeps_the_rest_for_later(ends: tuple[Channel, Channel]) -> None:
    node, agent = ends
    sent = [WriteEnded(write_id, True, "x" * 1000) for write_id in range(2000)]
    for message in sent:
        agent.send(message)
    assert agent.num_waiting_bytes > 0
    received: list[object] = []
    while len(received) < len(sent):
        received += node.receive()
        agent.flush()
    assert received == sent
    assert agent.num_waiting_bytes == 0


def test_the_last_messages_of_an_agent_count(ends: tuple[Channel, Channel]) -> None:
    node, agent = ends
    agent.send(WriteEnded(1, True, ""))
    agent.close()
    assert node.receive() == [WriteEnded(1, True, "")]
    assert not node.is_open


@pytest.mark.parametrize("noise", [struct.pack("<I", 2**31), struct.pack("<I", 8) + b"nonsense"])
def test_noise_closes_the_channel(ends: tuple[Channel, Channel], noise: bytes) -> None:
    node, agent = ends
    agent.socket.send(noise)
    assert node.receive() == []
    assert not node.is_open


def test_sending_to_nobody_closes_the_channel(ends: tuple[Channel, Channel]) -> None:
    node, agent = ends
    agent.close()
    node.send(Watch(True))
    assert not node.is_open
