"""What a prompt is expected to take at a node: what waits there, what decodes there, and what is cached there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from baton.router.nodes.registry import Node
from baton.router.routing.predictions import Predictions
from baton.wire.messages.membership import DECODE, PREFILL
from baton.wire.step_cost import StepCost
from tests.router.fake_node import STATUS, make_hello

COST = StepCost(1e-3, 2e-4, 5e-8, 1e-4, 2e-8)


def node(role: str, cost: StepCost | None = COST, num_legs: int = 0) -> Node:
    return Node(make_hello(role), "m", 0.0, replace(STATUS, cost=cost), num_legs=num_legs)


def test_a_prompt_waits_for_those_of_this_router_and_of_others() -> None:
    busy, predictions = node(PREFILL), Predictions(COST, 1.0)
    assert predictions.wait_s(busy) == 0.0
    busy.prompts.add(3.0, 0.0)
    assert predictions.wait_s(busy) == pytest.approx(2.0)
    busy.num_other_prompt_tokens = 100
    assert predictions.wait_s(busy) == pytest.approx(2.0 + COST.prompt_s(100, 0, 512, 0, 0))


def test_what_is_cached_is_not_computed_but_one_token_is() -> None:
    predictions = Predictions(COST, 0.0)
    assert predictions.compute_s(node(PREFILL), 512, 500, 0.0)[0] == COST.prompt_s(12, 500, 512, 0, 0)
    assert predictions.compute_s(node(PREFILL), 512, 512, 0.0)[0] == COST.prompt_s(1, 511, 512, 0, 0)


def test_beside_streams_with_a_goal_chunks_are_small_and_may_be_too_small() -> None:
    predictions, decode = Predictions(COST, 0.0), node(DECODE, num_legs=4)
    alone_s, _ = predictions.compute_s(decode, 512, 0, 0.0)
    beside_s, keeps_pace = predictions.compute_s(decode, 512, 0, 0.02)
    assert keeps_pace
    assert beside_s > alone_s
    assert not predictions.compute_s(decode, 512, 0, 0.002)[1]


def test_what_an_idle_decode_node_has_held_costs_nothing() -> None:
    """Its last status is of the answer that has just ended."""
    predictions, alone_s = Predictions(COST, 0.0), COST.prompt_s(512, 0, 512, 0, 0)
    idle, busy = node(DECODE), node(DECODE, num_legs=1)
    for each in (idle, busy):
        each.status = replace(each.status, num_held_blocks=1000)
    assert predictions.compute_s(idle, 512, 0, 0.0)[0] == alone_s
    assert predictions.compute_s(busy, 512, 0, 0.0)[0] > alone_s + 1000 * COST.context_token_s


def test_a_node_that_knows_no_prompts_is_as_fast_as_one_that_does() -> None:
    without = replace(COST, prompt_token_s=0.0, prompt_pair_s=0.0)
    nodes = [node(DECODE, without), node(DECODE, None), node(PREFILL)]
    predictions = Predictions.of(nodes, 0.0)
    assert predictions is not None
    assert [predictions.cost_of(each) for each in nodes] == [COST] * 3
    assert Predictions.of(nodes[:2], 0.0) is None
