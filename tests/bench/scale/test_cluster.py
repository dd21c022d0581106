"""A small cluster in one process: every figure is measured, and a node's Pongs are about its own requests."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any, cast

import pytest

from baton.bench.limits.router_hop import Received
from baton.bench.scale.cluster import ClusterPlan, measure_cluster
from baton.bench.scale.fake_cluster import FINGERPRINT, FakeCluster
from baton.bench.scale.numbered_prompts import number_of_prompt, numbered_prompt
from baton.bench.scale.streams import ways
from baton.router.nodes.control import ControlLink
from baton.router.nodes.registry import NodeRegistry
from baton.router.requests.relay import Relay, RelaySettings
from baton.router.routing.policies import make_policy
from baton.wire.errors import RequestFailed
from baton.wire.links import LinkSettings


def test_every_cost_of_a_small_cluster_is_measured() -> None:
    costs = measure_cluster(ClusterPlan(6, 30, num_prompt_tokens=64, blocks_per_node=20))
    figures = {name: value for name, value in asdict(costs).items() if name != "plan"}
    assert all(value > 0 for name, value in figures.items() if not name.endswith("_bytes"))


async def test_more_nodes_than_are_pinged_in_one_turn_are_all_pinged() -> None:
    # the first round begins when there are none
    cluster, registry = FakeCluster(), NodeRegistry({"model": FINGERPRINT})
    control = ControlLink(cast("Any", cluster), "127.0.0.1", 1, LinkSettings(), registry)
    relay = Relay(registry, control, make_policy("prefix"), make_policy("prefix"), RelaySettings(16, 8, 3, 60.0))
    control.start(relay)
    try:
        cluster.join(20, 21)
        async with asyncio.timeout(20.0):
            while len(registry) < 41 or not all(node.num_pongs > 1 for node in registry.all()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    finally:
        await control.close()


@pytest.mark.parametrize("number", [0, 99, 100, 123_456])
def test_a_prompt_carries_its_number(number: int) -> None:
    assert number_of_prompt(numbered_prompt(number, 16)) == number


def test_a_token_counts_that_was_made_while_all_streams_ran() -> None:
    received = [Received(0.0, [1.0, 2.1, 3.2, 4.1]), Received(0.0, [1.5, 2.5, 3.7])]
    found, begun_s, ended_s = ways(received, [[0.9, 2.0, 3.0, 4.0], [1.4, 2.4, 3.4]])
    assert (begun_s, ended_s) == (1.5, 3.4)
    assert found == pytest.approx([0.1, 0.2, 0.1, 0.3])
    with pytest.raises(RequestFailed, match="no time when all streams ran"):
        ways([Received(0.0, [5.0])], [[0.9]])
