"""The nixl agent on a thread of the node: its lives, what its end proves, and what it asks of UCX and of a GPU.

With the real library over host memory, and with stand-ins for what no test can bring about in it.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from baton.kvtransfer.pools.host import HostPool
from baton.kvtransfer.process_identity import this_process
from baton.kvtransfer.transports.inlets import WholeOnly
from baton.kvtransfer.transports.nixl import thread as nixl_thread
from baton.kvtransfer.transports.nixl.agent import Agent
from baton.kvtransfer.transports.nixl.lives import Crashes
from baton.kvtransfer.transports.nixl.memory import Region
from baton.kvtransfer.transports.nixl.receiver import NixlDeviceReceiver
from baton.kvtransfer.transports.nixl.thread import AgentThread
from baton.kvtransfer.transports.nixl.wire import Channel, Notices, PoolDetails, Ready, WriteEnded
from baton.kvtransfer.write_proof import WriteProof
from baton.wire.errors import InvalidSetting, TransferFailed
from tests.kvtransfer.transports.nixl.gpu_stand_ins import FakeTensor, a_segment
from tests.kvtransfer.transports.nixl.nixl_pair import NixlPair, moves_of, needs_nixl, preserved_environment

_NUM_BLOCKS, _BLOCK_BYTES = 32, 2**18
_NO_RANKS = WholeOnly(HostPool(np.zeros((1, 1), dtype=np.uint8)))


@pytest.fixture
def pool() -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.zeros((4, 4096), dtype=np.uint8)


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


@needs_nixl
def test_writes_between_two_threads_of_agents_and_a_fence_in_between() -> None:
    pair = NixlPair(_NUM_BLOCKS, _BLOCK_BYTES, on_threads=(True, True))
    moves = moves_of(range(_NUM_BLOCKS), range(_NUM_BLOCKS)[::-1])
    for _ in range(2):
        sender = pair.open()
        pair.target[:] = 0
        assert pair.push(sender, pair.expect(moves), moves) == _NUM_BLOCKS
        assert np.array_equal(pair.target, pair.source[::-1])
        assert sender.writers == (this_process(),)
        old = pair.receiver.endpoint
        assert not pair.receiver.fence(), "on loopback a peer may hold a mapping"
        assert pair.receiver.endpoint != old
        sender.close()
        pair.wait_until(lambda: pair.receiver.is_ready)
        assert pair.receiver.endpoint.address != old.address
    assert pair.receiver.num_crashes == 0
    pair.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "kv-nixl"]


@pytest.fixture(scope="module")
def thread_to_process() -> Iterator[NixlPair]:
    """The senders' agent is a thread of this process, the receiver's is not."""
    with preserved_environment():
        pair = NixlPair(_NUM_BLOCKS, _BLOCK_BYTES, on_threads=(True, False))
    yield pair
    pair.close()


@needs_nixl
def test_writes_to_a_receiver_that_stands_still_are_ended_with_the_agent_and_the_next_one_works(
    thread_to_process: NixlPair,
) -> None:
    pair = thread_to_process
    sender, moves = pair.open(), moves_of([0], [0])
    key = pair.expect(moves)
    frozen = pair.receiver.process
    assert frozen is not None
    os.kill(frozen.pid, signal.SIGSTOP)
    while sender.push(key, moves):
        pass
    assert sender.is_reading(key)
    sender.close()
    pair.wait_until(lambda: not sender.is_reading(key))
    assert sender.needs_fence
    assert pair.senders.num_crashes == 0
    assert pair.receiver.fence()
    everything = moves_of(range(_NUM_BLOCKS), range(_NUM_BLOCKS))
    assert pair.push(pair.open(), pair.expect(everything), everything) == _NUM_BLOCKS
    assert np.array_equal(pair.target, pair.source)


@needs_nixl
def test_an_error_in_the_loop_ends_the_life_with_a_write_in_flight(
    thread_to_process: NixlPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = thread_to_process
    pair.receiver.fence()  # the first write to an agent has to connect, so it is in flight for a while
    sender, moves = pair.open(), moves_of(range(_NUM_BLOCKS), range(_NUM_BLOCKS))
    key = pair.expect(moves)
    with monkeypatch.context() as broken:

        def check_writes(agent: Agent) -> None:
            if agent._in_flight:
                held = agent._in_flight[0].handle  # what a frame of a real failure would hold on to
                raise RuntimeError(f"the library failed with {held}")

        broken.setattr(Agent, "_check_writes", check_writes)
        assert sender.push(key, moves)
        assert "ended" in pair.wait_for_failure(sender)
    assert not sender.is_reading(key)
    assert pair.senders.num_crashes == 1
    pair.receiver.fence()
    assert pair.push(pair.open(), pair.expect(moves), moves) == _NUM_BLOCKS


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


@pytest.mark.parametrize("refused", ["socketpair", "Thread"])
def test_what_the_system_refuses_an_agent_is_asked_for_again(
    pool: Any, refused: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    may_crash = threading.Event()
    ends = [may_crash]

    def failing_once(channel: Channel, region: Region, stopped: threading.Event) -> None:
        channel.send(a_ready(region))
        (ends.pop() if ends else stopped).wait(20)
        if not stopped.is_set():
            raise ValueError("out of luck")

    refusals = 2

    def first_refused(*arguments: Any, **options: Any) -> Any:
        nonlocal refusals
        refusals -= 1
        if refusals < 0:
            return make(*arguments, **options)
        if refused == "socketpair":
            raise OSError(errno.EMFILE, "Too many open files")
        thread = make(*arguments, **options)
        monkeypatch.setattr(thread, "start", no_thread)
        return thread

    def no_thread() -> None:
        raise RuntimeError("can't start new thread")

    module = {"socketpair": socket, "Thread": threading}[refused]
    make = getattr(module, refused)
    monkeypatch.setattr(nixl_thread, "_RETRY_S", 0.0)
    monkeypatch.setattr(module, refused, first_refused)
    agent = AgentThread(pool, "127.0.0.1", failing_once)  # the first start too
    assert refusals == -1
    refusals = 2
    may_crash.set()
    until(agent, lambda: agent.num_lives_ended == 1 and agent.ready is not None)
    assert refusals == -1
    assert agent.num_crashes == 1, "a start that was refused is no crash"
    assert caplog.text.count("cannot be started now") == 4
    agent.close()


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


@pytest.mark.usefixtures("segments")
@pytest.mark.parametrize(
    ("host", "is_proof"), [("127.0.0.1", False), ("10.1.2.3", True), ("0.0.0.0", False)], ids=["loopback", "lan", "any"]
)
def test_the_end_of_the_agent_is_a_fence_only_where_no_peer_can_hold_a_mapping(
    host: str, is_proof: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    interfaces = {"10.1.2.3": "eth7", "127.0.0.1": "lo"}
    monkeypatch.setattr("baton.kvtransfer.transports.nixl.ucx._interface_of", lambda address: interfaces[str(address)])
    for name in ("UCX_TLS", "UCX_NET_DEVICES"):
        os.environ.pop(name, None)
    receiver = NixlDeviceReceiver(AgentThread(FakeTensor(), host, obedient), _NO_RANKS)
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

    receiver = NixlDeviceReceiver(AgentThread(pool, "127.0.0.1", slow), _NO_RANKS)
    old = receiver.endpoint
    assert not receiver.fence()
    receiver.poll()
    assert receiver.endpoint == old
    assert not receiver.is_ready
    may_end.set()
    while receiver.endpoint == old:
        receiver.poll()
    receiver.close()


def test_the_environment_of_a_node_gets_names_of_ucx_and_nixl_and_keeps_the_users(pool: Any) -> None:
    for name in [name for name in os.environ if name.startswith(("UCX_", "NIXL_"))]:
        del os.environ[name]
    os.environ["UCX_NET_DEVICES"] = "mine"
    os.environ["UCX_RCACHE_MAX_UNRELEASED"] = "7"
    before = dict(os.environ)
    AgentThread(pool, "127.0.0.1", obedient).close()
    assert {name: os.environ[name] for name in before} == before
    added = set(os.environ) - set(before)
    assert all(name.startswith(("UCX_", "NIXL_")) for name in added)
    assert "UCX_HANDLE_ERRORS" in added
    assert os.environ["UCX_LOG_FILE"] == "stderr", "standard output is the node's own"


@needs_nixl
def test_only_an_agent_that_may_share_by_cuda_ipc_asks_for_such_memory(segments: list[dict[str, Any]]) -> None:
    segments.append(a_segment(is_expandable=True))
    with pytest.raises(InvalidSetting, match="expandable_segments"):
        AgentThread(FakeTensor(), "127.0.0.1", obedient)
    os.environ["UCX_TLS"] = "tcp,cuda_copy"
    AgentThread(FakeTensor(), "127.0.0.1", obedient).close()
