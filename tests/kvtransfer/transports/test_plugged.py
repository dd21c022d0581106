"""The transport of an installed package: when it is offered and taken, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from baton.kvtransfer.messages import RANK_ENDPOINTS, Endpoint, RankEndpoint, RankEndpoints
from baton.kvtransfer.pools.host import HostPool
from baton.kvtransfer.process_identity import this_process
from baton.kvtransfer.transports.registry import (
    PoolMemory,
    SenderFactory,
    TransportSettings,
    load_plugged,
    open_receivers,
)
from baton.runtime.plugins import KV_TRANSPORTS
from baton.wire.errors import InvalidSetting, Refused
from baton.wire.kv_shard import KvDivision
from baton.wire.links import LinkSettings
from tests.installed_package import install
from tests.kvtransfer.transports.test_registry import hello_of

GRANITE = """
from dataclasses import replace
from baton.kvtransfer.transports.tcp_zmq import ZmqReceiver, ZmqSender
from baton.wire.errors import TransferFailed

class Receiver(ZmqReceiver):
    @property
    def endpoint(self):
        return replace(super().endpoint, transport="granite")

def open_receiver(site):
    return Receiver(site.context, site.host, site.pool, site.links, site.port)

def open_sender(site, endpoint, num_blocks):
    if endpoint.details:
        raise TransferFailed("nobody is there")
    return ZmqSender(site.context, endpoint, site.pool, site.links)
"""
OTHER_NAME = f"""{GRANITE}
def open_receiver(site):
    return ZmqReceiver(site.context, site.host, site.pool, site.links, site.port)
"""
NO_RECEIVER = f"""{GRANITE}
def open_receiver(site):
    return site
"""
GRANITE_ENDPOINT, ZMQ_ENDPOINT = (Endpoint(name, "tcp://127.0.0.1:9") for name in ("granite", "zmq"))

Context = zmq.Context[zmq.Socket[bytes]]


@pytest.fixture
def granite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some package has it."""
    install_granite(tmp_path, monkeypatch)


def install_granite(folder: Path, patch: pytest.MonkeyPatch, code: str = GRANITE) -> None:
    install(folder, patch, code, {KV_TRANSPORTS: "granite = "})


@contextmanager
def opened(context: Context, choice: str) -> Iterator[tuple[TransportSettings, PoolMemory, HostPool]]:
    plugged = load_plugged(choice)
    settings = TransportSettings(choice, context, "127.0.0.1", LinkSettings(), this_process(), plugged=plugged)
    memory = PoolMemory(settings, "receiver")
    try:
        yield settings, memory, HostPool(memory.allocate(8 * 4096).reshape(8, 4096))
    finally:
        memory.close()


def taken(context: Context, choice: str, *endpoints: Endpoint) -> str:
    """By which of the endpoints a node with this choice sends."""
    with opened(context, choice) as (settings, memory, pool):
        factory = SenderFactory(settings, memory, pool)
        name, sender = factory.open(hello_of(*endpoints))
        sender.close()
        factory.close()
    return name


@pytest.mark.usefixtures("granite")
def test_it_is_offered_first_and_others_to_those_who_lack_it(context: Context) -> None:
    with opened(context, "granite") as (settings, memory, pool):
        receivers = open_receivers(settings, memory, pool)
        assert [each.endpoint.transport for each in receivers] == ["granite", "shm", "shm_slots", "zmq"]
        for receiver in receivers:
            receiver.close()


@pytest.mark.usefixtures("granite")
def test_it_is_taken_where_both_have_it_and_else_the_next_in_common(context: Context) -> None:
    assert taken(context, "granite", GRANITE_ENDPOINT, ZMQ_ENDPOINT) == "granite"
    assert taken(context, "granite", ZMQ_ENDPOINT) == "zmq"
    fails = Endpoint("granite", "tcp://127.0.0.1:9", b"somewhere else")
    assert taken(context, "granite", fails, ZMQ_ENDPOINT) == "zmq"


def test_a_peer_that_offers_it_does_not_make_a_node_import_it(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_granite(tmp_path, monkeypatch, "raise SystemExit('imported')")
    assert taken(context, "auto", GRANITE_ENDPOINT, ZMQ_ENDPOINT) == "zmq"
    with pytest.raises(Refused, match="granite: this node takes shm or shm_slots or zmq"):
        taken(context, "shm", GRANITE_ENDPOINT)


@pytest.mark.usefixtures("granite")
@pytest.mark.parametrize("name", ["granite", "shm"])
def test_a_peer_that_says_its_ranks_have_it_is_refused(context: Context, name: str) -> None:
    ranks = RANK_ENDPOINTS.encode(RankEndpoints(KvDivision(), (RankEndpoint("tcp://127.0.0.1:9", b""),)))
    with pytest.raises(Refused, match=f"ranks have no transport '{name}'"):
        taken(context, "granite", Endpoint(name, "", ranks))


def test_a_name_of_batons_own_is_never_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "raise SystemExit('imported')", {KV_TRANSPORTS: "zmq = "})
    assert load_plugged("zmq") is None


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("", "is no Transport: it has no open_receiver, open_sender"),
        (NO_RECEIVER, "is no Receiver: it has no close, endpoint, .*, write_proof"),
        (OTHER_NAME, "offers an endpoint of 'zmq'"),
        ("open_sender = None\ndef open_receiver(site):\n    site.port['a']", "cannot be used: TypeError: 'int' object"),
    ],
)
def test_what_is_no_transport_is_refused_when_the_node_starts(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, reason: str
) -> None:
    install_granite(tmp_path, monkeypatch, code)
    with (
        pytest.raises(InvalidSetting, match=f"^--kv-transport granite of the package acme {reason}") as caught,
        opened(context, "granite") as (settings, memory, pool),
    ):
        open_receivers(settings, memory, pool)
    assert "\n" not in str(caught.value)
