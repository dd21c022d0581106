"""Which node each policy takes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.router.routing.policies import LeastLoaded, Prefix, RoundRobin, make_policy, num_cached_blocks
from baton.wire.errors import InvalidSetting

HASHES = [bytes([number]) * 16 for number in range(4)]


@dataclass(frozen=True)
class FakeCandidate:
    name: str
    load: int = 0
    cached_hashes: frozenset[bytes] = frozenset()


def _with_prefix(name: str, num_blocks: int, load: int = 0) -> FakeCandidate:
    return FakeCandidate(name, load, frozenset(HASHES[:num_blocks]))


def test_round_robin_takes_each_in_turn() -> None:
    policy = RoundRobin()
    nodes = [FakeCandidate("a", load=9), FakeCandidate("b"), FakeCandidate("c")]
    assert [policy.choose(nodes, HASHES).name for _ in range(6)] == list("abcabc")
    assert policy.choose(nodes[:1], HASHES).name == "a"


def test_least_loaded_ignores_caches_and_keeps_the_order_of_equals() -> None:
    nodes = [_with_prefix("a", 4, load=2), FakeCandidate("b", load=1), FakeCandidate("c", load=1)]
    assert LeastLoaded().choose(nodes, HASHES).name == "b"


def test_prefix_takes_the_longest_prefix() -> None:
    nodes = [_with_prefix("a", 1), _with_prefix("b", 3, load=5), _with_prefix("c", 2)]
    assert Prefix().choose(nodes, HASHES).name == "b"


def test_prefix_takes_the_least_loaded_of_equals() -> None:
    nodes = [_with_prefix("a", 2, load=3), _with_prefix("b", 2, load=1), FakeCandidate("c")]
    assert Prefix().choose(nodes, HASHES).name == "b"
    assert Prefix().choose([FakeCandidate("a", load=1), FakeCandidate("b")], HASHES).name == "b"


def test_prefix_passes_over_a_node_that_is_much_busier() -> None:
    idle = FakeCandidate("idle")
    assert Prefix().choose([_with_prefix("busy", 4, load=8), idle], HASHES).name == "busy"
    assert Prefix().choose([_with_prefix("busy", 4, load=9), idle], HASHES).name == "idle"


def test_a_prefix_ends_at_the_first_gap() -> None:
    assert num_cached_blocks(FakeCandidate("a", cached_hashes=frozenset([HASHES[0], HASHES[2]])), HASHES) == 1
    assert num_cached_blocks(FakeCandidate("a", cached_hashes=frozenset(HASHES[1:])), HASHES) == 0


def test_an_unknown_policy_is_refused_with_the_names_of_all() -> None:
    with pytest.raises(InvalidSetting, match="'fastest' is not one of prefix, least_loaded, round_robin"):
        make_policy("fastest")


@given(
    lengths=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12)), min_size=1, max_size=12),
    gap=st.none() | st.integers(0, 3),
)
def test_prefix_takes_what_a_look_at_every_node_would_take(lengths: list[tuple[int, int]], gap: int | None) -> None:
    lost = frozenset() if gap is None else frozenset([HASHES[gap]])
    nodes = [
        FakeCandidate(str(place), load, frozenset(HASHES[:length]) - (lost if place % 2 else frozenset()))
        for place, (length, load) in enumerate(lengths)
    ]
    limit = min(node.load for node in nodes) + 8
    fit = [node for node in nodes if node.load <= limit]
    assert Prefix().choose(nodes, HASHES) is min(fit, key=lambda node: (-num_cached_blocks(node, HASHES), node.load))
