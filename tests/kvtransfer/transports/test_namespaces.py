"""Two machines, as far as the network is concerned: two network namespaces joined by a virtual cable.

Each end has its own address, so it listens beyond loopback and needs a cluster key. Making namespaces takes rights that
not every machine gives: there these tests are skipped.
"""

from __future__ import annotations

import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import zmq

from baton.testing.transports.end_process import Spec
from baton.testing.transports.rig import EndFailed, Rig, Starter, Starters, open_rig
from tests.kvtransfer.transports.own_transports import place_of

_BLOCK_BYTES = 2**18
_NUM_TARGETS, _NUM_SOURCES = 260, 256
_RECEIVER_IP, _SENDER_IP = "10.86.0.1", "10.86.0.2"
_PUSH_S = 0.7
"""What 64 MiB take on this cable at least."""
_STANDSTILL_S = 0.8
"""After this long without progress a sender is given up here; a node waits longer (`pusher.STANDSTILL_S`)."""


def ip(*arguments: str) -> None:
    """Run `ip`. Raises `CalledProcessError`."""
    subprocess.run(["ip", *arguments], check=True, timeout=20, capture_output=True)


@dataclass(frozen=True, slots=True)
class Cable:
    """Two namespaces and the pair of interfaces between them."""

    receiver: str
    sender: str

    @property
    def prefixes(self) -> tuple[Sequence[str], Sequence[str]]:
        return ("ip", "netns", "exec", self.receiver), ("ip", "netns", "exec", self.sender)

    def lay(self) -> None:
        ip("link", "add", f"{self.receiver}v", "netns", self.receiver, "type", "veth", "peer", f"{self.sender}v")
        ip("link", "set", f"{self.sender}v", "netns", self.sender)
        for name, address in ((self.receiver, _RECEIVER_IP), (self.sender, _SENDER_IP)):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", f"{name}v")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", f"{name}v", "up")
        # 100 MB/s: slow enough to cut a push in the middle
        limit = ["tbf", "rate", "800mbit", "burst", "1mb", "latency", "50ms"]
        ip("netns", "exec", self.sender, "tc", "qdisc", "add", "dev", f"{self.sender}v", "root", *limit)

    def cut(self) -> None:
        ip("-n", self.receiver, "link", "set", f"{self.receiver}v", "down")

    def restore(self) -> None:
        ip("-n", self.receiver, "link", "set", f"{self.receiver}v", "up")


@pytest.fixture(scope="module")
def cable() -> Iterator[Cable]:
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("there is no iproute2 on this machine")
    # 13 characters and a "v" are the most an interface's name can have
    cable = Cable(*(f"bt{secrets.token_hex(5)}" for _ in range(2)))
    with ExitStack() as stack:
        for name in (cable.receiver, cable.sender):
            stack.callback(subprocess.run, ["ip", "netns", "del", name], timeout=20, capture_output=True)
            try:
                ip("netns", "add", name)
                ip("netns", "exec", name, "true")
            except subprocess.CalledProcessError as error:
                pytest.skip(f"this machine does not allow network namespaces: {error.stderr.decode().strip()}")
        cable.lay()
        yield cable


@pytest.fixture(scope="module")
def starters(cable: Cable) -> Iterator[Starters]:
    """A process in each namespace."""
    receivers, senders = cable.prefixes
    with Starter(receivers) as starts_receivers, Starter(senders) as starts_senders:
        yield starts_receivers, starts_senders


@pytest.fixture(scope="module", params=["ZMQ", "NCCL", *(["NIXL"] if find_spec("nixl") else [])])
def connected(
    request: pytest.FixtureRequest, starters: Starters, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Rig]:
    key_file: Path = tmp_path_factory.mktemp("key") / "cluster.key"
    key_file.write_bytes(zmq.curve_keypair()[1])
    spec = Spec(place_of(request.param), _NUM_TARGETS, _BLOCK_BYTES, _RECEIVER_IP, str(key_file))
    with open_rig(spec, _NUM_SOURCES, starters, sender_host=_SENDER_IP) as rig:
        yield rig


@pytest.fixture
def rig(connected: Rig, cable: Cable) -> Iterator[Rig]:
    connected.reset()
    yield connected
    cable.restore()


def test_bytes_arrive_exactly_between_two_addresses(rig: Rig) -> None:
    assert _RECEIVER_IP in str(rig.hello["endpoint"]) or rig.hello["endpoint"][0] == "nixl"
    sources, targets = [3, 4, 5, 9, 255], [11, 12, 2, 259, 0]
    number = rig.expect(targets)
    rig.push(number, sources, targets)
    rig.until_delivered(number, 5)
    assert rig.has(dict(zip(targets, sources, strict=True)))


def _settled(rig: Rig, number: int) -> tuple[list[int], set[int]]:
    """The blocks that have arrived, and those that are not as they should be then: nothing arrived in between."""
    while True:
        arrived = sorted(rig.arrived(number))
        wrong = set(rig.differences({index: index for index in arrived}))
        if arrived == sorted(rig.arrived(number)):
            return arrived, wrong


def cut_in_mid_push(rig: Rig, cable: Cable) -> int:
    """Cut the link while everything is pushed. The number of that push: one that a busy machine has let end before is
    repeated."""
    for _ in range(10):
        number = rig.expect(range(_NUM_SOURCES))
        rig.push(number, range(_NUM_SOURCES), range(_NUM_SOURCES))
        time.sleep(_PUSH_S / 4)
        cable.cut()
        if len(rig.arrived(number)) < _NUM_SOURCES:
            return number
        cable.restore()
        rig.receiver.do("forget", number=number)
        rig.receiver.do("reset")
    raise AssertionError("every push was over before the link was cut")


@pytest.mark.parametrize("cut_s", [0.4, _STANDSTILL_S + 0.5], ids=["a blip", "an outage"])
def test_a_link_cut_in_mid_push_costs_time_and_no_byte(rig: Rig, cable: Cable, cut_s: float) -> None:
    number = cut_in_mid_push(rig, cable)
    time.sleep(cut_s)
    cable.restore()
    if not delivered(rig, number):
        rig.sender.do("close")
        rig.until(lambda: not rig.sender.do("status", number=number)["is_reading"], "nothing is read", 10.0)
    arrived, wrong = _settled(rig, number)
    # what was in flight may be there in part, and only in blocks that were granted and not reported
    assert not wrong & {*arrived, *range(_NUM_SOURCES, _NUM_TARGETS)}
    assert rig.hello["peers_write"] or not wrong
    # the next one goes through, by a new sender where the old one failed
    rig.receiver.do("forget", number=number)
    rig.receiver.do("fence")
    rig.receiver.do("reset")
    rig.connect()
    number = rig.expect(range(64))
    rig.push(number, range(64), range(64))
    rig.until_delivered(number, 64)
    assert rig.has({index: index for index in range(64)})


def delivered(rig: Rig, number: int) -> bool:
    """Whether everything comes, as long as there is progress."""
    try:
        rig.until_sent(number, _STANDSTILL_S)
        rig.until(lambda: len(rig.arrived(number)) == _NUM_SOURCES, "all blocks", _STANDSTILL_S)
    except (EndFailed, TimeoutError):
        return False
    return True
