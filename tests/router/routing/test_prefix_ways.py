"""A prompt of which another node has more is computed, pulled or stays, by what each is expected to take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.router.nodes.registry import Node
from baton.router.routing.placement import Route
from baton.router.routing.prefix_ways import RISKED, SURELY, KnownPrompt, PrefixWays
from baton.router.routing.pulls import PullRecords
from baton.wire.messages.membership import DECODE, PREFILL
from baton.wire.messages.prefixes import Pulled
from baton.wire.step_cost import StepCost
from tests.router.fake_node import LAYOUT, STATUS, make_hello

COST = StepCost(1e-3, 2e-4, 5e-8, 1e-4, 2e-8)
SIZE = LAYOUT.block_size
HASHES = [bytes([number % 256, number // 256]) * 8 for number in range(300)]
NUM_TOKENS = len(HASHES) * SIZE
HISTORY = 290
PROMPT = KnownPrompt(NUM_TOKENS, HASHES, NUM_TOKENS)


def node(role: str, num_cached: int, cost: StepCost | None = COST, **changes: Any) -> Node:
    """A node that has so many blocks of the prompt cached."""
    hello = make_hello(role, peer_address="tcp://127.0.0.1:9", can_pull=True)
    made = Node(hello, "m", 0.0, replace(STATUS, cost=cost), cached_hashes=set(HASHES[:num_cached]))
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def choose(route: Route, *others: Node, prompt: KnownPrompt = PROMPT, ways: PrefixWays | None = None) -> Route:
    nodes = [each for each in (route.prefill, route.decode) if each is not None]
    return (ways or PrefixWays(PullRecords())).choose(route, prompt, [*nodes, *others], 0.0)


def test_the_next_turn_stays_at_an_idle_decode_node_that_has_computed_the_last_answer() -> None:
    prefill, decode, ways = node(PREFILL, 5), node(DECODE, HISTORY), PrefixWays(PullRecords())
    route = choose(Route(decode, prefill), ways=ways)
    assert (route.decode, route.prefill, route.pull, ways.records.num_stays) == (decode, None, None, 1)
    assert route.prompt_s == pytest.approx(COST.prompt_s(10 * SIZE, HISTORY * SIZE, 512, 0, 0))


def test_beside_streams_that_it_would_hold_up_what_is_missing_is_pulled_from_there() -> None:
    prefill, decode = node(PREFILL, 5), node(DECODE, HISTORY, num_legs=6)
    route = choose(Route(decode, prefill))
    assert (route.decode, route.prefill) == (decode, prefill)
    assert route.pull is not None
    assert (route.pull.source, route.pull.target) == (decode, prefill)
    assert (route.pull.num_known, route.pull.num_tokens) == (5 * SIZE, HISTORY * SIZE)
    whole_s = COST.prompt_s(NUM_TOKENS - 5 * SIZE, 5 * SIZE, 512, 0, 0)
    assert route.pull.patience_s == pytest.approx(RISKED * whole_s)
    assert route.pull.token_s == pytest.approx(COST.tokens_s(1, 5 * SIZE))
    assert route.prompt_s == pytest.approx(COST.prompt_s(10 * SIZE, HISTORY * SIZE, 512, 0, 0))


def test_no_stream_is_slowed_beyond_its_goal() -> None:
    prefill, decode = node(PREFILL, 5), node(DECODE, HISTORY, num_legs=1)
    assert choose(Route(decode, prefill)).prefill is None
    assert PROMPT.tpot_s == 0.0, "nobody has a goal who does not say so"
    route = choose(Route(decode, prefill), prompt=replace(PROMPT, tpot_s=0.003))
    assert (route.prefill, route.pull is None) == (prefill, False)


@pytest.mark.parametrize("num_more", [0, 1, 2, 8])
def test_what_is_hardly_worth_it_is_computed(num_more: int) -> None:
    prefill, decode = node(PREFILL, 280), node(DECODE, 280 + num_more, num_legs=6)
    route = choose(Route(decode, prefill))
    assert route == Route(decode, prefill, COST.prompt_s(20 * SIZE, 280 * SIZE, 512, 0, 0))


def test_another_way_is_taken_only_where_it_is_surely_sooner() -> None:
    """At each length of a shared prefix: whatever is chosen is expected to take at most `SURELY` of computing."""
    ways_taken = set()
    for num_cached in range(6, 300):
        prefill, decode = node(PREFILL, 5), node(DECODE, num_cached, num_legs=6)
        route = choose(Route(decode, prefill))
        ways_taken.add(route.pull is not None)
        if route.pull is not None:
            rest_s = COST.prompt_s(NUM_TOKENS - num_cached * SIZE, num_cached * SIZE, 512, 0, 0)
            assert route.pull.expected_s + rest_s <= SURELY * route.pull.patience_s / RISKED
    assert ways_taken == {True, False}


def test_the_prefix_comes_from_who_has_most_of_it_and_may_lend() -> None:
    prefill, decode, holder = node(PREFILL, 5), node(DECODE, 0), node(PREFILL, 200)
    leaving, ejected = node(PREFILL, 250, is_leaving=True), node(DECODE, 250, is_ejected=True)
    silent = node(DECODE, 250)
    silent.hello = replace(silent.hello, peer_address="")
    holey = node(PREFILL, 0, cached_hashes={HASHES[200]})
    route = choose(Route(decode, prefill), node(PREFILL, 100), leaving, holder, ejected, silent, holey)
    assert route.pull is not None
    assert (route.pull.source, route.pull.num_tokens) == (holder, 200 * SIZE)


def test_a_decode_node_that_computes_prompts_pulls_from_another_one() -> None:
    decode, other = node(DECODE, 0), node(DECODE, HISTORY)
    route = choose(Route(decode, None), other)
    assert route.pull is not None
    assert (route.pull.source, route.pull.target, route.prefill) == (other, decode, None)


def test_a_node_that_takes_no_prefixes_computes() -> None:
    prefill, decode = node(PREFILL, 5), node(DECODE, HISTORY, num_legs=6)
    prefill.hello = replace(prefill.hello, can_pull=False)
    assert choose(Route(decode, prefill)).pull is None
    assert choose(Route(decode, node(PREFILL, 5)), prompt=replace(PROMPT, num_pullable=0)).pull is None


def test_a_pull_that_comes_before_its_turn_costs_nothing() -> None:
    """While a prefill node has others to compute first, a prefix can be copied that is not worth it else."""
    decode, waiting = node(DECODE, 30, num_legs=6), node(PREFILL, 5)
    assert choose(Route(decode, node(PREFILL, 5))).pull is None
    waiting.prompts.add(0.001, 0.0)
    assert choose(Route(decode, waiting)).pull is None
    busy = node(PREFILL, 0)
    busy.prompts.add(0.15, 0.0)
    short = KnownPrompt(60 * SIZE, HASHES[:60], 60 * SIZE)
    assert choose(Route(decode, busy), prompt=short).pull is not None


def test_who_was_late_with_a_pull_is_left_alone_for_a_while() -> None:
    prefill, decode, ways = node(PREFILL, 5), node(DECODE, HISTORY, num_legs=6), PrefixWays(PullRecords())
    planned = choose(Route(decode, prefill), ways=ways).pull
    assert planned is not None
    assert ways.records.num_stays == 0
    ways.records.ended(planned, "late", -5.0)
    assert choose(Route(decode, prefill), ways=ways).pull is None
    assert ways.choose(Route(decode, prefill), PROMPT, [prefill, decode], 6.0).pull is not None


@pytest.mark.parametrize("is_overhead", [False, True])
def test_a_pull_may_take_long_if_it_brings_something_meanwhile(*, is_overhead: bool) -> None:
    """What takes time before anything has come is given up where it exceeds the patience, and not begun."""
    prefill, decode, ways = node(PREFILL, 5), node(DECODE, HISTORY, num_legs=200), PrefixWays(PullRecords())
    planned = choose(Route(decode, prefill), ways=ways).pull
    assert planned is not None
    limit_s = planned.patience_s if is_overhead else 0.85 * planned.patience_s / RISKED
    num_bytes = (HISTORY - 5) * LAYOUT.block_bytes
    for took_s, is_begun in ((0.5 * limit_s, True), (1.1 * limit_s, False)):
        transfer_us = 0 if is_overhead else round(took_s * 1e6)
        for _ in range(60):
            ways.records.arrived(planned, Pulled(1, bytes(16), 2, NUM_TOKENS, num_bytes, transfer_us), took_s)
        assert (choose(Route(decode, prefill), ways=ways).pull is not None) == is_begun


@given(
    share=st.floats(0.0, 1.0),
    num_known=st.integers(0, HISTORY - 1),
    pair_s=st.floats(0.0, 1e-6),
    wait_s=st.floats(0, 2),
)
def test_whenever_a_wait_ends_the_rest_is_computed_in_time(
    share: float, num_known: int, pair_s: float, wait_s: float
) -> None:
    """Whatever share of a prefix has come when it was waited for as long as it may: with what is computed then it is
    not later than computing all by more than `RISKED`."""
    cost = replace(COST, prompt_pair_s=pair_s)
    prefill, decode = node(PREFILL, num_known, cost), node(DECODE, HISTORY, cost, num_legs=6)
    prefill.prompts.add(wait_s, 0.0)
    planned = choose(Route(decode, prefill)).pull
    if planned is not None:
        num_come = int(share * (HISTORY - num_known)) * SIZE
        waited_s = planned.patience_s + num_come * planned.token_s
        first = num_known * SIZE + num_come
        whole_s = cost.prompt_s(NUM_TOKENS - num_known * SIZE, num_known * SIZE, 512, 0, 0)
        rest_s = cost.prompt_s(NUM_TOKENS - first, first, 512, 0, 0)
        assert waited_s + rest_s <= wait_s + whole_s + RISKED * (wait_s + whole_s) + 1e-9


def test_a_request_that_would_be_late_is_not_where_it_need_not_be_computed() -> None:
    prefill, decode = node(PREFILL, 5), node(DECODE, HISTORY)
    route = choose(Route(decode, prefill, late_s=0.01))
    assert (route.prefill, route.late_s) == (None, 0.0)
    assert choose(Route(decode, prefill, late_s=0.01, is_slow=True)).late_s == 0.01


def test_a_decode_node_that_knows_little_of_prompts_is_not_taken_to_be_fast() -> None:
    prefill, decode = node(PREFILL, 5), node(DECODE, HISTORY, StepCost(0.0, 1e-9, 0.0, 0.0, 0.0))
    route = choose(Route(decode, prefill))
    assert route.prompt_s == pytest.approx(COST.prompt_s(10 * SIZE, HISTORY * SIZE, 512, 0, 0))


def test_a_node_that_does_not_know_its_costs_has_those_of_its_route() -> None:
    prefill, decode, other = node(PREFILL, 0, None), node(DECODE, 0), node(PREFILL, 0, replace(COST, step_s=1.0))
    route = PrefixWays(PullRecords()).choose(Route(decode, prefill), PROMPT, [other, prefill, decode], 0.0)
    assert route.prompt_s == pytest.approx(COST.prompt_s(NUM_TOKENS, 0, 512, 0, 0))


def test_without_cost_models_nothing_changes() -> None:
    prefill, decode = node(PREFILL, 5, None), node(DECODE, HISTORY, None)
    route = Route(decode, prefill)
    assert choose(route) is route
