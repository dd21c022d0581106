"""What pulls are expected to take follows what those between the same two nodes have taken."""

from __future__ import annotations

import pytest

from baton.router.nodes.registry import Node
from baton.router.routing import pulls
from baton.router.routing.pulls import ARRIVED, CANCELLED, FAILED, LATE, LEFT_ALONE_S, REFUSED, PlannedPull, PullRecords
from baton.wire.messages.membership import DECODE, PREFILL
from baton.wire.messages.prefixes import AwaitedPrefix, Pulled
from tests.router.fake_node import STATUS, make_hello

MIB = 2**20


def make_node(role: str) -> Node:
    return Node(make_hello(role), "m", 0.0, STATUS)


SOURCE, TARGET, OTHER = make_node(DECODE), make_node(PREFILL), make_node(PREFILL)
PLANNED = PlannedPull(SOURCE, TARGET, 64, 16, expected_s=0.5, patience_s=1.0, token_s=0.25)


def pulled(num_bytes: int, transfer_us: int) -> Pulled:
    return Pulled(1, bytes(16), 2, 64, num_bytes, transfer_us)


def test_a_pull_is_waited_for_as_long_as_computing_what_it_brings_would_take() -> None:
    assert PLANNED.bound_s == 1.0 + 48 * 0.25
    assert PLANNED.awaited_as(7) == AwaitedPrefix(7, 1.0, 0.25)


def test_a_pair_without_pulls_is_expected_to_be_a_slow_network() -> None:
    expected = PullRecords().expected_of(SOURCE, TARGET, 64 * MIB, 0.0)
    total_s = pulls.FIRST_OVERHEAD_S + 64 * MIB / pulls.FIRST_BYTES_PER_S
    assert expected == pytest.approx((total_s, pulls.FIRST_OVERHEAD_S))


def test_expectations_follow_what_pulls_take_in_bytes_and_beside_them() -> None:
    records = PullRecords()
    for _ in range(40):
        records.arrived(PLANNED, pulled(MIB, 1000), took_s=0.004)
    assert records.expected_of(SOURCE, TARGET, 8 * MIB, 0.0) == pytest.approx((0.003 + 8 * 0.001, 0.003), rel=0.01)
    assert records.expected_of(SOURCE, OTHER, 8 * MIB, 0.0) == PullRecords().expected_of(SOURCE, TARGET, 8 * MIB, 0.0)


def test_what_was_expected_and_what_came_of_it_are_counted_together() -> None:
    records = PullRecords()
    prefix = records.arrived(PLANNED, pulled(MIB, 1000), took_s=0.25)
    assert (prefix.num_tokens, prefix.node_id, prefix.took_s) == (64, SOURCE.node_id, 0.25)
    assert (records.num_tokens, records.expected_s, records.took_s) == (48, 0.5, 0.25)
    for result in (REFUSED, CANCELLED, FAILED, LATE):
        records.ended(PLANNED, result, 0.0)
    assert records.results == dict.fromkeys((ARRIVED, REFUSED, CANCELLED, FAILED, LATE), 1)
    assert (records.expected_s, records.took_s) == (0.5, 0.25)


@pytest.mark.parametrize("result", [FAILED, LATE])
def test_a_pair_whose_pull_brought_nothing_is_left_alone_for_a_while(result: str) -> None:
    records = PullRecords()
    records.ended(PLANNED, result, 100.0)
    assert records.expected_of(SOURCE, TARGET, MIB, 100.0 + LEFT_ALONE_S - 0.1) is None
    assert records.expected_of(SOURCE, TARGET, MIB, 100.0 + LEFT_ALONE_S) is not None
    assert records.expected_of(SOURCE, OTHER, MIB, 100.0) is not None


def test_a_pair_whose_pulls_keep_bringing_nothing_is_left_alone_for_longer() -> None:
    records, now_s = PullRecords(), 100.0
    for alone_s in (10.0, 20.0, 40.0, 60.0, 60.0):
        records.ended(PLANNED, LATE, now_s)
        assert records.expected_of(SOURCE, TARGET, MIB, now_s + alone_s - 0.1) is None
        now_s += alone_s
        assert records.expected_of(SOURCE, TARGET, MIB, now_s) is not None
    records.arrived(PLANNED, pulled(MIB, 1000), took_s=0.004)
    records.ended(PLANNED, LATE, now_s)
    assert records.expected_of(SOURCE, TARGET, MIB, now_s + LEFT_ALONE_S) is not None


@pytest.mark.parametrize("result", [REFUSED, CANCELLED])
def test_what_is_nobodys_fault_is_not(result: str) -> None:
    records = PullRecords()
    records.ended(PLANNED, result, 100.0)
    assert records.expected_of(SOURCE, TARGET, MIB, 100.0) is not None


def test_pairs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulls, "_MAX_PAIRS", 2)
    records = PullRecords()
    for target in (TARGET, OTHER, make_node(PREFILL)):
        records.ended(PlannedPull(SOURCE, target, 64, 0, 0.1, 0.2, 0.0), LATE, 100.0)
    assert records.expected_of(SOURCE, TARGET, MIB, 100.0) is not None
    assert records.expected_of(SOURCE, OTHER, MIB, 100.0) is None
