"""What an agent asks of nixl and of a GPU, in which order, with a stand-in for the library."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from baton.kvtransfer.transports.nixl.agent import BESIDE_ENGINE, OWN_PROCESS, Agent, _import_nixl, _prctl, main
from baton.kvtransfer.transports.nixl.memory import DRAM, VRAM, Region, region_of
from baton.kvtransfer.transports.nixl.thread import run_agent
from baton.kvtransfer.transports.nixl.wire import (
    COMMANDS,
    DETAILS,
    MAX_METADATA_BYTES,
    MAX_NOTICE_BYTES,
    MAX_NOTICES,
    REPORTS,
    Channel,
    Connect,
    Disconnect,
    PeerEnded,
    PoolDetails,
    Watch,
    Write,
    WriteEnded,
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


@pytest.fixture
def agent(fake_nixl: FakeNixl, ends: tuple[Channel, Channel]) -> Agent:
    """One that has said that it is ready, connected to one peer."""
    made = Agent(ends[1], region_of(FakeTensor()), BESIDE_ENGINE)
    made._carry_out(connect())
    ends[0].receive()
    fake_nixl.calls.clear()
    return made


def write(write_id: int = 7, peer_id: int = 1) -> Write:
    return Write(peer_id, write_id, (3, 2), (0, 1), b"notice")


def test_a_write_has_its_blocks_and_its_notice_and_ends_when_nixl_says_so(
    agent: Agent, fake_nixl: FakeNixl, ends: tuple[Channel, Channel]
) -> None:
    for number in (7, 8):
        agent._carry_out(write(number))
    (kind, sources, own, targets, theirs, notice), _ = fake_nixl.writes
    assert (kind, sources.what, targets.what, notice) == ("WRITE", "list of NIXL_INIT_AGENT", "list of peer", b"notice")
    assert (own.tolist(), theirs.tolist()) == ([3, 2], [0, 1])
    agent._check_writes()
    assert ends[0].receive() == []
    for state, error in (("DONE", ""), ("ERR", "the write failed")):
        fake_nixl.state = "PROC"
        if not agent._in_flight:
            agent._carry_out(write(9))
        fake_nixl.state = state
        agent._check_writes()
        assert [report.error for report in ends[0].receive()] == [error] * (2 if state == "DONE" else 1)
    assert agent._in_flight == []


@pytest.mark.parametrize(
    ("name", "has_begun", "calls"),
    [("begin", False, []), ("transfer", True, ["release", "settle"]), ("check", True, ["release", "settle"])],
)
def test_an_error_of_nixl_ends_the_write_that_it_is_about(
    agent: Agent, fake_nixl: FakeNixl, ends: tuple[Channel, Channel], name: str, has_begun: bool, calls: list[str]
) -> None:
    fake_nixl.fails[name] = RuntimeError("the line is cut" * 100)
    agent._carry_out(write())
    agent._check_writes()
    assert ends[0].receive() == [WriteEnded(7, has_begun, ("the line is cut" * 100)[:1000])]
    assert [call[0] for call in fake_nixl.calls] == calls
    assert agent._in_flight == []


def test_an_error_without_words_is_told_by_its_kind(
    agent: Agent, fake_nixl: FakeNixl, ends: tuple[Channel, Channel]
) -> None:
    fake_nixl.fails["transfer"] = KeyError()
    agent._carry_out(write())
    assert ends[0].receive() == [WriteEnded(7, True, "KeyError")]


def test_a_write_to_a_peer_that_is_not_connected_never_begins(agent: Agent, ends: tuple[Channel, Channel]) -> None:
    agent._carry_out(write(peer_id=2))
    assert ends[0].receive() == [WriteEnded(7, False, "the peer is not connected")]


def test_a_request_that_cannot_be_released_is_kept_until_the_agent_ends(agent: Agent, fake_nixl: FakeNixl) -> None:
    fake_nixl.fails["release write"] = RuntimeError("it is in use")
    fake_nixl.state = "DONE"
    agent._carry_out(write())
    assert [handle.what for handle in agent._abandoned] == ["write"]
    agent.close()
    assert agent._abandoned == []


def test_a_peer_that_leaves_is_let_go_when_none_of_its_writes_is_in_flight(
    agent: Agent, fake_nixl: FakeNixl, ends: tuple[Channel, Channel]
) -> None:
    agent._carry_out(connect(peer_id=2))
    agent._carry_out(write())
    fake_nixl.calls.clear()
    for peer_id in (1, 2, 3):
        agent._carry_out(Disconnect(peer_id))
    agent._let_leave()
    assert ends[0].receive() == [PeerEnded(2, "")]
    assert fake_nixl.calls == [("release", "list of peer"), ("remove", "peer")]
    fake_nixl.state = "DONE"
    agent._check_writes()
    agent._let_leave()
    assert ends[0].receive() == [WriteEnded(7, True, ""), PeerEnded(1, "")]
    agent._let_leave()
    assert ends[0].receive() == []


@pytest.mark.parametrize("name", ["remove", "release list of peer"])
def test_a_peer_that_leaves_badly_is_gone_all_the_same(
    agent: Agent, fake_nixl: FakeNixl, ends: tuple[Channel, Channel], name: str
) -> None:
    fake_nixl.fails[name] = RuntimeError("it does not go")
    agent._carry_out(Disconnect(1))
    agent._let_leave()
    assert ends[0].receive() == [PeerEnded(1, "it does not go")]
    assert fake_nixl.calls[-1] == ("remove", "peer")
    agent._carry_out(write())
    assert not ends[0].receive()[0].has_begun


def test_of_a_peer_that_cannot_be_prepared_nothing_is_left(
    agent: Agent, fake_nixl: FakeNixl, ends: tuple[Channel, Channel]
) -> None:
    fake_nixl.fails["prepare peer"] = RuntimeError("no such memory")
    agent._carry_out(connect(peer_id=2))
    assert ends[0].receive() == [PeerEnded(2, "no such memory")]
    assert fake_nixl.calls == [("remove", "peer")]
    assert list(agent._peers) == [1]


def test_runs_of_bytes_of_blocks_are_written_where_the_peer_has_them(
    agent: Agent, fake_nixl: FakeNixl, ends: tuple[Channel, Channel]
) -> None:
    agent._carry_out(replace(connect(peer_id=2), sources=(8, 64), targets=(0, 32), sizes=(16, 32)))
    agent._carry_out(Write(2, 7, (3,), (1,), b"notice"))
    own, theirs = 2**40 + 3 * 4096, 2**41 + 4096
    assert fake_nixl.writes == [
        (
            "WRITE",
            ([[own + 8, 16, 3], [own + 64, 32, 3]], VRAM),
            ([[theirs, 16, 5], [theirs + 32, 32, 5]], VRAM),
            "peer",
            b"notice",
        )
    ]
    agent._carry_out(replace(connect(peer_id=3), sources=(4090,), targets=(0,), sizes=(16,)))
    assert "no runs of bytes" in ends[0].receive()[0].error


def test_notices_are_passed_on_in_packs_but_for_what_is_too_long(
    agent: Agent, fake_nixl: FakeNixl, ends: tuple[Channel, Channel]
) -> None:
    longest = b"x" * MAX_NOTICE_BYTES
    fake_nixl.notices = {"a": [b"%d" % number for number in range(MAX_NOTICES + 1)], "b": [longest, longest + b"x"]}
    agent._pass_notices_on()
    first, second = ends[0].receive()
    assert first.notices == tuple(b"%d" % number for number in range(MAX_NOTICES))
    assert second.notices == (b"%d" % MAX_NOTICES, longest)
    agent._pass_notices_on()
    assert ends[0].receive() == []


def test_a_node_that_does_not_listen_loses_notices(agent: Agent, fake_nixl: FakeNixl) -> None:
    for _ in range(700):
        fake_nixl.notices = {"a": [b"x" * MAX_NOTICE_BYTES]}
        agent._pass_notices_on()
    assert 2**24 <= agent._channel.num_waiting_bytes < 2**24 + 2 * MAX_NOTICE_BYTES


def test_pauses_are_as_long_as_the_state_of_things_allows(
    agent: Agent, fake_nixl: FakeNixl, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, waits = 100.0, list[float]()

    def wait(readers: list[object], writers: list[object], others: list[object], wait_s: float) -> object:
        assert readers == [agent._channel.socket]
        waits.append(wait_s)
        return [], [], []

    monkeypatch.setattr("baton.kvtransfer.transports.nixl.agent.select.select", wait)
    monkeypatch.setattr("baton.kvtransfer.transports.nixl.agent.time.monotonic", lambda: now_s)
    agent._lively_until_s = 0.0
    assert not agent._wait()
    agent._carry_out(Watch(True))
    agent._wait()
    fake_nixl.notices = {"a": [b"n"]}
    for move in (agent._take_commands, agent._pass_notices_on):
        now_s += 1.0
        move()
        now_s += 0.0029
        agent._wait()
        now_s += 0.0002
        agent._wait()
    agent._carry_out(write())
    agent._wait()
    fake_nixl.state = "DONE"
    agent._check_writes()
    agent._wait()
    pace = BESIDE_ENGINE
    later = [pace.moving_s, pace.expecting_s]
    assert waits == [pace.idle_s, pace.expecting_s, *later, *later, pace.writing_s, pace.moving_s]
    assert 0.0 < OWN_PROCESS.writing_s <= OWN_PROCESS.moving_s < pace.expecting_s < pace.idle_s < 0.1


@pytest.mark.parametrize(
    ("region", "what"), [(region_of(FakeTensor()), "memory of GPU 3"), (Region(4096, 4096, 1), "host memory")]
)
def test_memory_that_cannot_be_registered_is_told(
    fake_nixl: FakeNixl, ends: tuple[Channel, Channel], region: Region, what: str
) -> None:
    fake_nixl.fails["register"] = RuntimeError("too much")
    with pytest.raises(RuntimeError, match=rf"^{what} cannot be registered \(too much\)$"):
        Agent(ends[1], region, BESIDE_ENGINE)


def test_metadata_that_no_message_takes_is_refused(fake_nixl: FakeNixl, ends: tuple[Channel, Channel]) -> None:
    fake_nixl.more_metadata = bytes(MAX_METADATA_BYTES)
    with pytest.raises(ValueError, match="metadata is"):
        Agent(ends[1], Region(4096, 4096, 1), BESIDE_ENGINE)


@pytest.mark.parametrize("is_imported", [True, False])
def test_nixl_imports_no_torch_that_is_not_imported_already(
    fake_nixl: FakeNixl, monkeypatch: pytest.MonkeyPatch, is_imported: bool
) -> None:
    seen: list[object] = []
    monkeypatch.setitem(sys.modules, "torch", sys)
    if not is_imported:
        monkeypatch.delitem(sys.modules, "torch")

    def found(name: str) -> str:
        seen.append(sys.modules.get("torch", "none"))
        return name

    monkeypatch.setattr("importlib.import_module", found)
    assert _import_nixl() == "nixl"
    assert seen == [sys if is_imported else None]
    assert sys.modules.get("torch", "none") is (sys if is_imported else "none")


def test_a_process_maps_the_segment_that_it_inherits_and_ends_without_destructors(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []

    class Working:
        def __init__(self, channel: Channel, region: Region, pace: object) -> None:
            self.channel = channel
            channel.send(PeerEnded(1, ""))
            address = (ctypes.c_ubyte * region.num_bytes).from_address(region.base_address)
            done.append((bytes(address), region.num_blocks, region.kind, pace))

        def run(self) -> None:
            self.channel.close()
            done.append("ran")

    segment = os.memfd_create("segment")
    os.write(segment, bytes(range(32)) * 256)
    arguments = [os.dup(ends[1].socket.fileno()), segment, 2, 4096]
    monkeypatch.setattr(sys, "argv", ["agent", *map(str, arguments)])
    monkeypatch.setattr("baton.kvtransfer.transports.nixl.agent.Agent", Working)
    monkeypatch.setattr("baton.kvtransfer.transports.nixl.agent._prctl", lambda *of: done.append(of))
    monkeypatch.setattr(os, "dup2", lambda *of: done.append(of))
    monkeypatch.setattr(os, "_exit", done.append)
    main()
    assert done == [(29, 1000), (2, 1), (bytes(range(32)) * 256, 2, DRAM, OWN_PROCESS), "ran", 0]
    assert ends[0].receive() == [PeerEnded(1, "")]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(segment)


def test_what_the_kernel_refuses_is_an_error() -> None:
    _prctl(29, 0)  # timers of this thread are as exact as they were
    with pytest.raises(OSError, match=r"prctl\(999999\)"):
        _prctl(999999, 0)
