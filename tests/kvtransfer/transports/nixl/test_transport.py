"""The nixl transport between two pools of this machine: bytes, notices, endpoints."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from baton.kvtransfer.messages import Endpoint
from baton.kvtransfer.process_identity import is_gone
from baton.kvtransfer.transports.base import Move
from baton.kvtransfer.transports.nixl.memory import DRAM
from baton.kvtransfer.transports.nixl.process import AgentProcess
from baton.kvtransfer.transports.nixl.sender import NixlSender
from baton.kvtransfer.transports.nixl.wire import DETAILS, PoolDetails
from baton.kvtransfer.transports.shm.segment import Segment
from baton.wire.errors import InvalidSetting, TransferFailed
from baton.wire.request_key import RequestKey
from tests.kvtransfer.transports.nixl.nixl_pair import GENERATION, NixlPair, moves_of

_NUM_BLOCKS, _BLOCK_BYTES = 64, 2**19


def is_nixl_loaded() -> bool:
    """Whether this process has loaded nixl."""
    return "libnixl" in Path("/proc/self/maps").read_text()


@pytest.fixture(scope="module", autouse=True)
def was_nixl_loaded() -> bool:
    """Before anything here was done: by tests of agents that run on a thread of this process."""
    return is_nixl_loaded()


@pytest.fixture
def pair(nodes: NixlPair) -> NixlPair:
    nodes.target[:] = 0
    nodes.receiver.take_arrivals()
    return nodes


@pytest.fixture
def sender(pair: NixlPair) -> Iterator[NixlSender]:
    sender = pair.open()
    yield sender
    sender.close()


def wait_until_written(pair: NixlPair, sender: NixlSender, key: RequestKey) -> None:
    pair.wait_until(lambda: not sender.is_reading(key))


def test_a_large_grant_of_small_pieces_is_written_whole(pair: NixlPair, sender: NixlSender) -> None:
    moves = [Move(index, index % _NUM_BLOCKS, index % _NUM_BLOCKS, GENERATION) for index in range(1100)]
    assert pair.push(sender, pair.expect(moves), moves) == 1100
    assert np.array_equal(pair.target, pair.source)


def test_the_writer_is_a_process_of_its_own(pair: NixlPair, sender: NixlSender, was_nixl_loaded: bool) -> None:
    (writer,) = sender.writers
    assert writer.pid != os.getpid()
    assert not is_gone(writer)
    assert was_nixl_loaded or not is_nixl_loaded()


def test_a_closed_sender_pushes_nothing(pair: NixlPair) -> None:
    sender = pair.open()
    moves = moves_of([1], [1])
    key = pair.expect(moves)
    sender.close()
    with pytest.raises(TransferFailed):
        sender.push(key, moves)
    assert not sender.is_reading(key)
    assert not sender.needs_fence


def test_a_successor_may_be_opened_before_its_predecessor_has_left(pair: NixlPair) -> None:
    moves = moves_of(range(16), range(16))
    predecessor = pair.open()
    for _ in range(3):
        key = pair.expect(moves)
        assert predecessor.push(key, moves)
        predecessor.close()
        successor = pair.open()
        assert pair.push(successor, pair.expect(moves), moves) == 16
        wait_until_written(pair, predecessor, key)
        assert not predecessor.needs_fence
        predecessor = successor
    predecessor.close()


@pytest.mark.parametrize(
    "details", [b"", b"noise", DETAILS.encode(PoolDetails(b"md", 4096, 5 * _BLOCK_BYTES, DRAM, 0))]
)
def test_an_endpoint_that_cannot_be_is_refused(pair: NixlPair, details: bytes) -> None:
    with pytest.raises(TransferFailed):
        pair.senders.open(Endpoint("nixl", "somebody", details), _NUM_BLOCKS)


def test_an_agent_that_nixl_does_not_know_fails_its_sender_only(pair: NixlPair, sender: NixlSender) -> None:
    details = DETAILS.encode(PoolDetails(b"no metadata of nixl", 4096, _NUM_BLOCKS * _BLOCK_BYTES, DRAM, 0))
    stranger = pair.senders.open(Endpoint("nixl", "somebody", details), _NUM_BLOCKS)
    pair.wait_for_failure(stranger)
    assert not stranger.needs_fence
    moves = moves_of([9], [8])
    assert pair.push(sender, pair.expect(moves), moves) == 1


def test_metadata_of_one_agent_under_the_name_of_another_is_refused(pair: NixlPair) -> None:
    endpoint = pair.receiver.endpoint
    impostor = pair.senders.open(Endpoint("nixl", "somebody else", endpoint.details), _NUM_BLOCKS)
    assert "another agent" in pair.wait_for_failure(impostor)


def test_a_peer_that_says_it_is_another_one_spoils_nothing_for_that_one(pair: NixlPair) -> None:
    endpoint, moves = pair.receiver.endpoint, moves_of([9], [8])
    details: PoolDetails = DETAILS.decode(endpoint.details)
    half = replace(endpoint, details=DETAILS.encode(replace(details, metadata=details.metadata[:-40])))
    for _ in range(2):  # once before the other one has come, and once after it has left
        pair.wait_for_failure(pair.senders.open(half, _NUM_BLOCKS))
        sender = pair.open()
        assert pair.push(sender, pair.expect(moves), moves) == 1
        sender.close()


def test_a_pool_that_is_not_where_its_endpoint_says_fails_its_sender_only(pair: NixlPair) -> None:
    endpoint = pair.receiver.endpoint
    details: PoolDetails = DETAILS.decode(endpoint.details)
    elsewhere = DETAILS.encode(replace(details, base_address=details.base_address + 2**40))
    misled = pair.senders.open(replace(endpoint, details=elsewhere), _NUM_BLOCKS)
    pair.wait_for_failure(misled)
    moves, sender = moves_of([9], [8]), pair.open()
    assert pair.push(sender, pair.expect(moves), moves) == 1
    sender.close()


def test_without_the_package_the_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    segment = Segment(4096)
    with pytest.raises(InvalidSetting, match=r"pip install 'baton-serve\[nixl\]'"):
        AgentProcess(segment.descriptor, 1, 4096, "127.0.0.1")
    segment.close()


def test_an_agent_that_does_not_start_says_why() -> None:
    segment = Segment(4096)
    with pytest.raises(InvalidSetting, match="mmap length is greater than file size"):
        AgentProcess(segment.descriptor, 2, 4096, "127.0.0.1")
    segment.close()
