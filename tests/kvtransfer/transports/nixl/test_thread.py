"""The nixl agent on a thread of the node: its lives, what its end proves, and what it asks of UCX and of a GPU.

With the real library over host memory, and with stand-ins for what no test can bring about in it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvtransfer.host import this_process
from kvtransfer.transports.nixl import thread as nixl_thread
from kvtransfer.transports.nixl import transport as nixl
from kvtransfer.transports.nixl.agent import BESIDE_ENGINE, Agent
from kvtransfer.transports.nixl.lives import Crashes
from kvtransfer.transports.nixl.memory import DRAM, VRAM, Region, region_of
from kvtransfer.transports.nixl.thread import AgentThread, run_agent
from kvtransfer.transports.nixl.transport import NixlDeviceReceiver, NixlReceiver
from kvtransfer.transports.nixl.ucx import may_use_cuda_ipc, node_environment
from kvtransfer.transports.nixl.wire import (
    COMMANDS,
    DETAILS,
    REPORTS,
    Channel,
    Connect,
    Disconnect,
    Notices,
    PoolDetails,
    Ready,
    Write,
    WriteEnded,
)
from kvtransfer.write_proof import WriteProof
from tests.kvtransfer.transports.nixl.nixl_pair import NixlPair, moves_of
from wire.errors import InvalidSetting, TransferFailed

_NUM_BLOCKS, _BLOCK_BYTES = 32, 2**18
needs_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """What a node puts into its environment stays there; the tests' process is nobody's node."""
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture
def pool() -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.zeros((4, 4096), dtype=np.uint8)


@pytest.fixture
def segments(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What torch's allocator says that it has."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr("torch.cuda.memory_snapshot", lambda: found)
    monkeypatch.setattr("torch.cuda.get_allocator_backend", lambda: "native")
    return found


def a_ready(region: Region) -> Ready:
    details = PoolDetails(b"metadata", region.base_address, region.num_bytes, region.kind, region.device_index)
    return Ready(f"agent-{time.monotonic_ns()}", this_process(), details)


def obedient(channel: Channel, region: Region, stopped: threading.Event) -> None:
    """An agent that does nothing until it is asked to end."""
    channel.send(a_ready(region))
    stopped.wait(20)


def until(agent: AgentThread, is_so: Callable[[], bool]) -> list[Any]:
    """Poll; all reports meanwhile."""
    reports, deadline_s = [], time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < deadline_s
        reports += agent.poll()
        time.sleep(0.002)
    return reports


# --- with the real library


@needs_nixl
def test_writes_between_two_threads_of_agents_and_a_fence_in_between() -> None:
    pair = NixlPair(_NUM_BLOCKS, _BLOCK_BYTES, on_threads=(True, True))
    moves = moves_of(range(_NUM_BLOCKS), range(_NUM_BLOCKS)[::-1])
    for _ in range(2):
        sender = pair.open()
        pair.target[:] = 0
        assert pair.push(sender, pair.expect(moves), moves) == _NUM_BLOCKS
        assert np.array_equal(pair.target, pair.source[::-1])
        assert sender.writer == this_process()
        old = pair.receiver.endpoint
        assert not pair.receiver.fence(), "on loopback a peer may hold a mapping"
        assert pair.receiver.endpoint != old
        sender.close()
        pair.wait_until(lambda: pair.receiver.is_ready)
        assert pair.receiver.endpoint.address != old.address
    assert pair.receiver.num_crashes == 0
    pair.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "kv-nixl"]


@needs_nixl
def test_writes_to_a_receiver_that_stands_still_are_ended_with_the_agent_and_the_next_one_works() -> None:
    pair = NixlPair(_NUM_BLOCKS, _BLOCK_BYTES, on_threads=(True, False))
    sender, moves = pair.open(), moves_of([0], [0])
    key = pair.expect(moves)
    frozen = pair.receiver.process
    assert frozen is not None
    os.kill(frozen.pid, signal.SIGSTOP)
    while sender.push(key, moves):
        pass
    assert sender.is_reading(key)
    sender.close()
    assert pair.wait_until(lambda: not sender.is_reading(key)) < 5
    assert sender.needs_fence
    assert pair.senders.num_crashes == 0
    assert pair.receiver.fence()
    everything = moves_of(range(_NUM_BLOCKS), range(_NUM_BLOCKS))
    assert pair.push(pair.open(), pair.expect(everything), everything) == _NUM_BLOCKS
    assert np.array_equal(pair.target, pair.source)
    pair.close()


@needs_nixl
def test_an_error_in_the_loop_ends_the_life_with_a_write_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = NixlPair(_NUM_BLOCKS, _BLOCK_BYTES, on_threads=(True, False))
    sender, moves = pair.open(), moves_of(range(_NUM_BLOCKS), range(_NUM_BLOCKS))
    key = pair.expect(moves)
    with monkeypatch.context() as broken:

        def check_writes(agent: Agent) -> None:
            if agent._under_way:
                held = agent._under_way[0].handle  # what a frame of a real failure would hold on to
                raise RuntimeError(f"the library failed with {held}")

        broken.setattr(Agent, "_check_writes", check_writes)
        assert sender.push(key, moves)
        assert "ended" in pair.wait_for_failure(sender)
    assert not sender.is_reading(key)
    assert pair.senders.num_crashes == 1
    pair.receiver.fence()
    assert pair.push(pair.open(), pair.expect(moves), moves) == _NUM_BLOCKS
    pair.close()


# --- lives


def test_an_agent_that_ends_by_itself_is_counted_and_replaced(pool: Any) -> None:
    lives: list[str] = []
    is_known = threading.Event()

    def failing_once(channel: Channel, region: Region, stopped: threading.Event) -> None:
        channel.send(a_ready(region))
        lives.append("")
        if len(lives) == 1:
            is_known.wait(20)
            raise ValueError("out of luck")
        stopped.wait(20)

    agent = AgentThread(pool, "127.0.0.1", failing_once)
    first = agent.ready
    is_known.set()
    reports = until(agent, lambda: agent.num_lives_ended == 1 and agent.ready is not None)
    assert [type(report) for report in reports] == [Ready]
    assert agent.ready != first
    assert agent.num_crashes == 1
    agent.close()
    assert not agent.is_alive
    assert agent.num_crashes == 1


def test_crashes_too_close_together_make_the_next_start_wait() -> None:
    crashes = Crashes()
    for _ in range(5):
        assert crashes.may_start
        crashes.note()
    assert not crashes.may_start
    assert crashes.num_crashes == 5


@pytest.mark.usefixtures("segments")
def test_an_agent_that_does_not_start_says_why_and_what_a_gpu_needs(pool: Any) -> None:
    def refusing(channel: Channel, region: Region, stopped: threading.Event) -> None:
        raise RuntimeError("memory of GPU 3 cannot be registered (NIXL_ERR_BACKEND)")

    with pytest.raises(InvalidSetting, match=r"GPU 3 cannot be registered .*nixl-cu12 or nixl-cu13"):
        AgentThread(FakeTensor(), "127.0.0.1", refusing)
    with pytest.raises(InvalidSetting, match=r"cannot be registered \(NIXL_ERR_BACKEND\)$"):
        AgentThread(pool, "127.0.0.1", refusing)


def test_what_a_life_that_ends_still_reports_is_not_passed_on(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_thread, "_KILL_WAIT_S", 0.05)
    may_end = threading.Event()

    def slow(channel: Channel, region: Region, stopped: threading.Event) -> None:
        channel.send(a_ready(region))
        stopped.wait(20)
        channel.send(Notices((b"late",)))
        channel.send(WriteEnded(1, True, ""))
        channel.send(a_ready(region))
        may_end.wait(20)

    agent = AgentThread(pool, "127.0.0.1", slow)
    agent.kill()
    assert agent.is_alive
    for _ in range(20):
        assert agent.poll() == []
        assert agent.ready is None
        time.sleep(0.002)
    assert agent.num_lives_ended == 0, "it has not come back"
    may_end.set()
    assert until(agent, lambda: agent.num_lives_ended == 1) == []
    assert agent.num_crashes == 0
    agent.close()


def test_a_life_that_does_not_end_ends_the_node(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_thread, "_KILL_WAIT_S", 0.05)
    monkeypatch.setattr(nixl_thread, "END_S", 0.2)
    is_over = threading.Event()

    def stuck(channel: Channel, region: Region, stopped: threading.Event) -> None:
        channel.send(a_ready(region))
        is_over.wait(20)

    agent = AgentThread(pool, "127.0.0.1", stuck)
    agent.kill()
    assert agent.poll() == []
    time.sleep(0.3)
    for _ in range(3):  # whoever asks, and as often as it is asked
        with pytest.raises(TransferFailed, match="did not end"):
            agent.poll()
    assert agent.num_lives_ended == 0
    assert not agent.is_starting
    agent.close()
    is_over.set()


def test_the_end_of_a_node_waits_longer_for_its_agent_than_a_fence(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_thread, "_KILL_WAIT_S", 0.01)

    def slow(channel: Channel, region: Region, stopped: threading.Event) -> None:
        channel.send(a_ready(region))
        stopped.wait(20)
        time.sleep(0.2)

    agent = AgentThread(pool, "127.0.0.1", slow)
    agent.kill()
    assert agent.is_alive
    agent.close()
    assert not agent.is_alive


def test_a_teardown_that_failed_is_no_end(pool: Any) -> None:
    def failing(channel: Channel, region: Region, stopped: threading.Event) -> None:
        channel.send(a_ready(region))
        stopped.wait(20)
        raise nixl_thread._NotTornDown("something still refers to it")

    agent = AgentThread(pool, "127.0.0.1", failing)
    agent.kill()
    with pytest.raises(TransferFailed, match="something still refers to it"):
        until(agent, lambda: False)
    assert agent.num_lives_ended == 0
    agent.close()


# --- fences


@pytest.mark.usefixtures("segments")
@pytest.mark.parametrize(
    ("host", "is_proof"), [("127.0.0.1", False), ("10.1.2.3", True), ("0.0.0.0", False)], ids=["loopback", "lan", "any"]
)
def test_the_end_of_the_agent_is_a_fence_only_where_no_peer_can_hold_a_mapping(
    host: str, is_proof: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    interfaces = {"10.1.2.3": "eth7", "127.0.0.1": "lo"}
    monkeypatch.setattr("kvtransfer.transports.nixl.ucx._interface_of", lambda address: interfaces[str(address)])
    monkeypatch.setattr(nixl, "AgentThread", lambda pool, host: AgentThread(pool, host, obedient))
    for name in ("UCX_TLS", "UCX_NET_DEVICES"):
        os.environ.pop(name, None)
    receiver = NixlReceiver.for_device(FakeTensor(), host)
    assert isinstance(receiver, NixlDeviceReceiver)
    assert receiver.write_proof is (WriteProof.ENDPOINT_ENDED if is_proof else WriteProof.BOTH_ENDED)
    old = receiver.endpoint
    assert receiver.fence() == is_proof
    assert receiver.endpoint != old, "the agent has ended all the same"
    while not receiver.is_ready:
        receiver.poll()
    assert receiver.endpoint.address != old.address
    receiver.close()


def test_an_endpoint_does_not_change_before_its_life_has_ended(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_thread, "_KILL_WAIT_S", 0.05)
    may_end = threading.Event()

    def slow(channel: Channel, region: Region, stopped: threading.Event) -> None:
        obedient(channel, region, stopped)
        may_end.wait(20)

    monkeypatch.setattr(nixl, "AgentThread", lambda pool, host: AgentThread(pool, host, slow))
    receiver = NixlReceiver.for_device(pool, "127.0.0.1")
    old = receiver.endpoint
    assert not receiver.fence()
    receiver.poll()
    assert receiver.endpoint == old
    assert not receiver.is_ready
    may_end.set()
    while receiver.endpoint == old:
        receiver.poll()
    receiver.close()


# --- UCX


def test_the_environment_of_a_node_gets_names_of_ucx_and_nixl_and_keeps_the_users(pool: Any) -> None:
    os.environ.pop("UCX_TLS", None)
    os.environ["UCX_NET_DEVICES"] = "mine"
    os.environ["UCX_RCACHE_MAX_UNRELEASED"] = "7"
    before = dict(os.environ)
    AgentThread(pool, "127.0.0.1", obedient).close()
    assert {name: os.environ[name] for name in before} == before
    added = set(os.environ) - set(before)
    assert all(name.startswith(("UCX_", "NIXL_")) for name in added)
    assert "UCX_HANDLE_ERRORS" in added
    assert os.environ["UCX_LOG_FILE"] == "stderr", "standard output is the node's own"


def test_ways_for_pools_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.transports.nixl.ucx._interface_of", lambda address: "eth7")
    monkeypatch.setattr("kvtransfer.transports.nixl.ucx._rdma_devices", lambda: ["mlx5_0:1"])
    across = node_environment("10.1.2.3", {}, has_gpu=True)
    assert across["UCX_TLS"] == "^posix,sysv,cma,xpmem,cuda_ipc"
    assert across["UCX_NET_DEVICES"] == "eth7,mlx5_0:1"
    inside = node_environment("127.0.0.1", {}, has_gpu=True)
    assert "UCX_TLS" not in inside
    assert inside["UCX_CUDA_IPC_ENABLE_MNNVL"] == "n"
    assert "UCX_CUDA_IPC_ENABLE_MNNVL" not in node_environment("127.0.0.1", {}, has_gpu=False)
    assert node_environment("127.0.0.1", {"UCX_HANDLE_ERRORS": "bt"}, has_gpu=True)["UCX_HANDLE_ERRORS"] == "bt"


@pytest.mark.parametrize(
    ("tls", "may"),
    [
        (None, True),
        ("all", True),
        ("tcp,cuda_copy,cuda_ipc", True),
        ("cuda,tcp", True),
        ("\\cuda_ipc,tcp", True),
        ("tcp,cuda_copy,self", False),
        ("^cma", True),
        ("^cma,cuda_ipc", False),
        ("^cuda", False),
        ("tcp,cuda*", True),
    ],
)
def test_whether_cuda_ipc_can_be_chosen(tls: str | None, may: bool) -> None:
    assert may_use_cuda_ipc({} if tls is None else {"UCX_TLS": tls}) == may


# --- memory of a GPU


class FakeTensor:
    """A pool on GPU 3, as far as its description goes."""

    shape, ndim = (4, 4096), 2
    device = SimpleNamespace(type="cuda", index=3)

    def data_ptr(self) -> int:
        return 2**40

    def element_size(self) -> int:
        return 1

    def is_contiguous(self) -> bool:
        return True


def test_a_pool_on_a_gpu_is_described_with_its_device() -> None:
    region = region_of(FakeTensor())
    assert region == Region(2**40, 4 * 4096, 4, VRAM, 3)
    assert region.whole().tolist() == [[2**40, 4 * 4096, 3]]
    assert region.blocks().tolist() == [[2**40 + i * 4096, 4096, 3] for i in range(4)]


def a_segment(**changes: Any) -> dict[str, Any]:
    """Of torch's allocator, around the pool of `FakeTensor`."""
    return {"device": 3, "address": 2**40 - 2**21, "total_size": 2**22, "is_expandable": False, **changes}


