"""Named scenarios on the virtual clock: what one fault may cost, and how soon it is over."""

from __future__ import annotations

from functools import partial

import pytest

from tests.simulation.nodes import NodeProgram
from tests.simulation.world import Client, World
from wire.messages import DECODE, PREFILL

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 5)


def world_with(client: Client, *, prefills: int = 1, decodes: int = 1, mixed: int = 0) -> World:
    """A world in which that client asks once all nodes have joined."""
    world = World(11, prefills, decodes, peers_write=False, num_mixed=mixed)
    world.clock.at(0.1, partial(world.ask, client))
    return world


def busy(world: World, role: str) -> NodeProgram:
    """The node of a role that has something to do."""
    return next(node for node in world.nodes.values() if node.role == role and not node.is_idle)


def within(world: World, seconds: float, holds: str, is_so: object) -> None:
    """So many seconds from now `is_so` has to be true."""
    assert callable(is_so)

    def look() -> None:
        assert is_so(), holds

    world.clock.after(seconds, look)


def test_a_mixed_node_that_prefers_otherwise_from_now_on_finishes_what_it_has() -> None:
    client, second = Client(0, PROMPT, 30), Client(1, PROMPT[::-1], 30)
    world = world_with(client, prefills=0, decodes=0, mixed=2)
    world.clock.at(0.05, lambda: world.prefer(world.nodes["M2"], PREFILL))
    world.clock.at(0.06, lambda: world.prefer(world.nodes["M1"], DECODE))

    def swap() -> None:
        assert world.nodes["M1"].leg.num_live
        for name, role in (("M1", PREFILL), ("M2", DECODE)):
            world.prefer(world.nodes[name], role)
        world.ask(second)
        within(world, 0.2, "both decode", lambda: all(node.leg.num_live for node in world.nodes.values()))

    world.clock.at(0.4, swap)
    world.run()
    counters = world.router.relay.counters
    assert (client.error, second.error, counters.num_retries, counters.num_moves) == ("", "", 0, 0)
    assert counters.num_handoff_attempts == 2


@pytest.mark.parametrize("pause_s", [0.5, 3.3, 4.2, 9.5])
def test_a_pause_of_the_router_costs_no_attempt(pause_s: float) -> None:
    client = Client(0, PROMPT, 24)
    world = world_with(client)
    world.clock.at(0.2, lambda: world.pause(world.router, pause_s))
    world.run()
    assert (client.error, world.router.relay.counters.num_retries) == ("", 0)
    assert world.clock.now_s < 0.2 + pause_s + 2.0


def test_a_connection_that_breaks_costs_no_attempt() -> None:
    client = Client(0, PROMPT, 60)
    world = world_with(client)
    for when_s in (0.2, 0.35, 0.48, 0.98):  # the router looks for its nodes each half second
        world.clock.at(when_s, lambda: world.cut_for_a_moment("D1"))
    world.run()
    assert (client.error, world.router.relay.counters.num_retries) == ("", 0)


def test_a_decode_node_that_dies_costs_one_attempt_and_less_than_a_second() -> None:
    client = Client(0, PROMPT, 24)
    world = world_with(client, decodes=2)
    world.clock.at(0.25, lambda: world.kill_node(busy(world, DECODE), 5.0))
    world.run()
    assert (client.error, world.router.relay.counters.num_retries) == ("", 1)
    assert client.longest_gap_s < 1.0


def test_a_prefill_node_that_dies_in_the_middle_of_a_prompt_costs_one_attempt() -> None:
    client = Client(0, tuple(place % 29 for place in range(60)), 12)
    world = world_with(client, prefills=2)
    world.clock.at(0.13, lambda: world.kill_node(busy(world, PREFILL), 5.0))
    world.run()
    assert (client.error, world.router.relay.counters.num_retries) == ("", 1)


def test_a_frozen_decode_node_is_left_after_its_heartbeats_stop_and_its_late_tokens_change_nothing() -> None:
    client = Client(0, PROMPT, 24)
    world = world_with(client, decodes=2)
    world.clock.at(0.25, lambda: world.pause(busy(world, DECODE), 6.0))
    world.run()
    assert (client.error, world.router.relay.counters.num_retries) == ("", 1)
    assert client.longest_gap_s < 4.5


def test_a_client_that_leaves_has_left_the_nodes_at_once() -> None:
    client = Client(0, PROMPT, 40)
    world = world_with(client)

    def leave() -> None:
        world.leave(client)
        within(world, 0.2, "nothing is left of it", lambda: all(node.is_idle for node in world.nodes.values()))

    world.clock.at(0.3, leave)
    world.run()


def test_a_router_that_starts_again_has_nodes_without_the_requests_of_before() -> None:
    client = Client(0, PROMPT, 80)
    world = world_with(client)
    world.clock.at(0.3, lambda: world.kill_router(0.3))
    world.clock.at(
        1.2, lambda: within(world, 0.0, "nothing is left", lambda: all(n.is_idle for n in world.nodes.values()))
    )
    world.run()


def test_a_stream_waits_for_its_only_decode_node_to_come_back() -> None:
    client = Client(0, PROMPT, 24)
    world = world_with(client)
    world.clock.at(0.25, lambda: world.kill_node(world.nodes["D1"], 2.0))
    world.run()
    assert client.error == ""
    assert 2.0 < client.longest_gap_s < 3.5


def test_a_stream_that_nobody_reads_gives_its_place_to_another() -> None:
    slow = Client(0, PROMPT, 60, pause_s=1.0)
    world = world_with(slow)
    world.run()
    assert slow.error == ""
    assert world.router.relay.counters.num_pauses


def test_a_decode_node_that_leaves_hands_its_streams_over_without_an_attempt_lost() -> None:
    client = Client(0, PROMPT, 60)
    world = world_with(client, decodes=2)
    world.clock.at(0.3, lambda: world.stop_node(busy(world, DECODE), 5.0))
    world.run()
    counters = world.router.relay.counters
    assert (client.error, counters.num_retries, counters.num_moves) == ("", 0, 1)
    assert client.longest_gap_s < 0.3
