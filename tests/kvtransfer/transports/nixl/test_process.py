"""The lives of an agent process as its node sees them, with a stand-in for the process."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from baton.kvtransfer.messages import ProcessIdentity
from baton.kvtransfer.transports.nixl import lives, process
from baton.kvtransfer.transports.nixl.process import AgentProcess
from baton.kvtransfer.transports.nixl.wire import COMMANDS, REPORTS, Channel, PeerEnded, PoolDetails, Ready, Watch
from baton.wire.errors import InvalidSetting

READY = Ready("agent", ProcessIdentity("host", 7, 9), PoolDetails(b"metadata", 4096, 8192, "DRAM", 0))


class FakeChild:
    """A process that speaks when a test lets it."""

    def __init__(self, module: str, *arguments: str, **options: Any) -> None:
        self.module, self.arguments, self.options = module, arguments, options
        self.status: int | None = None
        self.ends_when_killed = True
        self.calls: list[str] = []
        reading, self._writing = os.pipe()
        self.stderr = os.fdopen(reading, "rb")
        self.channel = Channel(socket.socket(fileno=os.dup(int(arguments[0]))), REPORTS, COMMANDS)

    def complain(self, text: bytes) -> None:
        os.write(self._writing, text)

    def kill(self) -> None:
        self.calls.append("kill")
        if self.ends_when_killed and self.status is None:
            self.status = -9

    def poll(self) -> int | None:
        return self.status

    def wait(self, timeout_s: float) -> int | None:
        self.calls.append("wait")
        return self.status

    def end(self) -> None:
        self.calls.append("end")
        self.close()

    def close(self) -> None:
        if not self.stderr.closed:
            self.stderr.close()
            os.close(self._writing)
        self.channel.close()


class Node:
    """What starts agents. `says`: what each new one says at once; `error`: why none can be started."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.children: list[FakeChild] = []
        self.says: list[object] = [READY]
        self.complaint = b""
        self.status: int | None = None
        self.error: OSError | None = None
        self.num_tries = 0

    def start(self, *arguments: Any, **options: Any) -> FakeChild:
        self.num_tries += 1
        if self.error is not None:
            raise self.error
        child = FakeChild(*arguments, **options)
        self.children.append(child)
        for message in self.says:
            child.channel.send(message)
        if self.complaint:
            child.complain(self.complaint)
        child.status = self.status
        return child

    def monotonic(self) -> float:
        return self.now_s

    def select(self, readers: list[object], writers: list[object], others: list[object], wait_s: float) -> None:
        assert len(readers) == (0 if self.error else 2)
        self.now_s += wait_s

    @property
    def newest(self) -> FakeChild:
        return self.children[-1]


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    made = Node()
    monkeypatch.setattr(process, "Child", made.start)
    monkeypatch.setattr(process, "require_nixl", lambda: None)
    monkeypatch.setattr(process, "select", made)
    for module in (process, lives):
        monkeypatch.setattr(module, "time", made)
    yield made
    for child in made.children:
        child.close()


@pytest.fixture
def agent(node: Node) -> Iterator[AgentProcess]:
    made = AgentProcess(0, 2, 4096, "127.0.0.1")
    yield made
    made.close()


def test_an_agent_that_is_ready_takes_commands_and_reports(agent: AgentProcess, node: Node) -> None:
    child = node.newest
    assert (child.module, child.arguments[1:]) == ("baton.kvtransfer.transports.nixl.agent", ("0", "2", "4096"))
    assert child.options["pass_fds"] == (int(child.arguments[0]), 0)
    assert child.options["environment"]["NIXL_LOG_LEVEL"] == "WARN"
    assert (agent.ready, agent.is_alive, agent.is_starting, agent.may_start) == (READY, True, False, True)
    assert (agent.num_lives_ended, agent.num_crashes, agent.num_waiting_bytes) == (0, 0, 0)
    agent.send(Watch(True))
    assert child.channel.receive() == [Watch(True)]
    child.channel.send(PeerEnded(3, ""))
    assert agent.poll() == [PeerEnded(3, "")]
    assert len(agent.wait_on()) == 2


def test_commands_that_an_agent_does_not_take_wait_and_go_when_it_does(agent: AgentProcess, node: Node) -> None:
    for _ in range(20_000):
        agent.send(Watch(True))
    assert (waiting := agent.num_waiting_bytes) > 0
    assert node.newest.channel.receive()
    agent.poll()
    assert agent.num_waiting_bytes < waiting


