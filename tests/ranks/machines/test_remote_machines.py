"""A driver and the machines of its ranks: real sockets and processes, ranks without an engine."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from baton.engine.settings import EngineSettings
from baton.launch.key import write_role_keys
from baton.node.settings import NodeSettings
from baton.ranks import opening
from baton.ranks.executor.messages import Channel, Compute, Failed, Here, Meet, Stop
from baton.ranks.executor.spread import Machine
from baton.ranks.executor.starting import LocalRanks, RankFailed, StartedRank
from baton.ranks.machines import rank_host, remote_machines
from baton.ranks.machines.link import TO_DRIVER, Beat, Offer
from baton.ranks.machines.rank_host import RankHost
from baton.ranks.machines.rank_host import Stop as StopAsked
from baton.ranks.machines.remote_machines import RankMachines
from baton.ranks.opening import open_ranks
from baton.runtime.channel import ChannelBroken
from baton.wire.errors import InvalidSetting
from baton.wire.keys import KeyRing, own_role
from baton.wire.links import LinkSettings, open_socket

END_S = 30.0
"""Longer than anything takes on a busy machine."""
_SETTINGS = EngineSettings(pipeline_parallel_size=2, rank_machines=2)
_HOST = "127.0.0.1"


class Deployment:
    """Drivers and machines that end with the test."""

    def __init__(self, opened: ExitStack) -> None:
        self._opened = opened
        self._machines: list[tuple[StopAsked, threading.Thread]] = []

    def driver(self, port: int = 0, settings: LinkSettings | None = None) -> RankMachines:
        """One that waits for one more machine."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._opened.callback(context.destroy, linger=0)
        driver = RankMachines(2, LocalRanks(), context, settings or LinkSettings(), _HOST, port)
        self._opened.callback(driver.close)
        return driver

    def machine(self, address: str, settings: LinkSettings | None = None, host: str = "127.0.0.2") -> StopAsked:
        """One that dials there."""
        stop = StopAsked()
        thread = threading.Thread(target=self._run, args=(address, settings or LinkSettings(), host, stop))
        thread.start()
        self._machines.append((stop, thread))
        return stop

    @staticmethod
    def _run(address: str, settings: LinkSettings, host: str, stop: StopAsked) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        RankHost(Offer(host, "there", 6, False), "", address, context, settings).run(stop)
        context.destroy(linger=0)

    def close(self) -> None:
        """Stop all machines, and wait for them."""
        for stop, _ in self._machines:
            stop.is_asked = True
        for _, thread in self._machines:
            thread.join(END_S)
            assert not thread.is_alive()


@pytest.fixture
def deployment(monkeypatch: pytest.MonkeyPatch) -> Iterator[Deployment]:
    monkeypatch.setattr(rank_host, "_RANK_MODULE", "tests.ranks.machines.echo_rank")
    with ExitStack() as opened:
        made = Deployment(opened)
        opened.callback(made.close)
        yield made


def children() -> list[psutil.Process]:
    found = []
    for each in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended, and nobody has taken note yet
            if "tests.ranks.machines.echo_rank" in each.cmdline():
                found.append(each)
    return found


def until(condition: Callable[[], Any], within_s: float = END_S) -> None:
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def started(driver: RankMachines) -> tuple[StartedRank, Channel]:
    """Its rank on the other machine, which has said that it is here."""
    (rank,) = driver.start(_SETTINGS)
    channel = Channel(rank.end_of_orders, "rank 1")
    channel.send(Meet(), END_S)
    assert channel.receive(2 * END_S) == Here()
    return rank, channel


def test_a_rank_elsewhere_is_a_channel_two_lines_and_an_end(deployment: Deployment) -> None:
    driver = deployment.driver()
    deployment.machine(driver.address)
    rank, channel = started(driver)
    assert rank.machine == Machine(1, "127.0.0.2", "there", 6, False)
    (receiving, sending), theirs = rank.transfer_ends()
    assert theirs == ()
    # an order larger than a message of the link, and bytes by the lines
    channel.send(Compute((), b"0" * 1_000_000, (), b""), END_S)
    receiving.sendall(b"x" * 1000)
    sending.settimeout(END_S)
    assert sending.recv(1000) == b"x" * 1000
    assert channel.receive(END_S) == Failed("1000000 bytes", False)
    (child,) = children()
    child.suspend()
    until(lambda: rank.standing == "is stopped")
    child.resume()
    until(lambda: not rank.standing)
    child.kill()
    with pytest.raises(ChannelBroken, match="rank 1 is gone"):
        channel.receive(END_S)
    assert rank.wait(END_S) == "was killed by SIGKILL"
    for end in (receiving, sending):
        end.close()
    channel.close()


