"""The receiving end of a node, with an agent that does nothing but report what a test says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from baton.kvtransfer.messages import HandoffName
from baton.kvtransfer.process_identity import this_process
from baton.kvtransfer.transports.base import BlocksArrived
from baton.kvtransfer.transports.inlets import WholeOnly
from baton.kvtransfer.transports.nixl.lives import RunningAgent
from baton.kvtransfer.transports.nixl.memory import DRAM
from baton.kvtransfer.transports.nixl.receiver import NixlReceiver
from baton.kvtransfer.transports.nixl.wire import DETAILS, NOTICES, Landed, Notices, PoolDetails, Ready, Watch
from baton.kvtransfer.write_proof import WriteProof
from baton.wire.kv_shard import WHOLE_BLOCK
from tests.request_keys import A, B

BLOCK_BYTES = 64
FIRST_LIFE, SECOND_LIFE = (
    Ready(name, this_process(), PoolDetails(b"metadata", 4096, 8 * BLOCK_BYTES, DRAM, 0))
    for name in ("first", "second")
)


class Agent:
    """Notes what it is told. `reports` come with the next look."""

    def __init__(self) -> None:
        self.ready: Ready | None = FIRST_LIFE
        self.is_alive, self.is_starting, self.num_crashes = True, False, 3
        self.told: list[Any] = []
        self.reports: list[Any] = []

    def send(self, command: Any) -> None:
        self.told.append(command)

    def poll(self) -> list[Any]:
        reports, self.reports = self.reports, []
        return reports

    def kill(self) -> None:
        self.told.append("kill")
        self.ready = None

    def come_up(self, ready: Ready) -> None:
        self.ready, self.is_alive, self.is_starting = ready, True, False
        self.reports.append(ready)

    def wait_on(self) -> Sequence[Any]:
        return ("its socket",)

    def close(self) -> None:
        self.told.append("close")


class Sink:
    """Where blocks are written."""

    block_bytes = BLOCK_BYTES


@pytest.fixture
def agent() -> Agent:
    return Agent()


@pytest.fixture
def receiver(agent: Agent) -> NixlReceiver:
    return NixlReceiver(cast("RunningAgent", agent), WholeOnly(cast("Any", Sink())))


def landed(*block_ids: int, generation: int = 9, first_index: int = 0, source: Any = None) -> bytes:
    generations = (generation,) * len(block_ids)
    return NOTICES.encode(Landed(HandoffName(*A), first_index, block_ids, generations, source))


def test_what_landed_has_arrived_if_it_was_expected(receiver: NixlReceiver, agent: Agent) -> None:
    receiver.expect(A, [3, 4, 5], [9, 9, 9])
    agent.reports = [Notices((landed(3, 4), landed(5, first_index=2)))]
    receiver.poll()
    assert receiver.take_arrivals() == [BlocksArrived(A, 0, 2), BlocksArrived(A, 2, 1)]
    assert (receiver.num_bytes, receiver.num_refused) == (3 * BLOCK_BYTES, 0)
    assert receiver.take_arrivals() == []


@pytest.mark.parametrize(
    "notice",
    [b"noise", landed(3, generation=8), landed(4), landed(3, first_index=1), landed(), landed(3, source=WHOLE_BLOCK)],
)
def test_what_is_no_block_of_a_grant_changes_nothing(receiver: NixlReceiver, agent: Agent, notice: bytes) -> None:
    receiver.expect(A, [3], [9])
    agent.reports = [Notices((notice,))]
    receiver.poll()
    assert (receiver.num_refused, receiver.num_bytes, receiver.take_arrivals()) == (1, 0, [])
    agent.reports = [Notices((landed(3), landed(3)))]
    receiver.poll()
    assert (receiver.num_refused, receiver.take_arrivals()) == (2, [BlocksArrived(A, 0, 1)])


def test_the_agent_looks_for_what_lands_while_something_is_expected(receiver: NixlReceiver, agent: Agent) -> None:
    for key in (A, B):
        receiver.expect(key, [3], [9])
    receiver.forget(A)
    assert agent.told == [Watch(True)]
    agent.reports = [SECOND_LIFE]
    receiver.poll()
    receiver.forget(B)
    agent.reports = [FIRST_LIFE]
    receiver.poll()
    assert agent.told == [Watch(True), Watch(True), Watch(False), Watch(False)]
    assert not receiver.is_writing(A)


def test_the_endpoint_changes_when_the_life_behind_it_has_ended(receiver: NixlReceiver, agent: Agent) -> None:
    first = receiver.endpoint
    assert (first.transport, first.address, DETAILS.decode(first.details)) == ("nixl", "first", FIRST_LIFE.details)
    assert (receiver.is_ready, receiver.process, receiver.num_crashes) == (True, this_process(), 3)
    assert not receiver.fence(), "its process has still to end"
    assert agent.told == ["kill"]
    receiver.poll()
    assert (receiver.endpoint, receiver.is_ready, receiver.process) == (first, False, None)
    agent.is_alive = False
    receiver.poll()
    assert receiver.endpoint.details == b""
    agent.come_up(SECOND_LIFE)
    receiver.poll()
    assert (receiver.endpoint.address, receiver.is_ready) == ("second", True)


def test_an_agent_that_nobody_knows_yet_is_not_ended(receiver: NixlReceiver, agent: Agent) -> None:
    agent.ready, agent.is_starting = None, True
    assert receiver.fence()
    assert (agent.told, receiver.endpoint.details) == ([], b"")


def test_without_a_living_agent_a_fence_is_done(receiver: NixlReceiver, agent: Agent) -> None:
    agent.is_alive = False
    assert receiver.fence()
    assert receiver.endpoint.details == b""


def test_closed_it_offers_nothing(receiver: NixlReceiver, agent: Agent) -> None:
    receiver.close()
    assert (agent.told, receiver.endpoint.details, receiver.wait_on()) == (["close"], b"", ("its socket",))
    assert (receiver.write_proof, receiver.is_silent) == (WriteProof.ENDPOINT_ENDED, False)