def test_a_crash_is_counted_and_the_next_life_begins_in_the_background(
    agent: AgentProcess, node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    first = node.newest
    first.complain(b"no  more\nmemory")
    first.channel.send(PeerEnded(3, "the last word"))
    first.status = 1
    with caplog.at_level(logging.WARNING):
        assert agent.poll() == [PeerEnded(3, "the last word")]
    assert "exited with status 1: no more memory" in caplog.text
    assert (agent.num_lives_ended, agent.num_crashes, agent.is_alive, agent.ready) == (1, 1, False, None)
    assert first.calls[-1] == "end"
    assert (agent.wait_on(), agent.num_waiting_bytes, agent.is_starting) == ((), 0, False)
    agent.send(Watch(True))
    node.says = []
    assert agent.poll() == []
    assert (agent.is_alive, agent.is_starting, agent.ready) == (True, True, None)
    agent.send(Watch(True))
    assert node.newest.channel.receive() == [], "it is not known yet"
    node.newest.channel.send(READY)
    assert agent.poll() == [READY]
    assert (agent.ready, agent.is_starting) == (READY, False)


def test_an_agent_that_hangs_up_is_killed(agent: AgentProcess, node: Node) -> None:
    node.newest.ends_when_killed = False
    node.newest.channel.close()
    agent.poll()
    assert node.newest.calls == ["kill"]
    assert (agent.is_alive, agent.is_starting, agent.ready, agent.wait_on()) == (True, False, None, ())
    node.newest.status = -9
    agent.poll()
    assert (agent.is_alive, agent.num_lives_ended, agent.num_crashes) == (False, 1, 1)


def test_a_kill_is_no_crash_and_has_happened_when_the_process_was_reaped(agent: AgentProcess, node: Node) -> None:
    first = node.newest
    first.ends_when_killed = False
    agent.kill()
    assert first.calls == ["kill", "wait"]
    assert (agent.num_lives_ended, agent.is_alive, agent.is_starting) == (0, True, False)
    first.status = -9
    agent.kill()
    assert (agent.num_lives_ended, agent.num_crashes, agent.is_alive) == (1, 0, False)
    agent.poll()
    node.newest.status = -11
    agent.poll()
    assert (agent.num_lives_ended, agent.num_crashes) == (2, 1), "the next life's end is one again"


def test_a_closed_agent_does_not_start_again(agent: AgentProcess, node: Node) -> None:
    agent.close()
    node.now_s += 1000.0
    assert agent.poll() == []
    assert (len(node.children), agent.is_alive) == (1, False)


def test_an_agent_that_crashes_often_waits_for_a_minute(agent: AgentProcess, node: Node) -> None:
    for _ in range(5):
        assert agent.may_start
        agent.poll()
        node.newest.status = 1
        agent.poll()
        node.now_s += 1.0
    assert (agent.num_crashes, agent.may_start) == (5, False)
    node.now_s += 54.0
    agent.poll()
    assert (len(node.children), agent.is_alive) == (5, False)
    node.now_s += 2.0
    agent.poll()
    assert (len(node.children), agent.is_alive) == (6, True)


def test_a_system_without_room_for_a_process_is_asked_again_after_a_second(agent: AgentProcess, node: Node) -> None:
    agent.kill()
    node.error = OSError(12, "Cannot allocate memory")
    agent.poll()
    tries = node.num_tries
    node.now_s += 0.9
    agent.poll()
    assert node.num_tries == tries
    node.now_s += 0.2
    agent.poll()
    assert (node.num_tries, agent.is_alive) == (tries + 1, False)
    node.error = None
    node.now_s += 1.1
    agent.poll()
    assert agent.is_alive


def test_one_that_ends_before_it_is_ready_is_told_with_its_last_words(node: Node) -> None:
    node.says, node.complaint, node.status = [], b"x" * 5000 + b" the device\n is busy", 1
    with pytest.raises(InvalidSetting, match=r"its agent did not start: x{581} the device is busy$"):
        AgentProcess(0, 2, 4096, "127.0.0.1")


def test_one_that_says_nothing_is_given_up_after_half_a_minute(node: Node) -> None:
    node.says = []
    with pytest.raises(InvalidSetting, match="its agent did not start: no answer"):
        AgentProcess(0, 2, 4096, "127.0.0.1")
    assert node.now_s == pytest.approx(1030.0, abs=0.2)
    assert node.newest.calls == ["kill", "wait", "end"]


def test_one_that_cannot_be_started_at_first_is_tried_until_then_and_told_why(node: Node) -> None:
    node.error = OSError(24, "Too many open files")
    with pytest.raises(InvalidSetting, match="Too many open files"):
        AgentProcess(0, 2, 4096, "127.0.0.1")
    assert 25 < node.num_tries < 31