def test_a_driver_that_ends_ends_its_ranks_and_the_next_one_finds_the_machine(deployment: Deployment) -> None:
    first = deployment.driver()
    deployment.machine(first.address)
    rank, channel = started(first)
    port = int(first.address.rpartition(":")[2])
    first.close()
    until(lambda: not children())
    channel.close()
    second = deployment.driver(port)
    assert second.epoch != first.epoch
    rank, channel = started(second)
    assert (rank.machine.host, len(children())) == ("127.0.0.2", 1)
    channel.send(Stop(), END_S)
    # one that takes its time is killed
    assert rank.wait(END_S) in ("exited with status 0", "was killed by SIGKILL")
    channel.close()


def test_a_machine_whose_connection_breaks_is_lost_at_once_and_a_silent_one_in_time(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offered(driver: RankMachines) -> tuple[Any, StartedRank, Channel]:
        """A machine that takes its rank, and does nothing."""
        link = open_socket(context, zmq.DEALER, LinkSettings())
        link.connect(driver.address)
        link.send(TO_DRIVER.encode(Offer("127.0.0.2", "there", 1, False)))
        (rank,) = driver.start(_SETTINGS)
        return link, rank, Channel(rank.end_of_orders, "rank 1")

    with zmq.Context() as context:
        link, rank, channel = offered(deployment.driver())
        link.close()
        assert rank.wait(END_S) == "is gone: its `baton rank` has ended, or the connection broke"
        channel.close()
        monkeypatch.setattr(remote_machines, "SILENCE_S", 0.3)
        driver = deployment.driver()
        link, rank, channel = offered(driver)
        # what belongs to another life of the driver changes nothing but that it lives
        link.send(TO_DRIVER.encode(Beat(driver.epoch ^ 1, (1,))))
        assert "has not been heard for 0.3 s" in rank.wait(END_S)
        assert not rank.standing
        with pytest.raises(ChannelBroken, match="rank 1 is gone"):
            channel.receive(END_S)
        link.close()
        channel.close()


def test_ranks_end_when_their_driver_falls_silent(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = deployment.driver()
    deployment.machine(driver.address)
    _, channel = started(driver)
    monkeypatch.setattr(rank_host, "SILENCE_S", 0.3)
    monkeypatch.setattr(driver, "_look_around", lambda now_s: None)
    until(lambda: not children())
    channel.close()


def test_a_node_whose_machines_do_not_come_says_which_ranks_are_missing(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_machines, "MACHINES_TIMEOUT_S", 0.2)
    driver = deployment.driver()
    reason = rf"^ranks 2 to 3 have no machine: 0 of 1 dialled {driver.address} within 0\.2 s \(none\)$"
    with pytest.raises(RankFailed, match=reason):
        driver.start(EngineSettings(tensor_parallel_size=2, pipeline_parallel_size=2, rank_machines=2))


def places_of(**settings: str) -> NodeSettings:
    return NodeSettings(pipeline_parallel_size=2, rank_machines=2, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("transport", "reason"),
    [
        ("shm", "the ranks are on 2 machines, which share no memory"),
        ("nccl", "ranks with pools of their own have auto, shm, zmq, nixl"),
    ],
)
def test_a_transport_that_ranks_do_not_have_is_refused_before_machines_are_waited_for(
    transport: str, reason: str
) -> None:
    with ExitStack() as opened, pytest.raises(InvalidSetting, match=f"^--kv-transport {transport}: {reason}$"):
        open_ranks(places_of(kv_transport=transport), "decode", None, opened.callback)


def test_a_machine_needs_a_key_of_the_role_of_its_node(
    deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path = tmp_path / "keys"
    write_role_keys(tmp_path)
    key = KeyRing(tmp_path / "decode.key", "decode").towards("decode")
    places = places_of(host=_HOST)
    with ExitStack() as opened:
        driver = open_ranks(places, "decode", key, opened.callback)
        assert isinstance(driver, RankMachines)
        role = own_role(tmp_path / "prefill.key")
        deployment.machine(driver.address, LinkSettings(KeyRing(tmp_path / "prefill.key", role).towards("decode")))
        monkeypatch.setattr(remote_machines, "MACHINES_TIMEOUT_S", 0.5)
        with pytest.raises(RankFailed, match="0 of 1 dialled"):
            driver.start(_SETTINGS)
        monkeypatch.setattr(remote_machines, "MACHINES_TIMEOUT_S", END_S)
        deployment.machine(driver.address, LinkSettings(KeyRing(tmp_path / "decode.key", "decode").towards("decode")))
        _, channel = started(driver)
        channel.close()


def test_no_machine_is_waited_for_beyond_loopback_without_a_key() -> None:
    places = places_of(host="0.0.0.0")
    with ExitStack() as opened, pytest.raises(InvalidSetting, match="--cluster-key"):
        opening.open_ranks(places, "decode", None, opened.callback)


def test_a_machine_that_is_asked_to_stop_waits_for_its_driver(deployment: Deployment) -> None:
    driver = deployment.driver()
    stop = deployment.machine(driver.address)
    _, channel = started(driver)
    stop.by_s, stop.is_asked = time.monotonic() + 60.0, True
    time.sleep(0.1)
    (child,) = children()
    os.kill(child.pid, signal.SIGCONT)  # it runs
    stop.by_s = 0.0
    until(lambda: not children())
    channel.close()
