"""Goals for latency decide which node computes a prompt; what a node costs is predicted from its own steps."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from baton.router.nodes.prompt_queue import PromptQueue, QueuedPrompt
from baton.router.nodes.registry import Node
from baton.router.routing.goals import Goals
from baton.router.routing.placement import PlacedPrompt, Placement, Route
from baton.wire.messages.legs import Decode, Prefill
from baton.wire.messages.membership import BOTH, DECODE, PREFILL
from baton.wire.step_cost import StepCost
from tests.router.fake_node import STATUS, make_hello
from tests.router.rig import DEFAULTS, relaying

COST = StepCost(1e-3, 2e-4, 5e-8, 1e-4, 2e-8)
SLOWER = StepCost(*(3 * each for each in (1e-3, 2e-4, 5e-8, 1e-4, 2e-8)))
WITHOUT_PROMPTS = replace(COST, prompt_token_s=0.0, prompt_pair_s=0.0)
NUM_TOKENS = 512
ALONE_S = COST.prompt_s(NUM_TOKENS, 0, 512, 0, 0)
PLACED = PlacedPrompt(NUM_TOKENS, ())
GOALS = Goals(ttft_s=2 * ALONE_S, tpot_s=0.05)


def node(role: str, cost: StepCost | None = COST, **changes: object) -> Node:
    hello = make_hello(role)
    made = Node(hello, "m", 0.0, replace(STATUS, cost=cost))
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def queued(made: Node, *seconds: float) -> Node:
    for each in seconds:
        made.prompts.add(each, 0.0)
    return made


def choose(goals: Goals, prefills: list[Node], decodes: list[Node], now_s: float = 0.0) -> Route:
    route = Route(decodes[0], prefills[0] if prefills else None)
    return Placement(goals).choose(route, prefills, decodes, PLACED, now_s)


def test_a_prefill_node_that_is_in_time_computes_the_prompt() -> None:
    prefill, decode = queued(node(PREFILL), ALONE_S / 2), node(DECODE)
    assert choose(GOALS, [prefill], [decode]) == Route(decode, prefill, ALONE_S, ttft_s=1.5 * ALONE_S)


def test_the_decode_node_keeps_a_prompt_that_would_wait_too_long() -> None:
    prefill, decode = queued(node(PREFILL), ALONE_S, ALONE_S), node(DECODE)
    assert choose(GOALS, [prefill], [decode]) == Route(decode, None, ALONE_S, is_kept=True, ttft_s=ALONE_S)


def test_without_prefill_nodes_the_chosen_node_has_the_prompt_while_it_is_in_time() -> None:
    chosen, idle = queued(node(DECODE), ALONE_S / 2), node(DECODE)
    assert choose(GOALS, [], [chosen, idle]) == Route(chosen, None, ALONE_S, ttft_s=1.5 * ALONE_S)
    late = queued(chosen, ALONE_S)
    assert choose(GOALS, [], [late, idle]) == Route(idle, None, ALONE_S, ttft_s=ALONE_S)


def test_a_prompt_that_every_such_node_would_be_late_with_is_known_to_be_late() -> None:
    chosen, other = queued(node(DECODE), 3 * ALONE_S), queued(node(DECODE), 2 * ALONE_S)
    route = choose(GOALS, [], [chosen, other])
    assert (route.decode, route.prefill) == (other, None)
    assert route.late_s == pytest.approx(ALONE_S)


def test_the_goal_of_a_request_counts_in_place_of_the_routers() -> None:
    prefill, decode = queued(node(PREFILL), ALONE_S, ALONE_S), node(DECODE)
    placed = PlacedPrompt(NUM_TOKENS, (), Goals(4 * ALONE_S, 0.05))
    patient = Placement(GOALS).choose(Route(decode, prefill), [prefill], [decode], placed, 0.0)
    assert patient.prefill is prefill


def test_prompts_of_other_routers_are_waited_for_as_well() -> None:
    prefill, decode = node(PREFILL, num_other_prompt_tokens=2 * NUM_TOKENS), node(DECODE)
    assert choose(GOALS, [prefill], [decode]).is_kept


def test_of_several_prefill_nodes_the_one_that_is_done_first_is_taken() -> None:
    busy, slow, free = queued(node(PREFILL), ALONE_S), node(PREFILL, SLOWER), node(PREFILL)
    assert choose(GOALS, [busy, slow, free], [node(DECODE)]).prefill is free


def test_when_nobody_is_in_time_whoever_is_done_first_computes_it() -> None:
    prefill = queued(node(PREFILL), 5 * ALONE_S)
    nearer, farther = queued(node(DECODE), 3 * ALONE_S), queued(node(DECODE), 4 * ALONE_S)
    assert choose(GOALS, [prefill], [farther, nearer]).decode is nearer
    assert choose(GOALS, [prefill], [queued(node(DECODE), 9 * ALONE_S)]).prefill is prefill


def test_the_progress_of_the_first_prompt_counts() -> None:
    prefill = queued(node(PREFILL), 3 * ALONE_S)
    assert choose(GOALS, [prefill], [node(DECODE)]).is_kept
    assert not choose(GOALS, [prefill], [node(DECODE)], now_s=2.5 * ALONE_S).is_kept


def test_a_decode_node_with_streams_takes_longer_for_a_prompt() -> None:
    prefill, decode = queued(node(PREFILL), 1.2 * ALONE_S), node(DECODE, num_legs=60)
    assert not choose(replace(GOALS, tpot_s=0.012), [prefill], [decode]).is_kept
    assert choose(replace(GOALS, tpot_s=0.5), [prefill], [decode]).is_kept


def test_a_decode_node_whose_streams_miss_their_goal_keeps_nothing() -> None:
    prefill, decode = queued(node(PREFILL), 100.0), node(DECODE, num_legs=100)
    assert not choose(replace(GOALS, tpot_s=0.005), [prefill], [decode]).is_kept
    assert choose(replace(GOALS, tpot_s=0.0), [prefill], [decode]).is_kept


def test_a_node_that_has_computed_no_prompt_is_taken_to_cost_what_another_does() -> None:
    prefill, decode = queued(node(PREFILL), 9 * ALONE_S), node(DECODE, WITHOUT_PROMPTS)
    route = choose(GOALS, [prefill], [decode])
    assert route.is_kept
    assert route.prompt_s == pytest.approx(ALONE_S)


def test_without_any_known_cost_the_policy_decides() -> None:
    prefill, decode = queued(node(PREFILL, None), 1e9), node(DECODE, WITHOUT_PROMPTS)
    assert choose(GOALS, [prefill], [decode]) == Route(decode, prefill)


def test_what_is_cached_costs_nothing() -> None:
    hashes = [bytes([number]) * 16 for number in range(100)]
    prefill = node(PREFILL, cached_hashes=set(hashes))
    decode = node(DECODE)
    placed = PlacedPrompt(NUM_TOKENS, hashes)
    route = Placement(GOALS).choose(Route(decode, prefill), [prefill], [decode], placed, 0.0)
    num_cached = 100 * prefill.hello.layout.block_size
    assert route.prompt_s == pytest.approx(COST.prompt_s(NUM_TOKENS - num_cached, num_cached, 512, 0, 0))


def mixed(prefers: str, **changes: object) -> Node:
    made = node(DECODE, COST, **changes)
    made.hello = replace(made.hello, prefers=prefers)
    made.preference = prefers
    return made


def test_a_stream_goes_where_it_keeps_its_pace() -> None:
    pace = replace(GOALS, tpot_s=0.005)  # about 40 streams
    prefill, full, free = node(PREFILL), node(DECODE, num_legs=60), node(DECODE, num_legs=20)
    for each in (full, free):
        each.hello = replace(each.hello, max_num_seqs=100)
    assert choose(pace, [prefill], [full, free]).decode is free
    assert choose(replace(GOALS, tpot_s=0.0), [prefill], [full, free]).decode is full


def test_a_mixed_node_that_prefers_prompts_generates_when_no_other_keeps_the_pace() -> None:
    pace = replace(GOALS, tpot_s=0.005)
    helper, full = mixed(PREFILL), node(DECODE, num_legs=60)
    route = choose(pace, [helper], [full])
    assert (route.decode, route.prefill, route.late_s) == (helper, None, 0.0)
    plain = choose(pace, [node(PREFILL)], [full])
    assert (plain.decode, plain.is_slow) == (full, True)
    assert plain.late_s > 0


def test_an_answer_of_one_token_stays_where_its_prompt_is_computed() -> None:
    helper, decode = mixed(PREFILL), node(DECODE)
    placement, route = Placement(GOALS), Route(decode, helper)
    for max_tokens, expected in ((1, helper), (2, decode), (None, decode)):
        found = placement.choose(route, [helper], [decode], replace(PLACED, max_tokens=max_tokens), 0.0)
        assert found.decode is expected
    one_token = replace(PLACED, max_tokens=1)
    plain = placement.choose(Route(decode, node(PREFILL)), [node(PREFILL)], [decode], one_token, 0.0)
    assert plain.decode is decode


def test_a_route_says_when_it_would_be_in_time() -> None:
    prefill, decode = queued(node(PREFILL), 5 * ALONE_S), queued(node(DECODE), 3 * ALONE_S)
    assert choose(GOALS, [prefill], [decode]).late_s == pytest.approx(2 * ALONE_S)


def test_a_prompt_that_is_never_in_time_is_late_only_while_others_are_before_it() -> None:
    never = replace(GOALS, ttft_s=ALONE_S / 2)
    assert choose(never, [node(PREFILL)], [node(DECODE)]).late_s == 0.0
    busy = [queued(node(role), ALONE_S / 4) for role in (PREFILL, DECODE)]
    assert choose(never, busy[:1], busy[1:]).late_s == pytest.approx(ALONE_S / 4)


def test_a_queue_forgets_what_was_computed_in_any_order() -> None:
    chance, queue, now_s = random.Random(1), PromptQueue(), 0.0
    waiting: list[QueuedPrompt] = []
    for _ in range(2000):
        now_s += chance.random()
        if waiting and chance.random() < 0.5:
            queue.remove(waiting.pop(chance.randrange(len(waiting))), now_s)
        else:
            waiting.append(queue.add(chance.random(), now_s))
        rest = sum(each.seconds for each in waiting)
        assert rest - max((each.seconds for each in waiting), default=0.0) - 1e-9 <= queue.wait_s(now_s) <= rest + 1e-9
    assert len(queue) == len(waiting)


def came(made: Node, factor: float, count: int) -> Node:
    """`count` first tokens of the node came after `factor` times what was predicted."""
    for _ in range(count):
        made.prompts.computed(made.prompts.add(0.0, 0.0, ALONE_S), factor * ALONE_S)
    return made


def test_predictions_that_were_not_kept_are_corrected_from_then_on() -> None:
    goals = replace(GOALS, ttft_s=1.2 * ALONE_S)
    busy = queued(node(PREFILL), ALONE_S / 10)
    assert not choose(goals, [busy], [node(DECODE)]).is_kept
    assert not choose(goals, [came(busy, 1.3, 15)], [node(DECODE)]).is_kept  # too few to judge by
    assert choose(goals, [came(busy, 1.3, 1)], [node(DECODE)]).is_kept
    late = choose(goals, [busy], [queued(node(DECODE), 9 * ALONE_S)])
    assert late.prefill is busy
    assert late.ttft_s == pytest.approx(1.1 * ALONE_S)
    assert late.late_s == pytest.approx(ALONE_S / 10)  # that is all there is before it
    assert not choose(goals, [came(busy, 1.0, 64)], [node(DECODE)]).is_kept


def test_first_tokens_that_come_long_before_the_goal_teach_nothing() -> None:
    patient = Goals(2.1 * ALONE_S, 0.05)
    assert choose(patient, [node(PREFILL)], [node(DECODE)]).ttft_s == 0.0
    assert choose(GOALS, [node(PREFILL)], [node(DECODE)]).ttft_s == ALONE_S


def test_a_correction_keeps_nine_of_ten_and_is_bounded() -> None:
    made = came(came(node(PREFILL), 1.4, 7), 0.9, 57)
    assert made.prompts.factor == pytest.approx(1.4)
    assert came(made, 0.9, 1).prompts.factor == pytest.approx(0.9)
    assert came(made, 50.0, 64).prompts.factor == 1.5
    assert came(made, 0.01, 64).prompts.factor == 0.5
    for _ in range(64):
        made.prompts.remove(made.prompts.add(0.0, 0.0, ALONE_S), 9.0)  # nobody wants it any more
    assert made.prompts.factor == 0.5


async def test_a_relay_with_goals_gives_a_prompt_to_the_decode_node_while_the_prefill_node_is_busy() -> None:
    hours = StepCost(*(1e6 * each for each in (1e-3, 2e-4, 5e-8, 1e-4, 2e-8)))  # the test takes no part of them
    goals = Goals(ttft_s=1.5 * hours.prompt_s(20, 0, 512, 0, 0), tpot_s=0.0)
    async with relaying(replace(DEFAULTS, goals=goals)) as rig:
        prefill, decode = [await rig.join(role, status=replace(STATUS, cost=hours)) for role in (PREFILL, DECODE)]
        first = rig.call()
        first_leg = await decode.expect(Decode)
        assert first_leg.prefill_peer is not None
        second = rig.call()
        second_leg = await decode.expect(Decode)
        assert second_leg.prefill_peer is None
        assert rig.relay.counters.num_kept_prompts == 1
        prefill.emit(await prefill.expect(Prefill), [7])
        await first.has_tokens(1)
        third = rig.call()
        third_leg = await decode.expect(Decode)
        assert third_leg.prefill_peer is not None
        for call, leg in ((first, first_leg), (second, second_leg), (third, third_leg)):
            decode.emit(leg, [7, 8], 0, finish="length")
            assert await call.result() == [7, 8]
        await rig.settle()


async def test_a_mixed_node_prefills_for_another_one_and_without_goals_keeps_what_it_would_do_both_of() -> None:
    async with relaying(DEFAULTS) as rig:
        address = "tcp://127.0.0.1:9"
        one = await rig.join(DECODE, prefers=PREFILL, peer_address=address)
        other = await rig.join(DECODE, prefers=DECODE, peer_address=address)
        handed = rig.call()
        leg = await other.expect(Decode)
        assert leg.prefill_peer is not None
        assert leg.prefill_peer.node_id == one.hello.node_id
        await one.expect(Prefill)
        rig.registry.prefer(other.hello.epoch, BOTH)
        rig.registry.prefer(one.hello.epoch, PREFILL)
        kept = rig.call()
        assert (await other.expect(Decode)).prefill_peer is None
        for call in (handed, kept):
            await call.cancel()
        await rig.settle()