@pytest.mark.parametrize(
    ("found", "backend", "may"),
    [
        ([a_segment()], "native", True),
        ([a_segment(is_expandable=True)], "native", False),
        ([a_segment(is_expandable=True, device=2), a_segment()], "native", True),
        ([a_segment(is_expandable=True, address=2**40 + 4096), a_segment()], "native", True),
        ([], "native", True),
        ([a_segment()], "cudaMallocAsync", False),
    ],
)
def test_memory_that_cuda_ipc_cannot_share_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    segments: list[dict[str, Any]],
    found: list[dict[str, Any]],
    backend: str,
    may: bool,
) -> None:
    segments += found
    monkeypatch.setattr("torch.cuda.get_allocator_backend", lambda: backend)
    with contextlib.nullcontext() if may else pytest.raises(InvalidSetting, match="expandable_segments"):
        region_of(FakeTensor()).require_shareable()


@needs_nixl
def test_only_an_agent_that_may_share_by_cuda_ipc_asks_for_such_memory(segments: list[dict[str, Any]]) -> None:
    segments.append(a_segment(is_expandable=True))
    with pytest.raises(InvalidSetting, match="expandable_segments"):
        AgentThread(FakeTensor(), "127.0.0.1", obedient)
    os.environ["UCX_TLS"] = "tcp,cuda_copy"
    AgentThread(FakeTensor(), "127.0.0.1", obedient).close()


