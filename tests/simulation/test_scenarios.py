"""Named scenarios on the virtual clock: what one fault may cost, and how soon it is over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest

from baton.kvtransfer.messages import RECEIVER_TO_SENDER, SENDER_TO_RECEIVER
from baton.wire.messages.membership import DECODE, PREFILL
from baton.wire.messages.vocabulary import NODE_TO_ROUTER, ROUTER_TO_NODE
from baton.wire.request_key import owner_of_epoch
from tests.simulation.engine import POISON
from tests.simulation.frozen_router import AFTER_THAW_S, FrozenRouter
from tests.simulation.nodes import LEASE_S, NodeProgram
from tests.simulation.programs import RouterProgram
from tests.simulation.world import Client, World

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 5)


def world_with(client: Client, *, prefills: int = 1, decodes: int = 1, mixed: int = 0) -> World:
    """A world in which that client asks once all nodes have joined."""
    world = World(11, prefills, decodes, peers_write=False, num_mixed=mixed)
    world.clock.at(0.1, partial(world.ask, client))
    return world


def world_with_two_routers(*clients: Client, decodes: int = 2) -> World:
    """A world in which those clients ask once all nodes have joined, each its own router."""
    world = World(11, 1, decodes, peers_write=False, num_routers=2)
    for client in clients:
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


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many messages of each kind the programs have encoded, but for those that depend on how long a world lives."""
    found: Counter[str] = Counter()
    for codec in (NODE_TO_ROUTER, ROUTER_TO_NODE, RECEIVER_TO_SENDER, SENDER_TO_RECEIVER):

        def encode(message: object, encode: Callable[[object], bytes] = codec.encode) -> bytes:
            found[type(message).__name__] += type(message).__name__ not in ("Ping", "Pong", "Heartbeat")
            return encode(message)

        monkeypatch.setattr(codec, "encode", encode)
    return found


def test_a_request_without_faults_costs_no_message_more_than_it_needs(said: Counter[str]) -> None:
    client = Client(0, PROMPT, 12)
    world_with(client).run()
    assert client.error == ""
    once = ("Prefill", "Decode", "PeerHello", "PeerWelcome", "Grant", "Commit", "Release", "Cancel")
    joining = {"Hello": 2, "Welcome": 2, "CacheEvents": 7}
    assert +said == {"Tokens": 12, **joining, **dict.fromkeys(once, 1)}


def test_a_client_that_leaves_costs_one_cancel_and_no_token_but_what_is_on_its_way(said: Counter[str]) -> None:
    clients = [Client(0, PROMPT, 40) for _ in range(4)]
    for number, client in enumerate(clients):
        world = world_with(client)
        world.clock.at(0.3 + 0.05 * number, partial(world.leave, client))
        world.run()
    num_read = [len(client.token_ids[0]) for client in clients]
    assert all(0 < num < 40 for num in num_read)
    assert said["Tokens"] <= sum(num_read) + 1
    assert said["Cancel"] == len(clients)


def test_a_mixed_node_that_prefers_otherwise_from_now_on_finishes_what_it_has() -> None:
    client, second = Client(0, PROMPT, 60), Client(1, PROMPT[::-1], 60)
    world = world_with(client, prefills=0, decodes=0, mixed=2)
    world.clock.at(0.05, lambda: world.prefer(world.nodes["M2"], PREFILL))
    world.clock.at(0.06, lambda: world.prefer(world.nodes["M1"], DECODE))

    def swap() -> None:
        assert world.nodes["M1"].leg.num_live
        for name, role in (("M1", PREFILL), ("M2", DECODE)):
            world.prefer(world.nodes[name], role)
        world.ask(second)
        within(world, 0.3, "both decode", lambda: all(node.leg.num_live for node in world.nodes.values()))

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


def test_a_decode_node_that_is_frozen_with_the_router_is_noticed_within_5_s_of_the_routers_return() -> None:
    client = Client(0, PROMPT, 60)
    world = world_with(client, decodes=2)
    world.clock.at(0.4, lambda: world.pause(busy(world, DECODE), 30.0))
    world.clock.at(0.4, lambda: world.pause(world.router, 7.0))
    world.clock.at(0.4 + 7.0 + AFTER_THAW_S, lambda: _require_more(client))
    world.run()
    assert (client.error, world.router.relay.counters.num_retries) == ("", 1)


def _require_more(client: Client) -> None:
    assert client.longest_gap_s > 7.0, "the stream stands"


@pytest.mark.parametrize("seed", range(4))
def test_behind_a_frozen_router_streams_go_on_5_s_after_the_last_fault(seed: int) -> None:
    FrozenRouter(seed, num_others=seed).run()


