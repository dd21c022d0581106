"""The sending end of a node, with an agent that does nothing but report what a test says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from baton.kvtransfer.messages import Endpoint, HandoffName
from baton.kvtransfer.process_identity import this_process
from baton.kvtransfer.transports.base import Move, Starting
from baton.kvtransfer.transports.nixl.lives import RunningAgent
from baton.kvtransfer.transports.nixl.memory import DRAM
from baton.kvtransfer.transports.nixl.sender import NixlSender, NixlSenders, Part
from baton.kvtransfer.transports.nixl.wire import (
    DETAILS,
    NOTICES,
    Connect,
    Disconnect,
    Landed,
    PeerEnded,
    PoolDetails,
    Write,
    WriteEnded,
)
from baton.wire.errors import TransferFailed
from baton.wire.kv_shard import KvDivision, KvShard
from tests.request_keys import A, B

BLOCK_BYTES, NUM_BLOCKS = 2**20, 400


class Agent:
    """Notes what it is told. `reports` come with the next look."""

    def __init__(self) -> None:
        self.num_lives_ended = self.num_kills = self.num_waiting_bytes = self.num_crashes = 0
        self.may_start = True
        self.told: list[Any] = []
        self.reports: list[Any] = []
        self.ready: Any = self
        self.process = this_process()

    def send(self, command: Any) -> None:
        self.told.append(command)

    def poll(self) -> list[Any]:
        reports, self.reports = self.reports, []
        return reports

    def kill(self) -> None:
        self.num_kills += 1

    def end_life(self) -> None:
        self.num_lives_ended += 1

    def close(self) -> None:
        self.told.append("close")

    def wait_on(self) -> Sequence[Any]:
        return ("its socket",)


@pytest.fixture
def agent() -> Agent:
    return Agent()


@pytest.fixture
def senders(agent: Agent) -> NixlSenders:
    return NixlSenders(cast("RunningAgent", agent), BLOCK_BYTES)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [100.0]
    monkeypatch.setattr("baton.kvtransfer.transports.nixl.sender.time.monotonic", lambda: clock[0])
    return clock


def endpoint(num_bytes: int = NUM_BLOCKS * BLOCK_BYTES) -> Endpoint:
    return Endpoint("nixl", "peer", DETAILS.encode(PoolDetails(b"metadata", 4096, num_bytes, DRAM, 0)))


def opened(senders: NixlSenders, agent: Agent, part: Part | None = None) -> NixlSender:
    sender = senders.open(endpoint() if part is None else endpoint(NUM_BLOCKS * part.target_bytes), NUM_BLOCKS, part)
    assert isinstance(agent.told.pop(), Connect)
    return sender


def moves(count: int, first: int = 0) -> list[Move]:
    return [Move(first + place, place, 1000 + place, 7) for place in range(count)]


def test_a_push_is_one_write_that_tells_the_receiver_what_has_come(senders: NixlSenders, agent: Agent) -> None:
    sender = opened(senders, agent)
    assert sender.push(A, moves(2, 5))
    notice = NOTICES.encode(Landed(HandoffName(*A), 5, (1000, 1001), (7, 7)))
    assert agent.told == [Write(1, 1, (0, 1), (1000, 1001), notice)]
    assert (sender.is_reading(A), sender.is_reading(B)) == (True, False)
    agent.reports = [WriteEnded(1, True, ""), WriteEnded(99, True, "of nobody")]
    assert not sender.is_reading(A)
    assert (sender.needs_fence, sender.is_silent, sender.pushes_parts) == (False, False, False)
    with pytest.raises(TransferFailed, match="whole blocks"):
        sender.push_part(A, moves(1), 0, 1)
    sender.poll()


def test_a_handoff_is_read_until_its_last_write_has_ended(senders: NixlSenders, agent: Agent) -> None:
    sender = opened(senders, agent)
    for key in (A, A, B):
        sender.push(key, moves(1))
    agent.reports = [WriteEnded(1, True, ""), WriteEnded(3, True, "")]
    assert (sender.is_reading(A), sender.is_reading(B)) == (True, False)
    agent.reports = [WriteEnded(2, True, "")]
    assert not sender.is_reading(A)


def test_a_large_push_is_several_writes_of_1024_blocks_at_most(agent: Agent) -> None:
    senders = NixlSenders(cast("RunningAgent", agent), 64)
    sender = senders.open(endpoint(NUM_BLOCKS * 64), NUM_BLOCKS)
    agent.told.clear()
    assert sender.push(A, moves(2500, 3))
    assert [len(write.sources) for write in agent.told] == [1024, 1024, 452]
    assert [NOTICES.decode(write.notice).first_index for write in agent.told] == [3, 1027, 2051]


def test_no_more_than_64_writes_and_256_mebibytes_are_under_way(senders: NixlSenders, agent: Agent) -> None:
    small = opened(senders, agent, Part(1024, 1024))
    assert all(small.push(A, moves(1)) for _ in range(64))
    assert not small.push(A, moves(1))
    agent.reports = [WriteEnded(1, True, "")]
    assert small.push(A, moves(1))
    agent.reports = [WriteEnded(number, True, "") for number in range(2, 66)]
    large = opened(senders, agent)
    assert large.push(A, moves(255))
    assert large.push(A, moves(1))
    assert not large.push(A, moves(1))
    agent.reports = [WriteEnded(67, True, "")]
    assert large.push(A, moves(1))


def test_nothing_is_begun_while_the_agent_has_not_taken_what_it_was_told(senders: NixlSenders, agent: Agent) -> None:
    sender = opened(senders, agent)
    agent.num_waiting_bytes = 1
    assert not sender.push(A, moves(1))
    agent.num_waiting_bytes = 0
    assert sender.push(A, moves(1))


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_write_that_failed_fails_its_sender_alone(senders: NixlSenders, agent: Agent, has_begun: bool) -> None:
    sender, other = opened(senders, agent), opened(senders, agent)
    sender.push(A, moves(1))
    agent.reports = [WriteEnded(1, has_begun, "no route"), PeerEnded(sender.peer_id, "gone"), PeerEnded(99, "unknown")]
    with pytest.raises(TransferFailed, match="no route"):
        sender.push(A, moves(1))
    assert sender.needs_fence is has_begun
    other.poll()
    assert not other.needs_fence


def test_a_peer_that_ended_fails_its_sender_unless_it_was_asked_for(senders: NixlSenders, agent: Agent) -> None:
    sender, left = opened(senders, agent), opened(senders, agent)
    agent.reports = [PeerEnded(sender.peer_id, "no such agent"), PeerEnded(left.peer_id, "")]
    with pytest.raises(TransferFailed, match="no such agent"):
        sender.poll()
    assert not sender.needs_fence
    left.poll()


def test_a_closed_sender_has_two_seconds_for_what_is_in_flight(
    senders: NixlSenders, agent: Agent, now: list[float]
) -> None:
    sender, idle = opened(senders, agent), opened(senders, agent)
    sender.push(A, moves(1))
    agent.told.clear()
    idle.close()
    for _ in range(2):
        sender.close()
        now[0] += 1.0
    assert agent.told == [Disconnect(idle.peer_id), Disconnect(sender.peer_id)]
    assert sender.is_reading(A)
    assert agent.num_kills == 0, "it is not over time"
    with pytest.raises(TransferFailed, match="closed"):
        sender.poll()
    now[0] += 0.1
    assert sender.is_reading(A)
    assert agent.num_kills > 0
    agent.end_life()
    assert not sender.is_reading(A)
    assert sender.needs_fence


def test_a_closed_sender_that_reads_nothing_ends_no_agent(senders: NixlSenders, agent: Agent, now: list[float]) -> None:
    sender = opened(senders, agent)
    sender.close()
    now[0] += 1000.0
    senders.poll()
    assert agent.num_kills == 0


def test_the_end_of_the_agent_fails_all_and_only_writes_in_flight_need_a_fence(
    senders: NixlSenders, agent: Agent
) -> None:
    writing, idle = opened(senders, agent), opened(senders, agent)
    writing.push(A, moves(300))
    agent.end_life()
    for sender in (writing, idle):
        with pytest.raises(TransferFailed, match="agent of this node ended"):
            sender.poll()
    assert (writing.needs_fence, idle.needs_fence, writing.is_reading(A)) == (True, False, False)
    assert opened(senders, agent).push(B, moves(1)), "its bytes are under way no more"


def test_after_256_connects_the_agent_is_replaced_once_nothing_is_in_flight(senders: NixlSenders, agent: Agent) -> None:
    sender = opened(senders, agent)
    sender.push(A, moves(1))
    for _ in range(255):
        opened(senders, agent)
    with pytest.raises(Starting):
        senders.open(endpoint(), NUM_BLOCKS)
    assert (agent.num_kills, sender.push(A, moves(1))) == (0, False)
    agent.reports = [WriteEnded(1, True, "")]
    senders.poll()
    assert agent.num_kills == 1
    agent.end_life()
    senders.poll()
    assert opened(senders, agent).push(A, moves(1))


def test_without_an_agent_it_says_whether_to_ask_again(senders: NixlSenders, agent: Agent) -> None:
    agent.ready = None
    assert senders.process is None
    with pytest.raises(Starting, match=r"is starting again$"):
        senders.open(endpoint(), NUM_BLOCKS)
    agent.may_start = False
    with pytest.raises(TransferFailed, match="crashes too often"):
        senders.open(endpoint(), NUM_BLOCKS)


@pytest.mark.parametrize(
    ("offered", "reason"),
    [
        (Endpoint("nixl", "peer"), "the peer's nixl agent is starting again"),
        (Endpoint("nixl", "peer", b"noise"), "does not decode"),
        (endpoint(NUM_BLOCKS * BLOCK_BYTES - 1), "does not have the size of its pool"),
    ],
)
def test_an_endpoint_that_is_none_is_refused_by_its_reason(
    senders: NixlSenders, agent: Agent, offered: Endpoint, reason: str
) -> None:
    with pytest.raises(TransferFailed, match=reason):
        senders.open(offered, NUM_BLOCKS)
    assert agent.told == []


def test_a_part_is_connected_with_its_runs_and_named_with_its_rank(senders: NixlSenders, agent: Agent) -> None:
    share = KvShard(1, 0, KvDivision(2))
    sender = senders.open(endpoint(NUM_BLOCKS * 48), NUM_BLOCKS, Part(24, 48, [(0, 16, 8), (8, 32, 16)], share))
    details = DETAILS.decode(endpoint(NUM_BLOCKS * 48).details)
    assert agent.told == [Connect(1, "peer", details, NUM_BLOCKS, (0, 8), (16, 32), (8, 16))]
    sender.push(A, moves(1))
    assert NOTICES.decode(agent.told[-1].notice).source == share
    assert (sender.writers, senders.wait_on(), sender.wait_on()) == ((agent.process,), *2 * [("its socket",)])


def test_the_end_of_the_node_ends_the_agent_and_all_senders(senders: NixlSenders, agent: Agent) -> None:
    sender = opened(senders, agent)
    sender.push(A, moves(1))
    agent.told.clear()
    senders.close()
    assert agent.told == ["close"]
    with pytest.raises(TransferFailed, match="closed"):
        sender.poll()


def test_a_new_life_of_the_agent_may_connect_as_often_as_the_first(senders: NixlSenders, agent: Agent) -> None:
    for _ in range(2):
        for _ in range(256):
            opened(senders, agent)
        with pytest.raises(Starting):
            senders.open(endpoint(), NUM_BLOCKS)
        agent.end_life()
        senders.poll()