def test_a_pool_that_is_none_is_refused() -> None:
    for what in (
        np.zeros(16, dtype=np.uint8),
        np.zeros((4, 4), dtype=np.uint16),
        np.zeros((8, 8), dtype=np.uint8)[:, ::2],
    ):
        with pytest.raises(InvalidSetting, match="contiguous"):
            region_of(what)


class FakeNixl:
    """Notes what it is asked for. A write stays under way until it is released."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.agents: list[Any] = []
        self.state = "PROC"

    def module(self) -> Any:
        fake = self

        class Native:
            pass

        class Handle:
            def __init__(self, what: str) -> None:
                self.what = what

            def release(self) -> None:
                fake.calls.append(("release", self.what))

        class NixlAgent:
            def __init__(self, name: str, config: Any) -> None:
                self.agent = Native()

            def register_memory(self, descriptors: Any, kind: str) -> str:
                fake.calls.append(("register", descriptors.tolist(), kind))
                return "registered"

            def deregister_memory(self, registered: str) -> None:
                fake.calls.append(("deregister", registered))

            def prep_xfer_dlist(self, name: str, descriptors: Any, kind: str) -> Handle:
                fake.calls.append(("prepare", name, descriptors.tolist(), kind))
                return Handle(f"list of {name}")

            def get_agent_metadata(self) -> bytes:
                return b"metadata"

            def add_remote_agent(self, metadata: bytes) -> str:
                return "peer"

            def remove_remote_agent(self, name: str) -> None:
                fake.calls.append(("remove", name))

            def make_prepped_xfer(self, *arguments: Any) -> Handle:
                return Handle("write")

            def transfer(self, handle: Handle) -> str:
                return fake.state

            def check_xfer_state(self, handle: Handle) -> str:
                return fake.state

            def get_new_notifs(self) -> dict[str, list[bytes]]:
                return {}

        return SimpleNamespace(nixl_agent=NixlAgent, nixl_agent_config=lambda **settings: settings)


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


def connect(kind: str = VRAM, device_index: int = 5) -> Connect:
    return Connect(1, "peer", PoolDetails(b"of the peer", 2**41, 2 * 4096, kind, device_index), 2)


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
    deadline_s = time.monotonic() + 10
    while len([call for call in fake_nixl.calls if call[0] == "prepare"]) < 2:
        assert time.monotonic() < deadline_s
    time.sleep(0.05)
    stopped.set()
    thread.join(10)
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
