"""What an agent asks of nixl and of a GPU, in which order, with a stand-in for the library."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator

import pytest

from baton.kvtransfer.transports.nixl.agent import BESIDE_ENGINE, Agent
from baton.kvtransfer.transports.nixl.memory import DRAM, VRAM, Region, region_of
from baton.kvtransfer.transports.nixl.thread import run_agent
from baton.kvtransfer.transports.nixl.wire import (
    COMMANDS,
    DETAILS,
    REPORTS,
    Channel,
    Connect,
    Disconnect,
    PoolDetails,
    Write,
)
from tests.kvtransfer.transports.nixl.gpu_stand_ins import FakeNixl, FakeTensor, metadata_of

_PEER = "ab" * 16


@pytest.fixture
def fake_nixl(monkeypatch: pytest.MonkeyPatch) -> FakeNixl:
    fake = FakeNixl()
    monkeypatch.setitem(sys.modules, "nixl", fake.module())
    monkeypatch.setattr(Region, "enter", lambda region: fake.calls.append(("enter", region.device_index)))
    monkeypatch.setattr(Region, "settle", lambda region: fake.calls.append(("settle", region.device_index)))
    return fake


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = socket.socketpair()
    channels = Channel(ours, COMMANDS, REPORTS), Channel(theirs, REPORTS, COMMANDS)
    yield channels
    for channel in channels:
        channel.close()


def connect(kind: str = VRAM, device_index: int = 5, peer_id: int = 1, metadata: bytes = metadata_of(_PEER)) -> Connect:
    return Connect(peer_id, _PEER, PoolDetails(metadata, 2**41, 2 * 4096, kind, device_index), 2)


def test_device_and_kind_of_both_pools_reach_nixl_and_the_endpoint(
    fake_nixl: FakeNixl, ends: tuple[Channel, Channel]
) -> None:
    node, theirs = ends
    agent = Agent(theirs, region_of(FakeTensor()), BESIDE_ENGINE)
    agent._carry_out(connect())
    own = [[2**40 + i * 4096, 4096, 3] for i in range(4)]
    peers = [[2**41 + i * 4096, 4096, 5] for i in range(2)]
    assert fake_nixl.calls == [
        ("register", [[2**40, 4 * 4096, 3]], VRAM),
        ("prepare", "NIXL_INIT_AGENT", own, VRAM),
        ("prepare", "peer", peers, VRAM),
    ]
    (ready,) = node.receive()
    assert (ready.details.memory, ready.details.device_index) == (VRAM, 3)
    assert DETAILS.decode(DETAILS.encode(ready.details)) == ready.details


def test_a_pool_in_memory_of_no_known_kind_fails_its_peer_only(
    fake_nixl: FakeNixl, ends: tuple[Channel, Channel]
) -> None:
    node, theirs = ends
    agent = Agent(theirs, Region(4096, 4096, 1), BESIDE_ENGINE)
    agent._carry_out(connect(kind="TAPE"))
    agent._carry_out(connect(kind=DRAM))
    _, ended = node.receive()
    assert "TAPE" in ended.error


def test_no_name_of_a_peer_reaches_nixl(fake_nixl: FakeNixl, ends: tuple[Channel, Channel]) -> None:
    node, theirs = ends
    agent = Agent(theirs, Region(4096, 4096, 1), BESIDE_ENGINE)
    agent._carry_out(connect())
    agent._carry_out(connect(peer_id=2))
    agent._carry_out(connect(peer_id=3, metadata=metadata_of("cd" * 16)))
    assert len({_PEER, *fake_nixl.names}) == 3
    _, refused = node.receive()
    assert (refused.peer_id, "another agent" in refused.error) == (3, True)


def test_a_write_that_failed_is_over_when_the_gpu_has_done(fake_nixl: FakeNixl, ends: tuple[Channel, Channel]) -> None:
    agent = Agent(ends[1], region_of(FakeTensor()), BESIDE_ENGINE)
    agent._carry_out(connect())
    for state, settled in (("DONE", []), ("ERR", [("settle", 3)])):
        fake_nixl.calls.clear()
        fake_nixl.state = state
        agent._carry_out(Write(1, 1, (0,), (0,), b""))
        assert fake_nixl.calls == [("release", "write"), *settled]


def test_a_teardown_waits_for_the_gpu_before_mappings_go_and_when_nothing_is_left(
    fake_nixl: FakeNixl, ends: tuple[Channel, Channel]
) -> None:
    node, theirs = ends
    stopped = threading.Event()
    thread = threading.Thread(target=run_agent, args=(theirs, region_of(FakeTensor()), stopped))
    thread.start()
    node.send(connect())
    node.send(Write(1, 1, (0,), (0,), b""))
    assert fake_nixl.has_begun.wait(30)
    stopped.set()
    thread.join(30)
    assert fake_nixl.calls[0] == ("enter", 3)
    assert fake_nixl.calls[-7:] == [
        ("release", "write"),
        ("settle", 3),
        ("release", "list of peer"),
        ("remove", "peer"),
        ("release", "list of NIXL_INIT_AGENT"),
        ("deregister", "registered"),
        ("settle", 3),
    ]


def test_a_teardown_with_something_left_over_is_none(fake_nixl: FakeNixl, ends: tuple[Channel, Channel]) -> None:
    agent = Agent(ends[1], region_of(FakeTensor()), BESIDE_ENGINE)
    held = agent._nixl.agent
    with pytest.raises(RuntimeError, match="still refers"):
        agent.close()
    assert held is not None


def test_a_stopped_agent_begins_nothing_more(fake_nixl: FakeNixl, ends: tuple[Channel, Channel]) -> None:
    node, theirs = ends
    stopped = threading.Event()
    agent = Agent(theirs, region_of(FakeTensor()), BESIDE_ENGINE, stopped)
    node.send(connect())
    node.send(Disconnect(1))
    stopped.set()
    agent.run()
    agent._take_commands()
    assert not [call for call in fake_nixl.calls if call[:2] == ("prepare", "peer")]
