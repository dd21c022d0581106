"""The second turn of a conversation: what the decode node has computed is copied to the prefill node, or it is not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from baton.kvtransfer.transports.base import Move
from baton.wire.request_key import RequestKey
from tests.kvtransfer.loopback import Fault
from tests.simulation.engine import reference
from tests.simulation.world import Client, World

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 5)
TURN = (*PROMPT, *reference(PROMPT, 24), 7, 7, 7)
HELD = 32
"""Tokens of full blocks that the decode node has computed of it; the prefill node has 8."""
ASKED_S = 3.0


def conversation(*, overlaps: bool = False, peers_write: bool = False) -> tuple[World, Client]:
    """A world in which the second turn is asked at `ASKED_S`, when the first is long over."""
    world, second = World(11, 1, 1, peers_write=peers_write, overlaps=overlaps), Client(1, TURN, 6)
    world.clock.at(0.1, partial(world.ask, Client(0, PROMPT, 24)))
    world.clock.at(ASKED_S, partial(world.ask, second))
    world.disturbed(ASKED_S, is_cause=False)  # it is not over before
    return world, second


def results(world: World) -> dict[str, int]:
    return dict(world.router.relay.pulls.results)


def num_found(world: World) -> float:
    """Tokens of both prompts that the prefill node found in its cache."""
    samples = [sample for metric in world.nodes["P1"].leg.metrics() for sample in metric.samples]
    found = [each.value for each in samples if each.labels.get("source") == "local_cache_hit"]
    assert found
    return found[0]


def at_the_pull(world: World, happen: Callable[[], None]) -> None:
    """Let something happen as soon as the prefill node takes the prefix."""
    node = world.nodes["P1"]
    begin = node.core.handoffs.reserve

    def reserve(*args: object) -> object:
        node.core.handoffs.reserve = begin  # type: ignore[method-assign]
        world.clock.after(0.0001, happen)
        return begin(*args)  # type: ignore[arg-type]

    node.core.handoffs.reserve = reserve  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("overlaps", [False, True])
def test_the_prefill_node_computes_what_is_new(overlaps: bool) -> None:
    world, second = conversation(overlaps=overlaps)
    world.run()
    assert (second.error, results(world)) == ("", {"arrived": 1})
    assert world.router.relay.pulls.num_tokens == HELD - 8
    assert len(world.nodes["P1"].core.cached_hashes()) == len(TURN) // 4


def test_what_was_evicted_meanwhile_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    world, second = conversation()
    monkeypatch.setattr(world.nodes["D1"].core.handoffs, "lend", lambda key, prompt: None)
    world.run()
    assert (second.error, results(world)) == ("", {"refused": 1})


def test_without_room_for_the_prefix_it_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    world, second = conversation()
    monkeypatch.setattr(world.nodes["P1"].core.handoffs, "reserve", lambda key, prompt: None)
    world.run()
    assert (second.error, results(world)) == ("", {"failed": 1})


@pytest.mark.parametrize("name", ["P1", "D1"])
@pytest.mark.parametrize("how", ["kill", "stop", "pause"])
def test_a_node_that_dies_leaves_or_stops_in_the_middle_costs_time(name: str, how: str) -> None:
    world, second = conversation()
    node = world.nodes[name]
    acts = {"kill": partial(world.kill_node, node, 0.5), "stop": partial(world.stop_node, node)}
    at_the_pull(world, acts.get(how, partial(world.pause, node, 1.5)))
    world.run()
    assert second.error == ""
    assert sum(results(world).values()) >= 1
    assert second.longest_gap_s < 6.0


def test_a_client_that_leaves_in_the_middle_leaves_nothing() -> None:
    world, second = conversation()
    at_the_pull(world, lambda: world.leave(second))
    world.run()
    assert (second.has_left, results(world)) == (True, {"cancelled": 1})


def test_a_router_that_dies_in_the_middle_leaves_nothing() -> None:
    world, _ = conversation()
    at_the_pull(world, lambda: world.kill_router(world.router, 0.5))
    world.run()


def test_a_holder_that_is_slow_is_not_waited_for() -> None:
    world, second = conversation()
    world.clock.at(ASKED_S - 0.01, lambda: world.nodes["D1"].stall(1.0))
    world.run()
    assert (second.error, results(world)) == ("", {"late": 1})


def test_a_prefix_that_arrives_damaged_twice_is_computed() -> None:
    world, second = conversation()

    def damaged(number: int, key: RequestKey, move: Move) -> Fault:
        return Fault(flipped_bits=(3,)) if key.attempt == 2 else Fault()

    world.blocks.plan = damaged
    world.run()
    assert (second.error, results(world)) == ("", {"failed": 1})
    assert num_found(world) == 8


@pytest.mark.parametrize(
    ("fault", "peers_write", "result"),
    [(Fault(0), False, "late"), (Fault(flipped_bits=(3,)), False, "failed"), (Fault(0), True, "failed")],
)
def test_what_came_of_a_prefix_is_used_and_the_rest_is_computed(
    fault: Fault, *, peers_write: bool, result: str
) -> None:
    world, second = conversation(peers_write=peers_write)
    world.blocks.plan = lambda number, key, move: fault if (key.attempt, move.index) == (2, 3) else Fault()
    world.run()
    assert (second.error, results(world)) == ("", {result: 1})
    assert num_found(world) == 8 + 3 * 4
