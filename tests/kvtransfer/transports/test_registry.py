from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from engine.api.errors import InvalidSetting
from engine.api.links import LinkSettings
from kvtransfer.host import this_process
from kvtransfer.transports import segment
from kvtransfer.transports.base import Blocks
from kvtransfer.transports.registry import PoolMemory, SenderFactory, TransportSettings, open_receivers

_NUM_BLOCKS, _BLOCK_BYTES = 8, 4096


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


def offered(context: zmq.Context[zmq.Socket[bytes]], choice: str) -> list[str]:
    settings = TransportSettings(choice, context, "127.0.0.1", LinkSettings(), this_process())
    memory = PoolMemory(settings, "receiver")
    blocks = memory.allocate(_NUM_BLOCKS * _BLOCK_BYTES).reshape(_NUM_BLOCKS, _BLOCK_BYTES)
    receivers = open_receivers(settings, memory, blocks)
    try:
        return [receiver.endpoint.transport for receiver in receivers]
    finally:
        for receiver in receivers:
            receiver.close()
        memory.close()


@pytest.mark.parametrize(
    ("choice", "names"), [("auto", ["shm", "zmq"]), ("shm", ["shm", "zmq"]), ("zmq", ["zmq"]), ("nccl", ["nccl"])]
)
def test_a_choice_offers_its_transports_in_order_of_preference(
    context: zmq.Context[zmq.Socket[bytes]], choice: str, names: list[str]
) -> None:
    assert offered(context, choice) == names


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
    with pytest.raises(InvalidSetting, match="--kv-transport nixl: no shared memory"):
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
            build(settings, memory, blocks)
    finally:
        memory.close()


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
