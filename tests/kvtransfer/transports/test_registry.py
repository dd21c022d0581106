from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import zmq

from baton.kvtransfer.messages import Endpoint, PeerHello
from baton.kvtransfer.pools.device import DevicePool
from baton.kvtransfer.pools.host import HostPool
from baton.kvtransfer.process_identity import this_process
from baton.kvtransfer.transports import registry
from baton.kvtransfer.transports.base import Blocks
from baton.kvtransfer.transports.nixl import thread
from baton.kvtransfer.transports.registry import (
    SENDER,
    PoolMemory,
    SenderFactory,
    TransportSettings,
    open_receivers,
    pulling_settings,
)
from baton.kvtransfer.transports.shm import segment
from baton.kvtransfer.transports.shm.direct import ShmSender
from baton.wire.errors import InvalidSetting, Refused
from baton.wire.links import LinkSettings
from tests.kvtransfer.pools import LAYOUT

_NUM_BLOCKS, _BLOCK_BYTES = 8, 4096
ZMQ_ENDPOINT = Endpoint("zmq", "tcp://127.0.0.1:9")


_SHARED = ["shm", "shm_slots", "zmq"]


def hello_of(*endpoints: Endpoint) -> PeerHello:
    """The greeting of a decode node that runs here."""
    return PeerHello(
        node_id="D",
        epoch=1,
        sender_epoch=2,
        fingerprint="model",
        layout=LAYOUT,
        num_blocks=_NUM_BLOCKS,
        checksum="none",
        process=this_process(),
        endpoints=endpoints,
    )


def offered(context: zmq.Context[zmq.Socket[bytes]], choice: str) -> list[str]:
    return [endpoint.transport for endpoint in endpoints(context, choice)]


def endpoints(context: zmq.Context[zmq.Socket[bytes]], choice: str, port: int = 0) -> list[Endpoint]:
    settings = TransportSettings(choice, context, "127.0.0.1", LinkSettings(), this_process(), port)
    memory = PoolMemory(settings, "receiver")
    blocks = memory.allocate(_NUM_BLOCKS * _BLOCK_BYTES).reshape(_NUM_BLOCKS, _BLOCK_BYTES)
    receivers = open_receivers(settings, memory, HostPool(blocks))
    try:
        return [receiver.endpoint for receiver in receivers]
    finally:
        for receiver in receivers:
            receiver.close()
        memory.close()


@pytest.mark.parametrize(("choice", "names"), [("auto", _SHARED), ("shm", _SHARED), ("zmq", ["zmq"])])
def test_a_choice_offers_its_transports_in_order_of_preference(
    context: zmq.Context[zmq.Socket[bytes]], choice: str, names: list[str]
) -> None:
    assert offered(context, choice) == names


