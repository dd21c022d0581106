"""The nixl transport between two pools of this machine: bytes, notices, endpoints."""

from __future__ import annotations

import importlib.util
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvtransfer.host import is_gone
from kvtransfer.messages import Endpoint, HandoffKey
from kvtransfer.transports.base import BlocksArrived, Move
from kvtransfer.transports.nixl.memory import DRAM
from kvtransfer.transports.nixl.transport import NixlReceiver, NixlSender
from kvtransfer.transports.nixl.ucx import ucx_environment
from kvtransfer.transports.nixl.wire import DETAILS, PoolDetails
from kvtransfer.transports.segment import Segment
from tests.kvtransfer.transports.nixl.nixl_pair import GENERATION, NixlPair, moves_of
from wire.errors import InvalidSetting, TransferFailed

_NUM_BLOCKS, _BLOCK_BYTES = 64, 2**17


def is_nixl_loaded() -> bool:
    """Whether this process has loaded nixl."""
    return "libnixl" in Path("/proc/self/maps").read_text()


@pytest.fixture(scope="module", autouse=True)
def was_nixl_loaded() -> bool:
    """Before anything here was done: by tests of agents that run on a thread of this process."""
    return is_nixl_loaded()


@pytest.fixture(scope="module")
def nodes() -> Iterator[NixlPair]:
    pair = NixlPair(_NUM_BLOCKS, _BLOCK_BYTES)
    yield pair
    pair.close()


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


def wait_until_written(pair: NixlPair, sender: NixlSender, key: HandoffKey) -> None:
    pair.wait_until(lambda: not sender.is_reading(key))


def test_scattered_blocks_arrive_in_their_places_and_nowhere_else(pair: NixlPair, sender: NixlSender) -> None:
    order = random.Random(3)
    moves = moves_of(order.sample(range(_NUM_BLOCKS), 40), order.sample(range(_NUM_BLOCKS), 40))
    expected = np.zeros_like(pair.target)
    for move in moves:
        expected[move.target] = pair.source[move.source]
    assert pair.push(sender, pair.expect(moves), moves) == 40
    assert np.array_equal(pair.target, expected)


def test_pieces_of_several_handoffs_arrive_each_at_its_own(pair: NixlPair, sender: NixlSender) -> None:
    pieces = {}
    for first in range(0, _NUM_BLOCKS, 16):
        moves = moves_of(range(first, first + 16), range(first, first + 16))
        key = pair.expect(moves)
        pieces[key] = moves
    for part in (slice(0, 5), slice(5, 16)):
        for key, moves in pieces.items():
            assert sender.push(key, moves[part])
    arrivals: list[BlocksArrived] = []

    def all_arrived() -> bool:
        arrivals.extend(pair.receiver.take_arrivals())
        return len(arrivals) == 2 * len(pieces)

    pair.wait_until(all_arrived)
    assert {(a.key, a.first_index, a.count) for a in arrivals} == {
        (key, first, count) for key in pieces for first, count in ((0, 5), (5, 11))
    }
    assert np.array_equal(pair.target, pair.source)


def test_what_was_not_announced_is_refused(pair: NixlPair, sender: NixlSender) -> None:
    moves = moves_of([0, 1], [0, 1])
    granted = pair.expect(moves)
    other_generation = [Move(0, 0, 0, GENERATION + 1), moves[1]]
    refused_before = pair.receiver.num_refused
    for key, pushed in ((granted, other_generation), ((b"never granted!!!", 1), moves)):
        assert sender.push(key, pushed)
    pair.wait_until(lambda: pair.receiver.num_refused == refused_before + 2)
    assert not pair.receiver.take_arrivals()


def test_blocks_arrive_once_until_they_are_expected_again(pair: NixlPair, sender: NixlSender) -> None:
    moves = moves_of([5], [6])
    key = pair.expect(moves)
    assert pair.push(sender, key, moves) == 1
    refused_before = pair.receiver.num_refused
    assert sender.push(key, moves)
    pair.wait_until(lambda: pair.receiver.num_refused == refused_before + 1)
    pair.receiver.expect(key, [6], [GENERATION])
    assert pair.push(sender, key, moves) == 1


def test_a_large_grant_of_small_pieces_is_written_whole(pair: NixlPair, sender: NixlSender) -> None:
    moves = [Move(index, index % _NUM_BLOCKS, index % _NUM_BLOCKS, GENERATION) for index in range(1500)]
    assert pair.push(sender, pair.expect(moves), moves) == 1500
    assert np.array_equal(pair.target, pair.source)


def test_the_writer_is_a_process_of_its_own(pair: NixlPair, sender: NixlSender, was_nixl_loaded: bool) -> None:
    assert sender.writer is not None
    assert sender.writer.pid != os.getpid()
    assert not is_gone(sender.writer)
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
        NixlReceiver(segment, 1, 4096, "127.0.0.1")
    segment.close()


def test_an_agent_that_does_not_start_says_why() -> None:
    segment = Segment(4096)
    with pytest.raises(InvalidSetting, match="mmap length is greater than file size"):
        NixlReceiver(segment, 2, 4096, "127.0.0.1")
    segment.close()


def test_loopback_stays_on_the_loopback_interface() -> None:
    assert ucx_environment("127.0.0.1", {"PATH": "x"}) == {"PATH": "x", "UCX_NET_DEVICES": "lo"}
    assert ucx_environment("::1", {}) == {"UCX_NET_DEVICES": "lo"}


def test_an_address_of_an_interface_keeps_to_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.transports.nixl.ucx._interface_of", lambda address: "eth7")
    monkeypatch.setattr("kvtransfer.transports.nixl.ucx._rdma_devices", lambda: ["mlx5_0:1"])
    chosen = ucx_environment("10.1.2.3", {})
    assert chosen == {"UCX_NET_DEVICES": "eth7,mlx5_0:1", "UCX_TLS": "^posix,sysv,cma,xpmem"}


@pytest.mark.parametrize("name", ["UCX_TLS", "UCX_NET_DEVICES"])
def test_what_the_user_chose_for_ucx_stays(name: str) -> None:
    assert ucx_environment("127.0.0.1", {name: "mine"}) == {name: "mine"}


@pytest.mark.parametrize("host", ["0.0.0.0", "203.0.113.9"])
def test_an_address_of_no_interface_is_left_to_ucx(host: str) -> None:
    assert ucx_environment(host, {}) == {}