def test_a_connection_that_breaks_costs_no_attempt() -> None:
    client = Client(0, PROMPT, 60)
    world = world_with(client)
    for when_s in (0.2, 0.35, 0.48, 0.98):  # the router looks for its nodes each half second
        world.clock.at(when_s, lambda: world.cut_for_a_moment("D1"))
    world.run()
    assert (client.error, world.router.relay.counters.num_retries) == ("", 0)
    assert client.longest_gap_s < 0.15, (
        "what was lost is asked for when the next message shows it, and not when a Ping does"
    )


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
    world.clock.at(0.3, lambda: world.kill_router(world.router, 0.3))
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
    world.clock.at(0.3, lambda: world.stop_node(busy(world, DECODE)))
    world.run()
    counters = world.router.relay.counters
    assert (client.error, counters.num_retries, counters.num_moves) == ("", 0, 1)
    assert client.longest_gap_s < 0.3


@pytest.mark.parametrize("restart_s", [0.3, 15.0])
def test_a_router_that_dies_ends_its_own_requests_and_no_stream_of_the_other_notices(restart_s: float) -> None:
    own, other = Client(0, PROMPT, 60), Client(1, PROMPT[1:], 60, router=1)
    world = world_with_two_routers(own, other)
    world.clock.at(0.3, lambda: world.kill_router(world.routers[1], restart_s))

    def only_own_is_left() -> bool:
        left = {key.handoff_id[:8] for node in world.nodes.values() for key in node.leg.live_keys()}
        return not own.is_over and left <= {owner_of_epoch(world.router.registry.epoch)}

    if restart_s < 1.0:
        world.clock.at(0.3, lambda: within(world, restart_s + 0.2, "it is over at the nodes", only_own_is_left))
    world.run()
    assert (own.error, world.router.relay.counters.num_retries) == ("", 0)
    assert own.longest_gap_s < 0.3
    assert other.token_ids[0], "it had begun"


def test_a_frozen_router_ends_its_own_requests_and_no_stream_of_the_other_notices() -> None:
    own, other = Client(0, PROMPT, 60), Client(1, PROMPT[1:], 60, router=1)
    world = world_with_two_routers(own, other)
    world.clock.at(0.3, lambda: world.pause(world.routers[1], 12.0))
    world.run()
    assert (own.error, world.router.relay.counters.num_retries) == ("", 0)
    assert own.longest_gap_s < 0.3
    assert other.error == "", "it goes on once its router does"


def test_a_node_that_is_drained_by_one_router_hands_over_the_streams_of_both() -> None:
    own, other = Client(0, PROMPT, 36), Client(1, PROMPT[1:], 36, router=1)
    world = world_with_two_routers(own, other, decodes=1)
    world.clock.at(0.2, lambda: world.start_node(DECODE, "D2"))
    world.clock.at(0.4, lambda: world.drain_node(world.nodes["D1"], world.routers[1]))
    world.run()
    for router in world.routers:
        assert (router.relay.counters.num_retries, router.relay.counters.num_moves) == (0, 1)
    assert max(own.longest_gap_s, other.longest_gap_s) < 0.3


def test_a_router_sees_what_nodes_do_for_the_other_one_and_goes_elsewhere() -> None:
    early, late = Client(0, PROMPT, 80), Client(1, PROMPT, 24, router=1)
    world = world_with_two_routers(early, decodes=1)
    world.clock.at(0.2, lambda: world.start_node(DECODE, "D2"))
    world.clock.at(0.9, lambda: world.ask(late))
    world.clock.at(1.1, lambda: within(world, 0.0, "each has a node", lambda: not any(map(is_idle, world.nodes))))

    def is_idle(name: str) -> bool:
        return name.startswith("D") and world.nodes[name].is_idle

    world.run()
    assert early.error == late.error == ""


def test_a_request_that_nodes_die_of_ends_after_three_of_them_and_takes_no_other_with_it() -> None:
    poison = Client(0, (*POISON, *PROMPT), 24)
    world = World(11, 1, 3, peers_write=False, max_attempts=8)
    clients = [poison, *(Client(number, PROMPT[number:], 24) for number in range(1, 5))]
    for client in clients:
        world.clock.at(0.1 + 0.05 * client.number, partial(world.ask, client))
    world.run()
    assert [client.error for client in clients] == ["request_failed", "", "", "", ""]
    assert world.num_crashes == 3


@pytest.mark.parametrize("num_choices", [1, 3])
def test_a_stream_whose_router_dies_is_resumed_where_it_was(num_choices: int) -> None:
    client = Client(0, PROMPT, 40, num_choices, resumes=True)
    world = world_with(client, decodes=2)
    world.clock.at(0.4, lambda: world.kill_router(world.router, 0.3))
    world.clock.at(0.5, lambda: within(world, 0.0, "it had begun", lambda: len(client.token_ids[0]) > 2))
    world.run()
    assert (client.error, client.has_left) == ("", False)
    assert world.router.relay.counters.num_finished == num_choices