@pytest.mark.parametrize("choice", ["auto", "zmq"])
def test_a_receiver_listens_on_the_port_that_was_chosen(context: zmq.Context[zmq.Socket[bytes]], choice: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert endpoints(context, choice, port)[-1].address == f"tcp://127.0.0.1:{port}"


@pytest.mark.parametrize("choice", ["auto", "shm"])
def test_without_room_for_a_segment_zmq_takes_over_with_one_line(
    context: zmq.Context[zmq.Socket[bytes]],
    choice: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(segment, "FOLDER", tmp_path / "no such folder")
    assert offered(context, choice) == ["zmq"]
    (record,) = caplog.records
    assert "handoffs use zmq" in record.getMessage()


def test_nixl_cannot_do_without_a_segment(
    context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(segment, "FOLDER", tmp_path / "no such folder")
    with pytest.raises(InvalidSetting, match=r"--kv-transport nixl: no shared memory .*--kv-cache-mem.* --shm-size"):
        offered(context, "nixl")


@pytest.mark.parametrize("role", ["receiver", "sender"])
def test_a_missing_library_is_answered_with_what_to_install(
    context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    settings = TransportSettings("nixl", context, "127.0.0.1", LinkSettings(), this_process())
    memory = PoolMemory(settings, role)
    blocks = memory.allocate(_NUM_BLOCKS * _BLOCK_BYTES).reshape(_NUM_BLOCKS, _BLOCK_BYTES)
    build: Callable[..., object] = SenderFactory if role == "sender" else open_receivers
    try:
        with pytest.raises(InvalidSetting, match=r"pip install 'baton-serve\[nixl\]'"):
            build(settings, memory, HostPool(blocks))
    finally:
        memory.close()


def killed_segment() -> Path:
    """What a node leaves that was killed: a file without the lock that a living owner holds."""
    killed = segment.FOLDER / f"baton-{secrets.token_hex(16)}"
    killed.touch(0o600)
    return killed


def test_the_last_node_to_end_removes_the_segments_of_those_that_were_killed(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    settings = TransportSettings("shm", context, "127.0.0.1", LinkSettings(), this_process())
    memory = PoolMemory(settings, "receiver")
    memory.allocate(_BLOCK_BYTES)
    killed = killed_segment()
    memory.close()
    assert not killed.exists()


def test_a_node_that_starts_removes_the_segments_of_those_that_were_killed(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    settings = TransportSettings("shm", context, "127.0.0.1", LinkSettings(), this_process())
    memory, killed = PoolMemory(settings, "receiver"), killed_segment()
    blocks = memory.allocate(_BLOCK_BYTES).reshape(1, _BLOCK_BYTES)
    found = [killed.exists()]
    killed = killed_segment()
    receivers = open_receivers(settings, memory, HostPool(blocks))
    found.append(killed.exists())
    for receiver in receivers:
        receiver.close()
    memory.close()
    assert found == [False, False]


def test_only_nixl_senders_need_a_segment(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    for choice, needs_segment in (("auto", False), ("shm", False), ("zmq", False), ("nccl", False), ("nixl", True)):
        settings = TransportSettings(choice, context, "127.0.0.1", LinkSettings(), this_process())
        memory = PoolMemory(settings, "sender")
        memory.allocate(_BLOCK_BYTES)
        assert (memory.segment is not None) == needs_segment
        memory.close()


@pytest.mark.parametrize("role", ["receiver", "sender"])
def test_memory_that_nobody_shares_is_allocated_as_the_node_does_it(
    context: zmq.Context[zmq.Socket[bytes]], role: str
) -> None:
    asked: list[int] = []

    def allocate(num_bytes: int) -> Blocks:
        asked.append(num_bytes)
        return np.zeros(num_bytes, dtype=np.uint8)

    settings = TransportSettings("zmq", context, "127.0.0.1", LinkSettings(), this_process())
    assert PoolMemory(settings, role, allocate).allocate(_BLOCK_BYTES).size == _BLOCK_BYTES
    assert asked == [_BLOCK_BYTES]


@pytest.mark.parametrize("role", ["receiver", "sender"])
def test_memory_that_ranks_share_is_a_segment_whatever_the_transport_is(
    context: zmq.Context[zmq.Socket[bytes]], role: str
) -> None:
    settings = TransportSettings("zmq", context, "127.0.0.1", LinkSettings(), this_process())
    memory = PoolMemory(settings, role, is_shared=True)
    array = memory.allocate(_BLOCK_BYTES)
    assert memory.segment is not None
    assert os.fstat(memory.segment.descriptor).st_size == array.size == _BLOCK_BYTES
    memory.close()
    with pytest.raises(InvalidSetting, match=r"a node of several ranks: no shared memory .* which its ranks share"):
        PoolMemory(settings, role, is_shared=True).allocate(2**60)


class Agent:
    """Stands for nixl's agent on a thread."""

    ready = None
    num_lives_ended = 0
    is_alive = False

    def poll(self) -> list[object]:
        return []

    def close(self) -> None:
        """Nothing was opened."""


@pytest.fixture
def with_nixl(monkeypatch: pytest.MonkeyPatch) -> Callable[[InvalidSetting | None], None]:
    """Stands for an installed nixl. `error`: it does not work for pools on this device."""

    def install(error: InvalidSetting | None) -> None:
        def open_agent(pool: torch.Tensor, host: str) -> Agent:
            assert (pool.shape, host) == ((_NUM_BLOCKS, _BLOCK_BYTES), "127.0.0.1")
            if error is not None:
                raise error
            return Agent()

        monkeypatch.setattr(registry, "find_spec", lambda name: object())
        monkeypatch.setattr(thread, "AgentThread", open_agent)

    return install


@contextmanager
def device_node(context: zmq.Context[zmq.Socket[bytes]], choice: str) -> Iterator[tuple[list[str], tuple[str, ...]]]:
    """(what it offers, what it takes)."""
    settings = TransportSettings(choice, context, "127.0.0.1", LinkSettings(), this_process())
    pool = DevicePool(torch.zeros((_NUM_BLOCKS, _BLOCK_BYTES), dtype=torch.uint8))
    receivers = open_receivers(settings, PoolMemory(settings, "receiver"), pool)
    factory = SenderFactory(settings, PoolMemory(settings, "sender"), pool)
    try:
        yield [receiver.endpoint.transport for receiver in receivers], factory._taken
    finally:
        factory.close()
        for receiver in receivers:
            receiver.close()


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("auto", ["nixl", "shm_slots", "zmq"]),
        ("shm", ["shm_slots", "zmq"]),
        ("zmq", ["zmq"]),
        ("nixl", ["nixl"]),
        ("nccl", ["nccl"]),
    ],
)
def test_pools_on_a_device_have_their_own_order_of_preference(
    context: zmq.Context[zmq.Socket[bytes]],
    with_nixl: Callable[[InvalidSetting | None], None],
    choice: str,
    names: list[str],
) -> None:
    with_nixl(None)
    with device_node(context, choice) as (offered_names, taken):
        assert offered_names == list(taken) == names


def test_auto_goes_on_without_a_nixl_that_is_not_installed(
    context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    with device_node(context, "auto") as (offered_names, taken):
        assert offered_names == list(taken) == ["shm_slots", "zmq"]
    assert caplog.records == [], "what nobody asked for is not missed"


def test_auto_goes_on_without_a_nixl_that_does_not_work_with_one_line(
    context: zmq.Context[zmq.Socket[bytes]],
    with_nixl: Callable[[InvalidSetting | None], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with_nixl(InvalidSetting("this GPU's memory cannot be registered"))
    with device_node(context, "auto") as (offered_names, taken):
        assert offered_names == list(taken) == ["shm_slots", "zmq"]
    assert [record.getMessage() for record in caplog.records] == [
        "nixl cannot be used and is left out: this GPU's memory cannot be registered"
    ] * 2, "one line for each side"


@pytest.mark.parametrize("role", ["receiver", "sender"])
def test_a_nixl_that_was_asked_for_and_does_not_work_is_an_error(
    context: zmq.Context[zmq.Socket[bytes]], with_nixl: Callable[[InvalidSetting | None], None], role: str
) -> None:
    with_nixl(InvalidSetting("this GPU's memory cannot be registered"))
    settings = TransportSettings("nixl", context, "127.0.0.1", LinkSettings(), this_process())
    pool = DevicePool(torch.zeros((_NUM_BLOCKS, _BLOCK_BYTES), dtype=torch.uint8))
    build: Callable[..., object] = SenderFactory if role == "sender" else open_receivers
    with pytest.raises(InvalidSetting, match="cannot be registered"):
        build(settings, PoolMemory(settings, role), pool)


@pytest.mark.parametrize("build", [SenderFactory, open_receivers])
def test_in_host_memory_where_gloo_would_carry_it_nccl_is_refused(
    context: zmq.Context[zmq.Socket[bytes]], build: Callable[..., object]
) -> None:
    settings = TransportSettings("nccl", context, "127.0.0.1", LinkSettings(), this_process())
    pool = HostPool(np.zeros((_NUM_BLOCKS, _BLOCK_BYTES), dtype=np.uint8))
    with pytest.raises(InvalidSetting, match="--kv-transport nccl: it is for KV on GPUs"):
        build(settings, PoolMemory(settings, "receiver"), pool)


def test_slots_are_not_taken_from_another_host(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    here = TransportSettings("shm", context, "127.0.0.1", LinkSettings(), this_process())
    pool = DevicePool(torch.zeros((_NUM_BLOCKS, _BLOCK_BYTES), dtype=torch.uint8))
    factory = SenderFactory(here, PoolMemory(here, "sender"), pool)
    endpoints = (Endpoint("shm", "baton-" + "0" * 32), Endpoint("shm_slots", "tcp://127.0.0.1:9"))
    hello = replace(hello_of(*endpoints), process=replace(this_process(), host="elsewhere"))
    reason = "shm: this node takes shm_slots or zmq; shm_slots: the nodes do not share memory"
    with pytest.raises(Refused, match=reason):
        factory.open(hello)
    transport, sender = factory.open(replace(hello, endpoints=(*endpoints, ZMQ_ENDPOINT)))
    sender.close()
    assert transport == "zmq"


@pytest.mark.parametrize("num_sockets", [1, 2])
def test_without_room_for_another_socket_a_peer_is_refused(num_sockets: int) -> None:
    """Of the three that a watched connection has."""
    with zmq.Context() as context:
        context.max_sockets = num_sockets
        settings = TransportSettings("zmq", context, "127.0.0.1", LinkSettings(), this_process())
        pool = HostPool(np.zeros((_NUM_BLOCKS, _BLOCK_BYTES), dtype=np.uint8))
        with pytest.raises(Refused, match="zmq: no socket for another node: Too many open files"):
            SenderFactory(settings, PoolMemory(settings, "sender"), pool).open(hello_of(ZMQ_ENDPOINT))


def test_what_the_system_refuses_a_transport_is_no_failure_of_the_node(
    context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(ShmSender, "__init__", refuse)
    settings = TransportSettings("shm", context, "127.0.0.1", LinkSettings(), this_process())
    pool = HostPool(np.zeros((_NUM_BLOCKS, _BLOCK_BYTES), dtype=np.uint8))
    factory = SenderFactory(settings, PoolMemory(settings, "sender"), pool)
    shm = Endpoint("shm", "baton-" + "0" * 32)
    with pytest.raises(Refused, match=r"shm: .*Too many open files"):
        factory.open(hello_of(shm))
    transport, sender = factory.open(hello_of(shm, ZMQ_ENDPOINT))
    sender.close()
    assert transport == "zmq"


def test_a_pool_that_peers_only_read_is_not_offered_to_them_though_its_ranks_share_it(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    settings = TransportSettings("shm", context, "127.0.0.1", LinkSettings(), this_process())
    memory = PoolMemory(settings, SENDER, is_shared=True)
    blocks = memory.allocate(_NUM_BLOCKS * _BLOCK_BYTES).reshape(_NUM_BLOCKS, _BLOCK_BYTES)
    assert memory.segment is not None
    receivers = open_receivers(settings, memory, HostPool(blocks))
    try:
        assert [receiver.endpoint.transport for receiver in receivers] == ["shm_slots", "zmq"]
    finally:
        for receiver in receivers:
            receiver.close()
        memory.close()


@pytest.mark.parametrize("choice", ["shm", "zmq", "nixl", "nccl"])
def test_prefixes_come_by_what_was_asked_for_and_by_default_into_a_closed_pool(
    context: zmq.Context[zmq.Socket[bytes]], choice: str
) -> None:
    settings = TransportSettings(choice, context, "127.0.0.1", LinkSettings(), this_process())
    assert pulling_settings(settings) == settings
    assert pulling_settings(replace(settings, choice="auto")) == replace(settings, choice="shm")


def test_prefixes_do_not_come_by_a_transport_of_a_package(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    plugged = cast(Any, SimpleNamespace(name="other"))
    settings = TransportSettings("other", context, "127.0.0.1", LinkSettings(), this_process(), plugged=plugged)
    assert pulling_settings(settings) is None