def test_a_node_whose_steps_all_fail_costs_no_request() -> None:
    world = World(11, 1, 2, peers_write=False)
    clients = [Client(number, PROMPT[number % 4 :], 8) for number in range(12)]
    world.clock.at(0.1, lambda: world.fail_steps(world.nodes["D1"], 10_000))
    for client in clients:
        world.clock.at(0.1 + 0.1 * client.number, partial(world.ask, client))
    world.run()
    assert {client.error for client in clients} == {""}
    assert world.router.relay.ejections.num_ejections == 1


def test_a_prefill_node_that_is_frozen_for_longer_than_a_lease_loses_the_handoff_and_no_block() -> None:
    client = Client(0, tuple(place % 29 for place in range(60)), 12)
    world = world_with(client, prefills=2)
    world.clock.at(0.2, lambda: world.pause(busy(world, PREFILL), LEASE_S + 1.0))
    world.run()
    assert (client.error, world.router.relay.counters.num_retries) == ("", 1)
    assert client.longest_gap_s < 4.5


def test_a_transport_that_is_away_for_longer_than_a_lease_is_one_reason_to_give_a_request_up() -> None:
    client = Client(0, tuple(place % 29 for place in range(60)), 12)
    world = world_with(client)
    world.clock.at(0.15, lambda: world.lose_transport(world.nodes["P1"], LEASE_S + 2.0))
    world.clock.at(LEASE_S, lambda: world.fail_steps(world.nodes["D1"], 1))
    world.run()
    assert (client.error, world.router.relay.counters.num_retries) == ("", 3)


def spoil(world: World, what: Callable[[NodeProgram, RouterProgram], None]) -> None:
    """Do that again and again to what the decode node and the router say to each other in the middle of a stream."""
    for number in range(30):
        world.clock.at(0.8 + 0.01 * number, lambda: what(world.nodes["D1"], world.router))


@pytest.mark.parametrize("seed", range(3))
def test_a_damaged_message_is_rejected_and_asked_for_again_and_costs_no_attempt(seed: int) -> None:
    client = Client(0, PROMPT, 80)
    world = world_with(client)
    world.chance.seed(seed)
    spoil(world, world.damage)
    world.run()
    assert (client.error, world.router.relay.counters.num_retries) == ("", 0)
    assert world.router.control.num_rejected_messages


def test_a_message_that_comes_again_changes_nothing() -> None:
    client = Client(0, PROMPT, 80)
    world = world_with(client)
    spoil(world, world.repeat)
    world.run()
    assert (client.error, world.router.relay.counters.num_retries) == ("", 0)


@pytest.mark.parametrize(("held_s", "num_retries"), [(2.0, 0), (4.5, 1)])
def test_messages_that_come_late_cost_an_attempt_once_heartbeats_are_missed(held_s: float, num_retries: int) -> None:
    client = Client(0, PROMPT, 60)
    world = world_with(client)
    world.clock.at(0.4, lambda: world.hold(world.nodes["D1"], world.router, held_s))
    world.run()
    assert (client.error, world.router.relay.counters.num_retries) == ("", num_retries)
    assert client.longest_gap_s < held_s + 0.5


def test_a_stream_whose_router_dies_in_a_drain_is_resumed_at_the_node_that_stays() -> None:
    client = Client(0, PROMPT, 60, resumes=True)
    world = world_with(client, decodes=2)

    def drain() -> None:
        world.drain_node(busy(world, DECODE), world.router)
        world.clock.after(0.005, lambda: world.kill_router(world.router, 0.3))

    world.clock.at(0.4, drain)
    world.run()
    assert (client.error, client.has_left) == ("", False)


def kill(world: World) -> None:
    world.kill_node(world.nodes["D1"], 2.0)


def kill_for_longer(world: World) -> None:
    world.kill_node(world.nodes["D1"], 9.0)


def freeze(world: World) -> None:
    world.pause(world.nodes["D1"], 12.0)


def cut(world: World) -> None:
    world.cut(world.nodes["D1"], world.router, 9.0)


@pytest.mark.parametrize("fault", [kill, kill_for_longer, freeze, cut])
def test_streams_go_on_within_five_seconds_of_the_end_of_a_routers_freeze_although_a_node_is_lost(
    fault: Callable[[World], None],
) -> None:
    clients = [Client(number, PROMPT[number:], 60) for number in range(4)]
    world = World(11, 1, 2, peers_write=False)
    for client in clients:
        world.clock.at(0.1, partial(world.ask, client))
    world.clock.at(0.5, lambda: world.pause(world.router, 6.0))
    world.clock.at(0.55, lambda: fault(world))
    world.run()
    assert {client.error for client in clients} == {""}
    assert 0.0 < max(client.longest_thaw_s for client in clients) < 5.0
